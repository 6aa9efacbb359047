"""Do Transformer Engine and apex still take what megatron-core and our optimizer pass them? Signatures, without a GPU.

    python tools/check_backends.py                                  # the installed ones; part of `make gpu-check`
    python tools/check_backends.py --te CHECKOUT --apex CHECKOUT    # source trees, nothing of them is imported

Reads source files only: the keywords of core's `super().__init__` calls against the arguments of the class they reach.
Exit 1 when an argument is passed that is not taken; a library that is absent is named and not an error.
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from megatron_nb.training.optimizer import FUSED_ADAM_ARGUMENTS

CORE = Path(importlib.util.find_spec("megatron.core").origin).parent / "extensions" / "transformer_engine.py"
MODULES = {  # core's class -> where Transformer Engine defines its parent
    "TELinear": ("pytorch/module/linear.py", "Linear"),
    "TELayerNormColumnParallelLinear": ("pytorch/module/layernorm_linear.py", "LayerNormLinear"),
}
NORM = ("pytorch/module/rmsnorm.py", "RMSNorm")
NORM_ARGUMENTS = ("normalized_shape", "eps", "sequence_parallel", "zero_centered_gamma")  # of core's TENorm
ADAM = {"te": "pytorch/optimizers/fused_adam.py", "apex": "optimizers/fused_adam.py"}


def _init(file: Path, name: str) -> ast.FunctionDef:
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ClassDef) and node.name == name:
            return next(item for item in node.body if isinstance(item, ast.FunctionDef) and item.name == "__init__")
    raise ValueError(f"{file} defines no class {name} with an __init__: this release is laid out differently")


def passed(name: str) -> set[str]:
    """Keywords that core's class hands to its parent's __init__; what it adds by **extra_kwargs under a version check too."""
    names: set[str] = set()
    for node in ast.walk(_init(CORE, name)):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "super().__init__":
            names |= {keyword.arg for keyword in node.keywords if keyword.arg}
        if (
            isinstance(node, ast.Subscript)
            and ast.unparse(node.value) == "extra_kwargs"
            and isinstance(node.slice, ast.Constant)
        ):
            names.add(node.slice.value)
    # ub_*: overlap of tensor-parallel communication, one set per release of TE, passed only with tp_comm_overlap (unused here)
    return {name for name in names if not name.startswith("ub_")}


def taken(file: Path, name: str) -> set[str]:
    """Arguments of a class's __init__; everything where it takes **kwargs."""
    arguments = _init(file, name).args
    names = {argument.arg for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)}
    return names | ({"**"} if arguments.kwarg else set())


def compare(what: str, wanted: set[str], file: Path, name: str) -> bool:
    """Print one line; whether all that is passed is taken."""
    accepted = taken(file, name)
    missing = [] if "**" in accepted else sorted(wanted - accepted)
    print(f"{what:44} {len(wanted):3} arguments  " + (f"NOT TAKEN: {', '.join(missing)}" if missing else "all taken"))
    return not missing


def package(name: str, checkout: Path | None) -> Path | None:
    """Folder of the package in a checkout, or where it is installed."""
    if checkout is not None:
        return checkout / name
    spec = importlib.util.find_spec(name)
    return Path(spec.origin).parent if spec and spec.origin else None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--te", type=Path, help="source tree of Transformer Engine")
    parser.add_argument("--apex", type=Path, help="source tree of apex")
    options = parser.parse_args()
    good, te, apex = True, package("transformer_engine", options.te), package("apex", options.apex)
    if te is None:
        print("Transformer Engine is not installed: model.backend=te and optimizer.backend=te are not available here")
    else:
        for ours, (file, theirs) in MODULES.items():
            good &= compare(f"{ours} -> {theirs}", passed(ours), te / file, theirs)
        good &= compare(f"TENorm -> {NORM[1]}", set(NORM_ARGUMENTS), te / NORM[0], NORM[1])
        good &= compare("optimizer.backend=te -> FusedAdam", set(FUSED_ADAM_ARGUMENTS), te / ADAM["te"], "FusedAdam")
    if apex is None or not (apex / ADAM["apex"]).exists():
        print("apex is not installed: optimizer.backend=apex is not available here")
    else:
        good &= compare("optimizer.backend=apex -> FusedAdam", set(FUSED_ADAM_ARGUMENTS), apex / ADAM["apex"], "FusedAdam")
    return int(not good)


if __name__ == "__main__":
    sys.exit(main())
