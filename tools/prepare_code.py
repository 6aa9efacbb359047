"""Makes prompts for code RL out of data sets of programming problems: reads, decontaminates, cleans, and reports.

    python tools/prepare_code.py --source taco=data/taco/ --source apps=data/apps/train.jsonl \\
        --against livecodebench=data/lcb/ --against humaneval=data/HumanEval.jsonl.gz --out data/code.jsonl

Rows may be of LiveCodeBench, APPS, TACO, CodeContests, HumanEval, MBPP or this tool's own. What it does to each, in order: the
same statement as before: left out; 13 words in a row shared with an evaluation set: left out; tests that the reference solution
fails: dropped; limits that leave the reference no margin: raised. Programs run in the sandbox of this machine, or at
--judge-url services. OUT.report.json says by rule what happened, and to which row.

Killed or stopped, it goes on where it was when the same command is given again (OUT.progress holds what is done).
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import hashlib
import json
import logging
import sys
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Iterator
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.logging import RichHandler
from rich.table import Table

from megatron_nb.client import RequestRefused
from megatron_nb.data.code_cleaning import CleaningConfig, clean
from megatron_nb.data.code_problems import FORMATS, problem_row, read_problem, read_problems
from megatron_nb.data.decontamination import Evaluations
from megatron_nb.data.rows import BadRow, data_files, decode, raw_rows
from megatron_nb.rewards.judging import CodeJudge, JudgeConfig, JudgeFailed
from megatron_nb.run import write_atomic
from megatron_nb.sandbox.pool import IsolationMissing

AHEAD = 16  # problems that are judged at the same time
TELL_S = 10.0  # between two lines of progress

log = logging.getLogger("prepare_code")


@dataclass
class Outcome:
    """What became of one row."""

    where: str
    digest: str  # of the row as it was read
    source: str
    row: dict[str, Any] | None = None  # None: left out
    rules: dict[str, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    pairs: list[dict] = field(default_factory=list)  # with evaluation texts
    statement: str = ""  # its digest, whatever its spaces


def main() -> None:
    arguments = parse()
    logging.basicConfig(level=logging.INFO, format="%(message)s", handlers=[RichHandler(show_time=False, show_path=False)])
    try:
        config = CleaningConfig(**{one.name: getattr(arguments, one.name) for one in fields(CleaningConfig)})
        judging = JudgeConfig(arguments.judge_url, arguments.workers, arguments.isolation, arguments.token_env)
        sources, against = ([pair(text) for text in given] for given in (arguments.source, arguments.against))
        evaluations = evaluation_texts(against, arguments.n, arguments.common)
        work = Preparation(arguments, sources, config, evaluations)
        judge = CodeJudge(judging)
        try:
            asyncio.run(work.run(judge))
        finally:
            judge.close()
        report = work.finish()
    except (ValueError, OSError, JudgeFailed, IsolationMissing) as error:
        raise SystemExit(f"error: {error}") from error
    Console(width=None if sys.stdout.isatty() else 140).print(table(report), f"{arguments.out}, {work.report_path}", sep="\n")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = CleaningConfig()
    add = parser.add_argument
    add("--source", action="append", required=True, metavar="NAME=PATH", help="file, folder or glob; repeatable")
    add("--against", action="append", default=[], metavar="NAME=PATH", help="evaluation set to keep out; repeatable")
    add("--out", type=Path, required=True, help="the file of rows to write, .jsonl")
    add("--format", choices=FORMATS, default="auto", help="of all sources; default: told by each row's keys")
    add("--bad-rows", choices=("error", "skip"), default="error", help="a row that cannot be read; default %(default)s")
    add("--n", type=int, default=13, help="words in a row that make an overlap; default %(default)s")
    add("--common", type=int, default=3, help="evaluation texts beyond which a run of words is a phrase; default %(default)s")
    add("--no-clean", action="store_true", help="run no reference solutions")
    add("--judge-url", action="append", default=[], metavar="URL", help="a judge service; repeatable; default: a sandbox here")
    add("--token-env", metavar="NAME", help="environment variable with the services' token")
    add("--workers", type=int, help="of the sandbox here; default: one per core")
    add("--isolation", choices=("bubblewrap", "none"), default="bubblewrap", help="none runs solutions unprotected")
    add("--references", type=int, default=default.references, help="solutions tried for each problem; default %(default)s")
    add("--margin", type=float, default=default.margin, help="limit over the reference's need; default %(default)s")
    add("--max-time-s", type=float, default=default.max_time_s, help="needing more drops a problem; default %(default)s")
    add("--max-memory-mb", type=int, default=default.max_memory_mb, help="for references; default %(default)s")
    add("--min-tests", type=int, default=default.min_tests, help="that have to be left; default %(default)s")
    add("--max-tests", type=int, help="for each problem; more are thinned out evenly")
    add("--unchecked", choices=("keep", "drop"), default="keep", help="problems without a reference; default %(default)s")
    return parser.parse_args()


def pair(text: str) -> tuple[str, str]:
    """NAME=PATH."""
    name, found, path = text.partition("=")
    if not (name and found and path):
        raise ValueError(f"{text!r} must have the form NAME=PATH")
    return name, path


def evaluation_texts(against: list[tuple[str, str]], n: int, common: int) -> Evaluations:
    """The statements of the evaluation sets. Raises BadRow."""
    evaluations = Evaluations(n, common)
    for name, path in against:
        for _, problem in read_problems(path):
            evaluations.add(name, problem.name, problem.text)
    return evaluations


class Preparation:
    """The rows of all sources one after the other; what is done stands in a file from which the same command goes on."""

    def __init__(self, arguments: argparse.Namespace, sources: list[tuple[str, str]], config: CleaningConfig,
                 evaluations: Evaluations):  # fmt: skip
        self.arguments, self.sources, self.config, self.evaluations = arguments, sources, config, evaluations
        self.progress_path = arguments.out.with_name(f"{arguments.out.name}.progress")
        self.report_path = arguments.out.with_name(f"{arguments.out.name}.report.json")
        if arguments.out.is_dir():
            raise ValueError(f"--out {arguments.out} is a folder: name the file of rows to write")
        self._seen: set[str] = set()

    def settings(self) -> dict[str, Any]:
        """What has to be the same for going on."""
        names = ("source", "against", "format", "bad_rows", "n", "common", "no_clean")
        return {**{name: getattr(self.arguments, name) for name in names}, **asdict(self.config)}

    async def run(self, judge: CodeJudge) -> None:
        """Work through what is not done. Raises BadRow, ValueError, JudgeFailed, IsolationMissing."""
        done = self._resumed()
        total = sum(1 for _, path in self.sources for file in data_files(path) for _ in raw_rows(file))
        counts, began, told = Counter(), time.monotonic(), time.monotonic()
        self.arguments.out.parent.mkdir(parents=True, exist_ok=True)
        begun = self.progress_path.exists()
        with open(self.progress_path, "a") as progress:
            if not begun:
                progress.write(json.dumps(self.settings()) + "\n")
            async for outcome in self._outcomes(judge, done):
                progress.write(json.dumps(asdict(outcome)) + "\n")
                progress.flush()
                counts["kept" if outcome.row else "left out"] += 1
                if time.monotonic() - told > TELL_S:
                    told, rate = time.monotonic(), counts.total() / (time.monotonic() - began)
                    left = (total - len(done) - counts.total()) / rate
                    log.info("%d/%d rows, %d kept, %.1f rows/s, about %.0f s left", len(done) + counts.total(), total,
                             counts["kept"], rate, left)  # fmt: skip

    def finish(self) -> dict[str, Any]:
        """Write the rows and the report, and take the progress away."""
        report: dict[str, Any] = {"sources": {}, "settings": self.settings(), "rows": []}
        partial = self.arguments.out.with_name(f".{self.arguments.out.name}.partial")
        with open(partial, "w") as file:
            for outcome in self._done():
                counts = report["sources"].setdefault(outcome.source, {"rows": 0, "kept": 0, "tests": 0, "rules": Counter()})
                counts["rows"] += 1
                counts["rules"].update(outcome.rules)
                if outcome.row:
                    counts["kept"] += 1
                    counts["tests"] += len(outcome.row["tests"])
                    file.write(json.dumps(outcome.row, ensure_ascii=False) + "\n")
                if outcome.rules or outcome.notes:
                    told = {"where": outcome.where, "kept": outcome.row is not None}
                    report["rows"].append({**told, "rules": outcome.rules, "notes": outcome.notes})
        report["decontamination"] = self.evaluations.report()
        if not any(counts["kept"] for counts in report["sources"].values()):
            partial.unlink()
            rules = sum((counts["rules"] for counts in report["sources"].values()), Counter())
            raise ValueError(f"no row is left: {dict(rules)}; look into {self.progress_path}")
        partial.replace(self.arguments.out)
        write_atomic(self.report_path, json.dumps(report, indent=1) + "\n")
        self.progress_path.unlink()
        return report

    # ------------------------------------------------------------------ what is done
    def _done(self) -> Iterator[Outcome]:
        with open(self.progress_path) as file:
            next(file, None)
            for line in file:
                if not line.endswith("\n"):
                    return  # cut off by a kill
                yield Outcome(**json.loads(line))

    def _resumed(self) -> list[tuple[str, str]]:
        """(where, digest) of the rows that are done. ValueError when they were done in another way."""
        if not self.progress_path.exists():
            return []
        text = self.progress_path.read_bytes()
        whole = text[: text.rfind(b"\n") + 1]
        if whole != text:
            self.progress_path.write_bytes(whole)
        if whole.count(b"\n") < 2:  # no row is done yet
            self.progress_path.unlink()
            return []
        begun = json.loads(whole[: whole.index(b"\n")])
        if begun["bad_rows"] == "error":  # none was left out so far: later ones may be
            begun["bad_rows"] = self.arguments.bad_rows
        if begun != json.loads(json.dumps(self.settings())):
            raise ValueError(f"{self.progress_path} was begun with other settings: give those, or remove it to begin anew")
        done = []
        for outcome in self._done():
            self._seen.add(outcome.statement)
            self.evaluations.remember(outcome.pairs)
            done.append((outcome.where, outcome.digest))
        log.info("going on after %d rows that are done (%s)", len(done), self.progress_path)
        return done

    # ------------------------------------------------------------------ the rows
    async def _outcomes(self, judge: CodeJudge, done: list[tuple[str, str]]) -> AsyncIterator[Outcome]:
        """In the order of the rows; AHEAD of them at work."""
        window: deque[asyncio.Task[Outcome]] = deque()
        try:
            for number, (source, where, raw) in enumerate(self._rows()):
                digest = hashlib.sha256(raw if isinstance(raw, bytes) else json.dumps(raw).encode()).hexdigest()[:16]
                if number < len(done):
                    if done[number] != (where, digest):
                        raise ValueError(f"{where} is not what it was: remove {self.progress_path} to begin anew")
                    continue
                window.append(asyncio.create_task(self._outcome(Outcome(where, digest, source), raw, judge)))
                await asyncio.sleep(0)  # so that the row takes its statement before the next one
                while len(window) >= AHEAD:
                    yield await window.popleft()
            while window:
                yield await window.popleft()
        finally:
            for task in window:
                task.cancel()
            await asyncio.gather(*window, return_exceptions=True)

    def _rows(self) -> Iterator[tuple[str, str, bytes | dict[str, Any]]]:
        for source, path in self.sources:
            for file in data_files(path):
                for where, raw in raw_rows(file):
                    yield source, where, raw

    async def _outcome(self, outcome: Outcome, raw: bytes | dict[str, Any], judge: CodeJudge) -> Outcome:
        try:
            problem = read_problem(decode(outcome.where, raw), outcome.where, self.arguments.format)
        except BadRow as error:
            if self.arguments.bad_rows == "error":
                raise
            outcome.rules, outcome.notes = {"bad row": 1}, [str(error)]
            return outcome
        problem.name = f"{outcome.source}/{problem.name}"
        outcome.statement = hashlib.sha256(" ".join(problem.text.split()).encode()).hexdigest()[:16]
        if outcome.statement in self._seen:
            outcome.rules = {"statement given twice": 1}
            return outcome
        self._seen.add(outcome.statement)
        if found := self.evaluations.overlaps(problem.text, problem.name):
            outcome.pairs = [{"id": problem.name, **asdict(one)} for one in found]
            outcome.rules = {"overlaps with an evaluation set": 1}
            outcome.notes = [f"{one.set} {one.item}: {one.excerpt}" for one in found[:3]]
            return outcome
        if self.arguments.no_clean:
            outcome.row = problem_row(problem)
            return outcome
        try:
            cleaned = await clean(problem, functools.partial(judge.verdicts, broken=True), self.config)
            if cleaned.rules["test is broken"]:
                await judge.check()  # raises when it is not the test that is broken
        except RequestRefused as error:  # a service finds the row itself wrong, or too large
            if self.arguments.bad_rows == "error":
                raise BadRow.at(outcome.where, "it is refused", str(error), "--bad-rows skip leaves it out") from error
            outcome.rules, outcome.notes = {"refused by the judge service": 1}, [str(error)]
            return outcome
        outcome.rules, outcome.notes = {rule: n for rule, n in cleaned.rules.items() if n}, cleaned.notes
        outcome.row = problem_row(cleaned.problem) if cleaned.problem else None
        return outcome


def table(report: dict[str, Any]) -> Table:
    """Sources by rule."""
    found = Table(title="code problems")
    rules = sorted({rule for counts in report["sources"].values() for rule in counts["rules"]})
    for name in ("source", "rows", "kept", "tests", *rules):
        found.add_column(name, justify="left" if name == "source" else "right")
    for name, counts in report["sources"].items():
        numbers = [counts["rows"], counts["kept"], counts["tests"], *(counts["rules"].get(rule, 0) for rule in rules)]
        found.add_row(name, *(f"{number:,}" for number in numbers))
    met = "; ".join(f"{name}: {one['met']} of {one['texts']} texts met" for name, one in
                    report["decontamination"]["sets"].items())  # fmt: skip
    found.caption = met or "compared with no evaluation set"
    return found


if __name__ == "__main__":
    main()
