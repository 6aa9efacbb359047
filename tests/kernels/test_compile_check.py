"""compile_check: the short form passes here, and every limit it sets can be broken."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

KERNELS = Path(__file__).parents[2] / "kernels"
SPEC = importlib.util.spec_from_file_location("compile_check", KERNELS / "compile_check.py")
compile_check = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(compile_check)

GOOD = {"registers": 200, "spills": 0, "local": 0, "shared": 1000, "wgmma": 4, "mma": 0, "tma": 2}
GOOD |= {"serialised": 0, "overwritten": 0}


def case(name="x", matrix=True):
    return compile_check.Case(name, None, {}, {}, {}, matrix)


def test_one_configuration_of_each_kernel_compiles_for_sm_90():
    command = [sys.executable, KERNELS / "compile_check.py", "--short"]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"TRITON_INTERPRET": "1"})
    assert done.returncode == 0, done.stdout + done.stderr
    kernels = "attention forward", "attention keys", "attention queries", "row_statistics", "rms_norm", "swiglu", "rotary"
    for kernel in kernels:
        assert f" {kernel}" in done.stdout


def test_every_launcher_binds_its_arguments_and_compiles_what_it_would_launch():
    command = [sys.executable, KERNELS / "launch_check.py"]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"TRITON_INTERPRET": "1"})
    assert done.returncode == 0, done.stdout + done.stderr
    launched = set(re.findall(r"(\w+\.\w+)(?:,|$)", done.stdout, re.M))
    for path in (KERNELS / "nb_kernels").glob("*.py"):
        for kernel in re.findall(r"\b(\w+)\[\(", path.read_text()):
            assert f"{path.stem}.{kernel}" in launched or kernel == "kernel"  # swiglu launches both of its own by that name


def test_every_module_with_a_kernel_takes_part():
    for path in sorted((KERNELS / "nb_kernels").glob("*.py")):
        text = path.read_text()
        assert ("\n@triton.jit" in text) == ("\ndef compile_cases" in text), path.name


@pytest.mark.parametrize(
    "change, words",
    [
        ({"spills": 8}, "8 bytes of spills"),
        ({"local": 2}, "2 local-memory"),
        ({"shared": 227 * 1024 + 1}, "shared memory"),
        ({"wgmma": 0}, "0 wgmma"),
        ({"mma": 3}, "3 mma.sync"),
        ({"tma": 0}, "no TMA"),
        ({"overwritten": 2}, "2 wgmma are overwritten"),
        ({"error": "CompilationError: x"}, "CompilationError"),
    ],
)
def test_each_limit_is_held(change, words):
    assert not compile_check.faults(case(), GOOD)
    (fault,) = compile_check.faults(case(), GOOD | change)
    assert words in fault


MULTIPLY, WAIT = "HGMMA.64x128x16.F32.BF16 R24, R168, gdesc[UR4].tnspB, R24, gsb0", "WARPGROUP.DEPBAR.LE gsb0, 0x0"


@pytest.mark.parametrize(
    "lines, count",
    [
        ((MULTIPLY, WAIT, "F2FP.BF16.F32.PACK_AB R169, R3, R4"), 0),
        ((MULTIPLY, "F2FP.BF16.F32.PACK_AB R169, R3, R4", WAIT), 1),
        ((MULTIPLY, "LDS.128 R166, [R3]", WAIT), 1),
        ((MULTIPLY, "SHFL.BFLY PT, R171, R3, 0x2, 0x1f", WAIT), 1),
        ((MULTIPLY, "IADD3 R14, P0, R169, 0x2, RZ", "ISETP.GE.AND P0, PT, R168, R2, PT", "STS [R168], R169", WAIT), 0),
        ((MULTIPLY, MULTIPLY.replace("168", "172"), WAIT.replace("0x0", "0x1"), "MOV R170, R3"), 0),
        ((MULTIPLY, MULTIPLY.replace("168", "172"), WAIT.replace("0x0", "0x1"), "MOV R173, R3", WAIT), 1),
        (("MOV R168, R3", MULTIPLY, "@P0 BRA 0x0000", WAIT), 1),  # the next turn of a loop
        (("MOV R168, R3", MULTIPLY, WAIT, "@P0 BRA 0x0000"), 0),
        ((MULTIPLY, "EXIT", "MOV R168, R3"), 0),
        (("HGMMA.64x16x16.F32.BF16 R160, gdesc[UR4], R160, gsb0", "MOV R168, R3", WAIT), 0),
    ],
)
def test_register_operands_that_are_written_before_they_were_read_are_seen(lines, count):
    sass = "\n".join(f"        /*{16 * i:04x}*/   {line} ;   /* 0x0 */\n  /* 0x1 */" for i, line in enumerate(lines))
    assert compile_check.overwritten(sass) == count


def test_unaligned_variants_and_those_that_may_spill_are_only_reported():
    poor = GOOD | {"spills": 8, "local": 2, "tma": 0, "wgmma": 0}
    assert not compile_check.faults(case(), poor, aligned=False)
    assert not compile_check.faults(case("x (may spill)", matrix=False), poor)
    assert compile_check.faults(case(), GOOD | {"shared": 1 << 20}, aligned=False)


def test_a_case_that_does_not_compile_is_its_own_result_and_others_go_on(monkeypatch):
    todo = [["no such case", True], ["rotary D128, 128 turned", True]]
    results = compile_check.run("installed", todo, 1)
    assert "KeyError" in results["no such case", True]["error"]
    assert results["rotary D128, 128 turned", True]["spills"] == 0


def test_a_worker_that_dies_costs_one_case(monkeypatch, tmp_path):
    worker = tmp_path / "worker.py"
    worker.write_text(
        "import json, os, sys\n"
        "for name, aligned in json.load(sys.stdin):\n"
        "    if name == 'b': os._exit(9)\n"
        "    print(json.dumps([name, aligned, {'spills': 0}]), flush=True)\n"
    )
    monkeypatch.setattr(compile_check, "__file__", str(worker))
    results = compile_check.run("installed", [["a", True], ["b", True], ["c", True]], 1)
    assert results["a", True] == results["c", True] == {"spills": 0} and "exited with 9" in results["b", True]["error"]


def test_the_table_goes_between_its_marks(monkeypatch, tmp_path):
    monkeypatch.setattr(compile_check, "HERE", tmp_path)
    page = tmp_path / "README.md"
    page.write_text(f"head\n{compile_check.BEGIN}\nold\n{compile_check.END}\ntail\n")
    compile_check.write_readme(compile_check.table({"x": case()}, {"3.6.0": {("x", True): GOOD}}))
    text = page.read_text()
    assert text.startswith("head\n") and text.endswith("tail\n") and "old" not in text
    assert "| x | -, - | 200 reg, no spills, 1 KiB, 4 wgmma, 2 tma |" in text
    page.write_text("no marks")
    with pytest.raises(ValueError, match="must hold the lines"):
        compile_check.write_readme("")
