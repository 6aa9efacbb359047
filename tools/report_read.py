"""What the folder of a run or of a cascade holds, as the report page wants it. Anything may be missing: a run may be half done.

Rows of metrics.jsonl are merged by step, the later attempt's in the place of the earlier's. Rollouts lose their tokens while
they are read, so that a file of episodes of 256k tokens costs what its words cost.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from tools.rollouts_read import Change, Episode, changes
from tools.status import Status, rows_of, status_of

LOG_BYTES = 20_000_000  # of one log that are read at most
PER_TOKEN = ("ids", "prompt_ids", "logprob", "weight_version", "turn_id", "ratio", "turns")
LOG_LINE = re.compile(r"(\S+ \S+) (WARNING|ERROR|CRITICAL) ([\w.]+): (.*)")


@dataclass
class Trouble:
    """Warnings or errors of the logs that differ in numbers and quotations only."""

    level: str
    logger: str
    count: int
    first: str  # when
    example: str


@dataclass
class RunRead:
    """One run folder."""

    name: str
    folder: Path
    status: Status
    ledger: dict[str, Any] = field(default_factory=dict)  # its entry in the cascade's ledger
    start_from: str | None = None  # the stage whose checkpoint it started from
    evaluates: str | None = None  # an evaluation of a chain: the stage whose checkpoint it asks, "" for the model before all

    @cached_property
    def config(self) -> dict[str, Any]:
        """Empty before the run began."""
        path = self.folder / "config.yaml"
        return (yaml.safe_load(path.read_text()) or {}) if path.exists() else {}

    @cached_property
    def summary(self) -> dict[str, float]:
        return read_json(self.folder / "summary.json") or self.ledger.get("metrics") or {}

    @cached_property
    def rows(self) -> list[dict[str, Any]]:
        """metrics.jsonl by step."""
        by_step: dict[int, dict[str, Any]] = {}
        for row in rows_of(self.folder):
            by_step.setdefault(row["step"], {}).update(row)
        return [by_step[step] for step in sorted(by_step)]

    def series(self, key: str) -> list[tuple[int, float | None]]:
        """(step, value) where the key is told; None where it was no finite number."""
        return [(row["step"], row[key]) for row in self.rows if key in row]

    @property
    def keys(self) -> list[str]:
        """Of the metrics, in the order met."""
        return list(dict.fromkeys(key for row in self.rows for key in row if key not in ("step", "time")))

    @cached_property
    def results(self) -> dict[str, dict[str, float]]:
        """Of an evaluation: {task: {metric: value}}."""
        return read_json(self.folder / "results.json") or {}

    @property
    def before_after(self) -> dict[str, tuple[float, float]]:
        """{quantity: (before, after)} of the summary."""
        names = [name.removesuffix("_before") for name in self.summary if name.endswith("_before")]
        found = {name: (self.summary[f"{name}_before"], self.summary.get(f"{name}_after")) for name in names}
        if "loss_first" in self.summary and "loss_last" in self.summary:
            found["loss"] = (self.summary["loss_first"], self.summary["loss_last"])
        return {name: pair for name, pair in found.items() if pair[1] is not None}

    @property
    def reports(self) -> list[Path]:
        """What a synthesis wrote about its rows."""
        return [path.with_name(name) for path in sorted(self.folder.glob("*/report.json"))
                if (name := next((n for n in ("report.md", "README.md") if path.with_name(n).exists()), None))]  # fmt: skip

    def troubles(self) -> list[Trouble]:
        """Warnings and errors in the logs of all attempts and ranks; the most frequent first, errors before warnings."""
        found: dict[tuple[str, str, str], Trouble] = {}
        for path in sorted(self.folder.glob("logs/attempt-*/rank-*.log")):
            for when, level, logger, text in log_lines(path):
                key = (level, logger, re.sub(r"\d[\d.,]*|'[^']*'|\"[^\"]*\"", "#", text)[:60])
                one = found.setdefault(key, Trouble(level, logger, 0, when, text))
                one.count += 1
        return sorted(found.values(), key=lambda one: (one.level == "WARNING", -one.count))

    def answers(self) -> tuple[str, dict[int, list[Episode]]]:
        """(heldout or step, {step: episodes} of the first and the last file); held-out prompts where there are any."""
        for kind in ("heldout", "step"):
            files = sorted((self.folder / "rollouts").glob(f"{kind}-*.jsonl"))
            if files:
                steps = {int(path.stem.split("-")[1]): path for path in dict.fromkeys((files[0], files[-1]))}
                return kind, {step: read_light(path, step) for step, path in steps.items()}
        return "", {}


def read_json(path: Path) -> Any:
    """None when there is no such file. ValueError, naming it, when it holds something else."""
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise ValueError(f"{path}: it is no JSON ({error}): it was edited or cut off; write it again or remove it") from error


def log_lines(path: Path) -> Iterator[tuple[str, str, str, str]]:
    """(when, level, logger, text) of the warnings and errors."""
    with open(path, errors="replace") as file:
        for line in file:
            if found := LOG_LINE.match(line):
                yield found.groups()
            if file.buffer.tell() > LOG_BYTES:
                return


def read_light(path: Path, step: int) -> list[Episode]:
    """The episodes of a file of rollouts, without their tokens; lines that a kill cut off are left out."""
    episodes: dict[tuple[str, int], Episode] = {}
    with open(path, encoding="utf-8", newline="\n") as file:
        for line in file:
            if not line.endswith("\n"):
                break
            row = json.loads(line)
            row["sampled_mask"] = (sum(row["sampled_mask"]),)  # an episode counts its tokens by the mask's sum
            row |= {name: () for name in PER_TOKEN}
            episodes.setdefault((row["group_id"], row["index"]), Episode(step, [])).rows.append(row)
    for episode in episodes.values():
        episode.rows.sort(key=lambda row: row["segment"])
    return list(episodes.values())


def changed_most(sides: dict[int, list[Episode]], count: int) -> list[Change]:
    """Prompts of both files whose mean reward changed most: up to `count` that rose, then up to `count` that fell."""
    if len(sides) < 2:
        return []
    found = [(change.of("reward"), change) for change in changes(*sides.values())]
    found = sorted(((by, change) for by, change in found if by), key=lambda pair: -pair[0])
    rose, fell = [c for by, c in found if by > 0], [c for by, c in found if by < 0]
    return rose[:count] + fell[::-1][:count]


def flat(config: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested keys with dots; lists and empty mappings are values."""
    found: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, dict) and value:
            found |= flat(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = value
    return found


def differences(run: RunRead, before: list[RunRead]) -> tuple[RunRead, list[tuple[str, Any, Any]], list[str]] | None:
    """(compared with, [(key, there, here)], keys of one side only): the last stage of the same job, else the one before."""
    known = [other for other in before if other.config]
    if not run.config or not known:
        return None
    same = [other for other in known if job_of(other.config) == job_of(run.config)]
    other = (same or known)[-1]
    there, here = flat(other.config), flat(run.config)
    skip = ("name", "runs_dir", "init_from")
    changed = [(key, there[key], here[key]) for key in here if key in there and there[key] != here[key] and key not in skip]
    return other, changed, sorted(there.keys() ^ here.keys())


def job_of(config: dict[str, Any]) -> frozenset[str]:
    """What tells jobs apart: the sections of their configuration."""
    return frozenset(config) - {"prompt_filter"}


def stages_of(folder: Path) -> list[RunRead]:
    """The stages of a cascade in order; the runs below a folder without a chain, in the order begun; or the run itself.

    ValueError when there is neither.
    """
    if not folder.is_dir():
        raise ValueError(f"{folder} is no folder: give the folder of a run or of a cascade, such as runs/NAME")
    chain, ledger = read_json(folder / "chain.json") or {}, read_json(folder / "ledger.json") or {}
    links = {link["name"]: link for link in chain.get("links", [])}
    if chain:
        names = chain["stages"]
    elif is_run(folder):
        return [RunRead(folder.resolve().name, folder, status_of(folder, folder.resolve().name, 12))]
    else:
        below = [path for path in folder.iterdir() if is_run(path) and ".before-" not in path.name]
        names = [path.name for path in sorted(below, key=began)]
    if not names:
        raise ValueError(f"{folder} holds no run (no config.yaml), no chain.json and no run below it: give runs/NAME")
    told = {stage["name"]: stage for stage in ledger.get("stages", [])}
    return [
        RunRead(name, folder / name, status_of(folder / name, name, 12), told.get(name, {}),
                links.get(name, {}).get("start_from"), links.get(name, {}).get("evaluates"))
        for name in names
    ]  # fmt: skip


def is_run(folder: Path) -> bool:
    return (folder / "config.yaml").exists() and (folder / "logs").is_dir()


def began(folder: Path) -> float:
    first = sorted(folder.glob("logs/attempt-*/config.yaml"), key=lambda path: path.stat().st_mtime)
    return (first[0] if first else folder / "config.yaml").stat().st_mtime


def scores_of(run: RunRead) -> dict[tuple[str, str], tuple[float, str]]:
    """{(task, item): (mean score of its attempts, the answer of the first)} of an evaluation; invalid attempts left out."""
    found: dict[tuple[str, str], list[tuple[float, str]]] = {}
    for path in sorted(run.folder.glob("outcomes/*.jsonl")):
        for line in path.read_text(encoding="utf-8").split("\n"):
            if line and (row := json.loads(line))["score"] is not None:
                found.setdefault((path.stem, row["item"]), []).append((row["score"], row["answer"]))
    return {key: (sum(score for score, _ in its) / len(its), its[0][1]) for key, its in found.items()}


def reasons(episodes: list[Episode]) -> Counter[str]:
    """Why rollouts have no reward."""
    return Counter(re.sub(r"\d[\d.,]*", "#", one.reason)[:120] for one in episodes if one.reward is None)
