"""The tasks there are: the name in YAML -> the class. Your own are named by package.module.Class."""

from __future__ import annotations

import importlib
from typing import Any

from megatron_nb.evals.task import Task
from megatron_nb.rollout.engine import Sampling
from megatron_nb.schema import ConfigError, build

KINDS = {
    "code": "megatron_nb.evals.code.Code",
    "math": "megatron_nb.evals.math.Math",
    "choice": "megatron_nb.evals.choice.Choice",
    "instructions": "megatron_nb.evals.instructions.Instructions",
    "preference": "megatron_nb.evals.preference.Preference",
    "rubric": "megatron_nb.evals.rubric.Rubric",
    "bfcl": "megatron_nb.evals.bfcl.Bfcl",
    "user_simulator": "megatron_nb.evals.user_simulator.UserSimulator",
    "search_qa": "megatron_nb.evals.search_qa.SearchQa",
}


def make_task(name: str, settings: dict[str, Any], sampling: Sampling) -> Task:
    """The task that tasks.NAME describes. ConfigError for an unknown kind or key, ValueError for a value that cannot be."""
    key, kind = f"tasks.{name}", settings.get("kind", name)
    module, _, attribute = KINDS.get(kind, str(kind)).rpartition(".")
    if not module:
        raise ConfigError(f"{key}.kind={kind!r} must be one of {', '.join(KINDS)}, or your own package.module.Class")
    try:
        made = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"{key}.kind={kind!r} cannot be imported ({type(error).__name__}: {error}): check its name and "
                          "PYTHONPATH") from error  # fmt: skip
    return made(name, build(made.Config, {"kind": kind, **settings}, key), sampling)
