"""Synthesis of search trajectories: a teacher attempts questions with tools; right ones are kept, their turns judged.

python -m megatron_nb.synthesize_trajectories [overrides]
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
from collections.abc import Awaitable
from dataclasses import dataclass, field
from typing import Any, Literal

from megatron_nb.asking.ledger import Ledger, Progress, ledger_name
from megatron_nb.client import ClientConfig, RequestFailed
from megatron_nb.config import job
from megatron_nb.data.rows import BadRow, data_files, decode, raw_rows
from megatron_nb.data.tokenizer import load_tokenizer
from megatron_nb.launch import LaunchConfig, elsewhere, open_run
from megatron_nb.rewards.critic import CriticConfig, judge_turns, model_critic
from megatron_nb.rewards.critic_steps import CRITERIA, Task, Verdict, steps_of
from megatron_nb.rollout.toolbox import Toolbox
from megatron_nb.rollout.tools import ToolsConfig
from megatron_nb.run import Run
from megatron_nb.schema import flatten
from megatron_nb.synthesis.trajectories import AttemptConfig, Attempts, attempt_all
from megatron_nb.synthesis.trajectory_export import row_of, statistics, write_all
from megatron_nb.synthesis.trajectory_rules import AnswerConfig, AnswerFilter, calls_of
from megatron_nb.synthesis.trajectory_teacher import TeacherConfig, Teachers

log = logging.getLogger(__name__)
FREE_TOOLS = ("limits", "code.workers")  # settings of tools that change no result


@dataclass
class TrajectoriesConfig:
    """One stage of trajectories. One process; everything under way runs in its event loop."""

    questions: str = ""  # rows of synthesize_questions (or {"question", "answer"}): a file, a folder or a glob
    name: str | None = None  # run folder runs_dir/name; None: derived from the configuration
    runs_dir: str = "runs"
    seed: int = 1234
    limit: int | None = None  # questions that are taken at most: the first ones
    attempts: int = 4  # at each question, until `keep` are kept
    keep: int = 1
    concurrency: int = 32  # questions under way at once
    wire: Literal["hermes", "mcp"] = "hermes"  # of the exported rows
    tokenizer: str | None = None  # folder: tokens of the tools' limits and markers to break are its; None: words are counted
    attempt: AttemptConfig = field(default_factory=AttemptConfig)
    teacher: TeacherConfig = field(default_factory=TeacherConfig)
    tools: ToolsConfig = field(default_factory=ToolsConfig)
    answer: AnswerConfig = field(default_factory=AnswerConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    launch: LaunchConfig = field(default_factory=LaunchConfig)

    def __post_init__(self):
        for name in ("attempts", "keep", "concurrency"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        if self.limit is not None and self.limit < 1:
            raise ValueError(f"limit={self.limit} must be at least 1, or null for all questions")
        if self.keep > self.attempts:
            raise ValueError(f"keep={self.keep} must not be more than attempts={self.attempts}")
        if self.seed < 0:
            raise ValueError(f"seed={self.seed} must not be negative")


def read_questions(path: str) -> list[dict[str, Any]]:
    """The question rows, each with an id. Raises BadRow and ValueError."""
    if not path:
        raise ValueError("questions is not set: trajectories need questions; set questions=FILE")
    remedy = "mend the row or take it out"
    found: dict[str, dict[str, Any]] = {}
    for file in data_files(path):
        for where, raw in raw_rows(file):
            row = decode(where, raw)
            for key in ("question", "answer"):
                if not isinstance(row.get(key), (str, int, float)) or not str(row[key]).strip():
                    shown = f"{key} is {str(row.get(key))[:60]!r}"
                    raise BadRow.at(where, shown, "a question row has question and answer as text", remedy)
            row = {**row, "id": str(row.get("id") or f"{file.stem}-{where.rpartition(':')[2]}"), "answer": str(row["answer"])}
            if row["id"] in found:
                raise BadRow.at(where, f"id {row['id']!r} stands in an earlier row too", "ids name the attempts", remedy)
            found[row["id"]] = row
    return list(found.values())


def describe_job(config: TrajectoriesConfig, questions: list[dict[str, Any]]) -> str:
    """What the dry run prints below the configuration."""
    with_path = sum(bool(row.get("path")) for row in questions)
    pages = config.tools.search or (config.tools.service.base_url if config.tools.service else "no pages")
    return "\n".join([
        f"questions    {len(questions)}, {with_path} of them with their path",
        f"teacher      {config.teacher.told}; up to {config.attempts} attempts, {config.keep} kept, "
        f"{config.attempt.max_turns} turns each at most",
        f"tools        {', '.join(config.tools.names)} over {pages}",
        f"answers      {config.answer.mode}{_by(config.answer.endpoint)}",
        f"critic       {config.critic.judge}{_by(config.critic.endpoint)}, "
        f"{'with' if config.critic.reference else 'without'} the right answer and the path",
        f"rows         {config.wire}",
    ])  # fmt: skip


def _by(endpoint: ClientConfig | None) -> str:
    return f" by {endpoint.model} at {endpoint.base_url}" if endpoint else ""


def check(config: TrajectoriesConfig, questions: list[dict[str, Any]]) -> None:
    """Raises ValueError for a setting that no run could use."""
    config.teacher.validate()
    slurm = config.launch.slurm
    if config.launch.kind == "slurm" and slurm.nodes * slurm.ranks_per_node > 1:
        raise ValueError(
            f"launch.slurm: {slurm.nodes} nodes of {slurm.ranks_per_node} ranks, but this stage is one process: set "
            "launch.slurm.nodes=1 launch.slurm.ranks_per_node=1"
        )
    if config.teacher.kind == "oracle" and (without := [row["id"] for row in questions if not row.get("path")]):
        raise ValueError(
            f"teacher.kind=oracle: {len(without)} of {len(questions)} questions have no path to walk, the first is "
            f"{without[0]!r}: take questions of synthesize_questions, or a teacher.endpoint"
        )
    if config.tools.search is not None and not config.tools.search.is_dir():
        raise ValueError(
            f"tools.search={str(config.tools.search)!r} is no folder: build an index with `python -m megatron_nb.search build`"
        )


def digest_of(questions: list[dict[str, Any]]) -> str:
    return hashlib.blake2b(json.dumps(questions, sort_keys=True).encode(), digest_size=8).hexdigest()


# ------------------------------------------------------------------ the stage
def synthesize(run: Run, config: TrajectoriesConfig, questions: list[dict[str, Any]], digest: str) -> None:
    """Attempts, verdicts, files and summary; what an earlier attempt of the job has finished is taken over.

    digest: of all that stands in the questions' files.
    """
    tools = Toolbox(config.tools, load_tokenizer(config.tokenizer) if config.tokenizer else None)
    folder = run.folder / "synthesis"
    settings = {key: value for key, value in flatten(config.tools).items() if not key.startswith(FREE_TOOLS)}
    told = flatten(config.attempt), config.teacher.told, config.teacher.temperature, config.teacher.max_tokens, settings
    names = {"attempts": ledger_name("attempts", digest, config.seed, config.tokenizer, told)}
    names["answers"] = ledger_name("answers", names["attempts"], _judge_told(config.answer))
    names["critic"] = ledger_name("critic", names["attempts"], _judge_told(config.critic))
    ledgers = {kind: Ledger(folder, name, 0) for kind, name in names.items()}
    try:
        left_open = asyncio.run(_work(config, questions, tools, ledgers))
    finally:
        tools.close()
        for ledger in ledgers.values():
            ledger.close()
    finish(run, config, questions, tools.schemas, ledgers, left_open)


def _judge_told(config: AnswerConfig | CriticConfig) -> dict[str, Any]:
    """What of a judge's settings decides its verdicts."""
    settings = {key: value for key, value in flatten(config).items() if not key.startswith("endpoint")}
    return settings | ({"url": config.endpoint.base_url, "model": config.endpoint.model} if config.endpoint else {})


