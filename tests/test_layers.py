"""The house: imports point down only, some packages are known in one place, and names say what a module is for.

LAYERS is the architecture, lowest first; parts in one layer do not import each other.
"""
from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LAYERS = [
    ["nb_kernels"],
    ["megatron_nb.schema", "megatron_nb.give_up", "megatron_nb.addresses"],
    ["megatron_nb.config", "megatron_nb.records", "megatron_nb.run", "megatron_nb.client", "megatron_nb.listening"],
    ["megatron_nb.sandbox", "megatron_nb.search", "megatron_nb.parallel"],
    ["megatron_nb.model", "megatron_nb.data", "megatron_nb.losses"],
    ["megatron_nb.training", "megatron_nb.rollout"],
    ["megatron_nb.rewards", "megatron_nb.asking"],
    ["megatron_nb.synthesis", "megatron_nb.evals"],
    ["megatron_nb.services"],
    ["megatron_nb.keeper", "megatron_nb.slurm", "megatron_nb.ledger", "megatron_nb.processes"],
    ["megatron_nb.sweep"],
    ["megatron_nb.launch"],
    ["megatron_nb.rl_config", "megatron_nb.chain"],
    ["megatron_nb.chain_check"],
    [
        *("megatron_nb.sft", "megatron_nb.reward_model", "megatron_nb.rl", "megatron_nb.evaluate"),
        *(f"megatron_nb.synthesize_{what}" for what in ("preferences", "complexity", "questions", "trajectories")),
        "megatron_nb.refine_solutions", "megatron_nb.export_model", "megatron_nb.headline",
    ],
    ["megatron_nb.synthesize"],
    ["megatron_nb.cascade"],
    ["tools"],
    ["tests"],
]
RANK = {part: rank for rank, layer in enumerate(LAYERS) for part in layer}
ONLY_IN = {  # package -> the parts or modules that may import it
    "hydra": ["megatron_nb.config"],
    "omegaconf": ["megatron_nb.config"],
    "megatron.core": [
        *("megatron_nb.parallel", "megatron_nb.model", "megatron_nb.training", "megatron_nb.rollout.native"),
        *(f"megatron_nb.rollout.native_{part}" for part in ("attention", "config", "cpu", "sampling", "sessions", "weights")),
    ],
    **dict.fromkeys(
        ["http", "urllib.request", "requests", "httpx", "aiohttp", "openai"],
        ["megatron_nb.client", "megatron_nb.sandbox.service", "megatron_nb.search.service"],
    ),
}
VAGUE = {"utils", "util", "common", "helpers", "helper", "manager", "base", "misc", "core"}
FILES = [path for top in ("kernels", "megatron_nb", "tools") for path in sorted((ROOT / top).rglob("*.py"))]


def module_of(path: Path, root: Path = ROOT) -> str:
    parts = list(path.relative_to(root).with_suffix("").parts)
    if parts[:2] == ["kernels", "nb_kernels"]:
        parts = parts[1:]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def part_of(module: str) -> str | None:
    """The part of the house that a module belongs to; None for packages of others."""
    names = module.split(".")
    return next((part for part in (".".join(names[:2]), names[0]) if part in RANK), None)


def imports(path: Path, module: str) -> Iterator[tuple[int, str]]:
    """(line, absolute name) of everything a file imports, also inside functions; `from a import b` counts as a and a.b."""
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            source = ".".join([*above, *([node.module] if node.module else [])])
            yield node.lineno, source
            yield from ((node.lineno, f"{source}.{alias.name}") for alias in node.names)


def inside(module: str, part: str) -> bool:
    return module == part or module.startswith(f"{part}.")


def violations(path: Path, root: Path = ROOT) -> list[str]:
    """What a file imports and may not, one line each."""
    module = module_of(path, root)
    me, found = part_of(module), []
    for line, name in imports(path, module):
        place, other = f"{path.relative_to(root)}:{line} imports {name}", part_of(name)
        if me and other and other != me and RANK[other] >= RANK[me]:
            found.append(f"{place}: {me} may import only from the layers below it")
        if me and me != "tools":
            for package, allowed in ONLY_IN.items():
                if inside(name, package) and not any(inside(module, one) for one in allowed):
                    found.append(f"{place}: only {', '.join(allowed)} may")
        if me == "nb_kernels" and name.split(".")[0] not in {"nb_kernels", "torch", "triton", *sys.stdlib_module_names}:
            found.append(f"{place}: nb_kernels knows torch and triton only")
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_point_down_and_packages_stay_in_their_place(path):
    assert violations(path) == []


