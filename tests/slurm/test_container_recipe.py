"""The container's recipe fits the project: versions that setup.py accepts, every argument given, every file there."""

import ast
import re
import subprocess
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from slurm.container.smoke_test import PACKAGES, pinned

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "slurm" / "container"


def requirements() -> dict[str, Requirement]:
    """Every requirement that setup.py names, extras too."""
    words = [node.value for node in ast.walk(ast.parse((ROOT / "setup.py").read_text())) if isinstance(node, ast.Constant)]
    told = re.compile(r"[\w.-]+(\[[\w,-]+\])?[<>=]=?[^ ]+")
    named = [Requirement(word) for word in words if isinstance(word, str) and told.fullmatch(word)]
    return {one.name: one for one in named}


@pytest.mark.parametrize("key", sorted(PACKAGES))
def test_pinned_versions_are_ones_that_setup_py_accepts(key):
    required = requirements()[PACKAGES[key]]
    assert required.specifier.contains(pinned()[key]), f"{key}={pinned()[key]} is not {required}"


def test_cuda_of_the_image_is_that_of_the_extras():
    major = re.search(r"cuda:(\d+)\.", pinned()["BASE_IMAGE"])[1]
    assert f"core-cu{major}" in requirements()["transformer-engine"].extras
    assert f"nvidia-dali-cuda{major}0" in requirements()


def test_every_argument_of_the_dockerfile_is_given_by_the_build_script_and_every_file_is_there():
    dockerfile, script = (FOLDER / "Dockerfile").read_text(), (FOLDER / "build.sh").read_text()
    for name in re.findall(r"^ARG (\w+)$", dockerfile, re.MULTILINE):
        assert name in pinned() and re.search(rf"for name in .*\b{name}\b", script)
    for sources in re.findall(r"^COPY (.+) \S+$", dockerfile, re.MULTILINE):
        assert all((ROOT / source).exists() for source in sources.split())


def test_bash_can_read_the_build_script():
    assert subprocess.run(["bash", "-n", str(FOLDER / "build.sh")]).returncode == 0