async def _work(config: TrajectoriesConfig, questions: list[dict], tools: Toolbox, ledgers: dict[str, Ledger]) -> int:
    """Attempt all questions, then judge the turns of what is kept; how many questions are left open."""
    await tools.ready()
    wanted = Attempts(config.attempts, config.keep, config.concurrency, config.attempt)
    right = AnswerFilter(config.answer, ledgers["answers"])
    left_open = await attempt_all(questions, Teachers(config.teacher, config.seed), tools, wanted, ledgers["attempts"], right)
    await judge_all(config, questions, tools.schemas, ledgers)
    return left_open


def kept_keys(questions: list[dict[str, Any]], ledgers: dict[str, Ledger], dropped: dict[str, str]) -> list[str]:
    """Keys of the attempts that are kept, in the order of the questions; `dropped` takes the rule of every attempt ("")."""
    asked = {row["id"]: place for place, row in enumerate(questions)}
    keys = [key for key in ledgers["answers"].rows if key.rpartition("/")[0] in asked]
    keys.sort(key=lambda key: (asked[key.rpartition("/")[0]], int(key.rpartition("/")[2])))
    kept, seen = [], set()
    for key in keys:
        dropped[key] = ledgers["answers"][key]["dropped"]
        same = key.rpartition("/")[0], calls_of(ledgers["attempts"][key])
        if not dropped[key] and same in seen:
            dropped[key] = "duplicate"
        if not dropped[key]:
            seen.add(same)
            kept.append(key)
    return kept