def test_every_module_belongs_to_a_part_of_the_house():
    homeless = [str(path) for path in FILES if part_of(module_of(path)) is None and path.parent.name != "kernels"
                and module_of(path) != "megatron_nb"]  # fmt: skip
    assert homeless == [], "add its part to LAYERS, and to the README's drawing"


def test_names_say_what_a_module_is_for():
    vague = [str(path) for path in FILES if {path.stem, path.parent.name} & VAGUE]
    assert vague == []


@pytest.mark.parametrize(
    ("path", "line", "complaint"),
    [
        ("megatron_nb/model/gpt.py", "from megatron_nb.training.trainer import Trainer", "layers below"),
        ("megatron_nb/model/gpt.py", "from megatron_nb.data import packing", "layers below"),  # a sibling
        ("megatron_nb/model/gpt.py", "from ..training import trainer", "layers below"),
        ("megatron_nb/records.py", "import megatron_nb.run", "layers below"),
        ("megatron_nb/parallel/context.py", "def f():\n    from megatron_nb import sft", "layers below"),
        ("megatron_nb/sft.py", "from megatron_nb.rl import collect", "layers below"),
        ("megatron_nb/losses.py", "import tools.plan", "layers below"),
        ("megatron_nb/launch.py", "from omegaconf import OmegaConf", "only megatron_nb.config may"),
        ("megatron_nb/sft.py", "import hydra.core.config_store", "only megatron_nb.config may"),
        ("megatron_nb/sft.py", "from megatron.core import parallel_state", "only megatron_nb.parallel"),
        ("megatron_nb/rollout/server.py", "import megatron.core", "only megatron_nb.parallel"),
        ("megatron_nb/rollout/server.py", "import urllib.request", "only megatron_nb.client"),
        ("kernels/nb_kernels/attention.py", "import numpy", "torch and triton only"),
        ("kernels/nb_kernels/attention.py", "from megatron_nb.records import Batch", "layers below"),
    ],
)
def test_a_planted_violation_is_caught(tmp_path, path, line, complaint):
    file = tmp_path / path
    file.parent.mkdir(parents=True)
    file.write_text(line)
    found = violations(file, tmp_path)
    assert found and complaint in found[0]


@pytest.mark.parametrize(
    ("path", "line"),
    [
        ("megatron_nb/model/gpt.py", "from megatron_nb.parallel import context\nfrom megatron_nb.model import shape"),
        ("megatron_nb/model/gpt.py", "from . import shape\nimport megatron.core.models.gpt\nimport nb_kernels.attention"),
        ("megatron_nb/rollout/native.py", "import megatron.core.inference"),
        ("megatron_nb/sft.py", "from megatron_nb.launch import open_run\nfrom megatron_nb.training.trainer import Trainer"),
        ("megatron_nb/search/service.py", "import http.server"),
        ("kernels/nb_kernels/attention.py", "import math\nimport triton.language as tl\nfrom nb_kernels.rotary import rotate"),
    ],
)
def test_what_the_house_allows_is_not_caught(tmp_path, path, line):
    file = tmp_path / path
    file.parent.mkdir(parents=True)
    file.write_text(line)
    assert violations(file, tmp_path) == []


@pytest.mark.parametrize("path", [path for path in FILES if path.is_relative_to(ROOT / "tools")], ids=lambda path: path.stem)
def test_a_script_that_needs_its_neighbours_finds_them_from_anywhere(path):
    text = path.read_text()
    needs = any(name.split(".")[0] == "tools" for _, name in imports(path, module_of(path)))
    if needs and '__name__ == "__main__"' in text:
        assert "sys.path.insert(0, str(Path(__file__).parents[" in text
