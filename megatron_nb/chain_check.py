"""What every stage of a chain says of itself before the first one begins: its own dry run, and inputs that are not there."""

from __future__ import annotations

import contextlib
import functools
import glob
import io
import logging
import multiprocessing
import os
import re
import signal
import traceback
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

from megatron_nb.chain import Link
from megatron_nb.config import ConfigError, diff, flatten, from_yaml, to_yaml
from megatron_nb.launch import is_free
from megatron_nb.processes import die_with
from megatron_nb.training.preflight import NO_FILE

# keys whose values are files and folders that a stage reads
INPUTS = ("path", "checkpoint", "init_from", "corpus", "questions", "search", "tokenizer", "exclude")
SERVED = r"launch\.services\.[^.]+\.values\.(model|index)"
SCRIPT = ", for sbatch:\n"  # what launch.py puts before a script


@dataclass
class Checked:
    """A link that is not done, looked at."""

    report: str = ""  # what its dry run prints below the configuration
    problem: str = ""  # by which it would end
    missing: list[tuple[str, str]] = field(default_factory=list)  # (key, path) of inputs that nobody makes and are not there
    later: list[str] = field(default_factory=list)  # names of stages that must have made something before more can be said


def check_links(links: list[Link]) -> dict[str, Checked]:
    """Every link that is not done, by name. In processes of their own: a job's look at itself leaves nothing behind here."""
    open_ = [link for link in links if not link.done]
    if not open_:
        return {}
    fork, leave = multiprocessing.get_context("fork"), functools.partial(_leave_with, os.getpid())
    with ProcessPoolExecutor(min(len(open_), 4), mp_context=fork, initializer=leave) as pool:
        told = list(pool.map(_dry_run, [link.module for link in open_], [link.config for link in open_]))
    return {link.name: _judged(link, links, *said) for link, said in zip(open_, told)}


def _leave_with(parent: int) -> None:
    """A pool's workers would wait for a killed parent's next word for ever; Ctrl-C is the parent's to answer."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    die_with(parent)


def _dry_run(module: str, config: Any) -> tuple[str, str]:
    """(report, problem) of a job."""
    config.launch.dry_run, said = True, io.StringIO()
    logging.disable(logging.WARNING)
    try:
        with contextlib.redirect_stdout(said):
            import_module(module).main(config)
    except (ValueError, OSError) as error:
        return "", str(error)
    except Exception:  # a bug: the chain must not begin, and its other stages are still to be looked at
        return "", traceback.format_exc()
    report = said.getvalue().removeprefix(to_yaml(config)).strip("\n")
    if SCRIPT in report:
        report = report.partition(SCRIPT)[0].rpartition("\n\n")[0]
    return report, ""


def _judged(link: Link, links: list[Link], report: str, problem: str) -> Checked:
    """What a dry run said, in the light of what earlier stages have yet to make."""
    told = (line for line in report.split("\n") if not line.endswith(NO_FILE))  # an earlier stage may make it, see below
    found = Checked("\n".join(told), problem)
    waiting = {other.name: other.run for other in links if not other.done}
    for key, value in inputs_of(link.config):
        if Path(value).absolute() == link.run.parent:  # the chain's own folder
            continue
        maker = next((name for name, run in waiting.items() if Path(value).absolute().is_relative_to(run)), None)
        if maker is not None:
            if str(value) in problem or str(waiting[maker]) in problem:
                found.later.append(maker)
        elif not Path(value).exists() and not glob.glob(value, recursive=True):
            found.missing.append((key, value))
            if str(value) in problem:
                found.problem = ""
    if found.later:
        found.problem = ""
    return found


def inputs_of(config: Any) -> list[tuple[str, str]]:
    """(dotted key, path) of everything a job reads, and of what its servers read."""
    told, only = flatten(config), getattr(config, "only", None)
    left_out = [f"tasks.{name}." for name in getattr(config, "tasks", {}) if only and name not in only]
    return [(key, value) for key, value in told.items() if isinstance(value, str) and value and "://" not in value
            and (key.rpartition(".")[2] in INPUTS or re.fullmatch(SERVED, key))
            and not any(key.startswith(task) for task in left_out)]  # fmt: skip


def absent(checked: dict[str, Checked]) -> list[str]:
    """A line for every path that is not there: many links may read one file, each by a key of its own."""
    wanted: dict[str, dict[str, list[str]]] = {}
    for name, found in checked.items():
        for key, path in found.missing:
            wanted.setdefault(path, {}).setdefault(key, []).append(name)
    readers = {path: (f"{key} of {', '.join(names)}" for key, names in keys.items()) for path, keys in wanted.items()}
    return [f"{path}: {'; '.join(told)}" for path, told in readers.items()]


def changed_since(link: Link) -> dict[str, tuple[Any, Any]]:
    """{key: (then, now)} of what a stage that is done was made with and would not be now."""
    try:
        then = from_yaml(link.run / "config.yaml", type(link.config))
    except (OSError, ValueError):  # an older version of this project wrote it, or none did
        return {}
    counts = ("num_steps",)  # a run may go on to more of them, but here nobody lets it
    return {key: pair for key, pair in diff(then, link.config).items() if key in counts or not is_free(key)}


def refuse(links: list[Link], checked: dict[str, Checked]) -> None:
    """ConfigError naming every stage that cannot run, or stay, as things are."""
    lines, done = [], {link.name for link in links if link.done}
    makers = {link.name for link in links if link.searches is None}  # a search makes nothing: a stage may be done without
    for link in links:
        if link.name in done and (gone := [name for name in link.waits_for if name in makers - done]):
            lines.append(f"  {link.name} is done, but {gone[0]}, which it is made from, is not: from_stage={gone[0]} does both")
    for name, found in checked.items():
        lines += [f"  {name}: {found.problem}"] if found.problem else []
    lines += [f"  not there: {line}" for line in absent(checked)]
    if lines:
        raise ConfigError("these stages could not run, so none is begun:\n" + "\n".join(lines))