async def judge_all(config: TrajectoriesConfig, questions: list[dict], schemas: list[dict], ledgers: dict[str, Ledger]) -> None:
    """Verdicts on every turn of what is kept, into the ledger; a turn that was not judged is judged by the next attempt."""
    asked, model = {row["id"]: row for row in questions}, model_critic(config.critic)
    keys = kept_keys(questions, ledgers, {})
    left = [key for key in keys if key not in ledgers["critic"]]
    progress, room = Progress("trajectories judged", len(keys), len(keys) - len(left)), asyncio.Semaphore(config.concurrency)

    async def one(key: str) -> None:
        async with room:
            row = asked[key.rpartition("/")[0]]
            task = Task.of(row["question"], schemas, row)
            found = await judge_turns(task, steps_of(ledgers["attempts"][key]["messages"]), config.critic, model)
            failed = [verdict for verdict in found if isinstance(verdict, RequestFailed)]
            for failure in failed[:1]:
                log.warning("%s: %d turns are not judged: %s", key, len(failed), failure)
            if not failed:
                ledgers["critic"][key] = [verdict.as_row() for verdict in found]
            else:
                ledgers["critic"].rows[key] = [  # not on disk
                    verdict.as_row() if isinstance(verdict, Verdict) else {"failed": str(verdict)} for verdict in found
                ]
            progress.tick()

    work: list[Awaitable[None]] = [one(key) for key in left]
    await asyncio.gather(*work)


def finish(
    run: Run, config: TrajectoriesConfig, questions: list[dict], schemas: list[dict], ledgers: dict[str, Ledger], left_open: int
) -> None:  # fmt: skip
    """Write RUN/trajectories/* and the summary. ValueError when nothing is kept."""
    dropped: dict[str, str] = {}
    asked, rows = {row["id"]: row for row in questions}, []
    for key in kept_keys(questions, ledgers, dropped):
        attempt = ledgers["attempts"][key]
        verdicts = [
            RequestFailed(one["failed"]) if "failed" in one else Verdict(**one) for one in ledgers["critic"][key]
        ]
        rows.append(row_of(asked[key.rpartition("/")[0]], key, attempt, steps_of(attempt["messages"]), verdicts, schemas,
                           config.wire))  # fmt: skip
    attempts = {key: ledgers["attempts"][key] for key in dropped}
    stats = statistics(questions, attempts, dropped, rows, left_open)
    about = {
        "teacher": config.teacher.told, "tools": ", ".join(config.tools.names), "wire format": config.wire,
        "answers compared": config.answer.mode, "turns judged by": config.critic.judge,
        "questions from": config.questions, "seed": str(config.seed),
    }  # fmt: skip
    write_all(run.folder / "trajectories", rows, stats, about)
    critic = stats["critic"]
    log.info("%d of %d attempts kept, %d of %d turns flagged; see %s", len(rows), len(attempts), critic["flagged"],
             critic["turns"], run.folder / "trajectories" / "report.md")  # fmt: skip
    if not rows:
        raise ValueError(f"no attempt is kept of {len(questions)} questions: dropped {stats['dropped']}, {left_open} questions "
                         "left open; check teacher and tools, see trajectories/report.md")  # fmt: skip
    run.write_summary(
        config.seed, questions=len(questions), questions_kept=stats["questions_kept"], tries=len(attempts),
        left_open=left_open, trajectories=len(rows), turns_mean=stats["turns_kept"]["mean"],
        turns_most=stats["turns_kept"]["most"], flagged_share=critic["flagged_share"],
        **{f"critic_{name}": critic[name] for name in CRITERIA},
        **{f"dropped_{rule}": count for rule, count in stats["dropped"].items()},
    )  # fmt: skip


@job(TrajectoriesConfig, "synthesize_trajectories")
def main(config: TrajectoriesConfig) -> None:
    """Run the stage, or describe it."""
    everything = read_questions(config.questions)
    questions = everything[: config.limit]
    check(config, questions)
    report = describe_job(config, questions)
    if elsewhere(config, "synthesize_trajectories", "megatron_nb.synthesize_trajectories", report):
        return
    with open_run(config, "synthesize_trajectories") as run:
        log.info("%s\n%s", run.folder, report)
        synthesize(run, config, questions, digest_of(everything))


if __name__ == "__main__":
    main()
