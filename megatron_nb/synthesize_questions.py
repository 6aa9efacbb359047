"""Synthesis of multi-hop search questions: walks over a wiki graph, written by templates or an instruct model, verified.

python -m megatron_nb.synthesize --config-name synthesize_questions corpus=FOLDER [overrides]
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
from dataclasses import dataclass, field
from typing import Any, Literal

from megatron_nb.asking.ledger import Ledger
from megatron_nb.config import flatten, job
from megatron_nb.launch import LaunchConfig, elsewhere, open_run
from megatron_nb.rollout.toolbox import Toolbox
from megatron_nb.run import Run
from megatron_nb.search.backend import LocalSearch
from megatron_nb.search.corpus import Corpus
from megatron_nb.synthesis.question_quotes import Quotes
from megatron_nb.synthesis.question_report import write_questions
from megatron_nb.synthesis.question_solver import Solver, SolverConfig
from megatron_nb.synthesis.question_verify import MAX_CHARACTERS, MAX_CLUES
from megatron_nb.synthesis.question_writer import EndpointWriter, Templates, WriterConfig
from megatron_nb.synthesis.questions import Kept, Maker, make_all
from megatron_nb.synthesis.walk import WalkConfig, Walker, day_of

log = logging.getLogger(__name__)
# what does not decide what an attempt gives
FREE = ("name", "runs_dir", "corpus", "train", "rl", "launch", "concurrency", "attempts")
MOVABLE = ("timeout_s", "deadline_s", "retries", "pause_s", "max_pause_s", "concurrency", "rate", "cache", "api_key_env")


@dataclass
class QuestionsConfig:
    """One stage of question synthesis."""

    corpus: str = ""  # folder made by `python -m megatron_nb.search build`
    name: str | None = None  # run folder runs_dir/name; None: derived from the configuration
    runs_dir: str = "runs"
    seed: int = 1234
    train: int = 1000  # questions to train on
    rl: int = 0  # further ones, none of them in train: for reinforcement learning behind fine-tuning on train
    heldout: int = 100  # questions held out; no training question has the answer of one
    apart: Literal["path", "answer"] = "path"  # path: nor a page of its path; answer: nor the page of its answer
    heldout_pages: float | None = None  # share of the pages, a neighbourhood, for held-out walks alone; null: they go anywhere
    same_links: float = 0.5  # (own) share of its links that a question may have in common with an earlier one
    walk: WalkConfig = field(default_factory=WalkConfig)
    writer: WriterConfig = field(default_factory=WriterConfig)
    solver: SolverConfig = field(default_factory=SolverConfig)
    concurrency: int = 32  # attempts under way at once
    attempts: int = 200  # walks for each question wanted, at most
    launch: LaunchConfig = field(default_factory=LaunchConfig)

    def __post_init__(self):
        for name, least in (("train", 0), ("rl", 0), ("heldout", 0), ("seed", 0), ("concurrency", 1), ("attempts", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name}={getattr(self, name)} must be at least {least}")
        if self.heldout_pages is not None and not 0 < self.heldout_pages < 1:
            raise ValueError(f"heldout_pages={self.heldout_pages} must be between 0 and 1, or null: walks go anywhere")
        if not 0 <= self.same_links <= 1:
            raise ValueError(f"same_links={self.same_links} must be in [0, 1]")
        if self.train + self.rl + self.heldout == 0:
            raise ValueError("train=0, rl=0 and heldout=0: at least one question must be wanted")


def ledger_name(config: QuestionsConfig, fingerprint: str) -> str:
    """attempts-DIGEST of everything that decides what they give, so that a changed configuration does not meet the old ones."""
    told = {key: value for key, value in flatten(config).items()
            if key.split(".")[0] not in FREE and key.split(".")[-1] not in MOVABLE}  # fmt: skip
    text = json.dumps([told, fingerprint], sort_keys=True, default=str)
    return f"attempts-{hashlib.blake2b(text.encode(), digest_size=4).hexdigest()}"


def describe_job(config: QuestionsConfig, corpus: Corpus) -> str:
    """What the dry run prints below the configuration. ValueError when no walk can begin."""
    walk, walker, solver = config.walk, Walker(corpus.graph, config.walk), config.solver
    checks = "not checked by a model: solver.endpoint is not given"
    if solver.endpoint:
        checks = (f"{solver.endpoint.base_url} {solver.endpoint.model}: {solver.closed_book_tries} tries closed-book, 1 from "
                  f"the evidence, {solver.search_tries} by search")  # fmt: skip
    writer = config.writer.endpoint
    return "\n".join([
        f"corpus       {config.corpus}: {len(corpus):,} pages, {len(corpus.graph.out.targets):,} links",
        f"heads        {len(walker.heads):,} {heads_told(walk, walker)}",
        f"walks        {walk.min_steps} to {walk.max_steps} links over {len(walker.targets):,} that stand in sentences",
        f"questions    train {config.train}, {f'rl {config.rl}, ' if config.rl else ''}heldout {config.heldout}, "
        f"apart by {config.apart}; "
        f"at most {config.attempts} walks for each",
        f"writer       {f'{writer.base_url} {writer.model}' if writer else f'templates, {config.writer.form}'}",
        f"checks       {checks}",
    ])  # fmt: skip


def heads_told(walk: WalkConfig, walker: Walker) -> str:
    """Where the heads come from, for the card."""
    band = f"of {walk.min_degree} to {walk.max_degree} links"
    if walk.cutoff == "none":
        return f"{band}, whatever their date"
    window = f"dated at most {walk.window_days:g} days before {day_of(walker.cutoff)}"
    return f"{band}, {window}, weight exp(-age / {walk.tau_days:g} days)"


def synthesize(run: Run, config: QuestionsConfig, corpus: Corpus) -> Kept:
    """Write RUN/questions/ and the summary; what an earlier attempt of the job has finished is taken over."""
    writer = Quotes() if config.writer.form == "quotes" else Templates()
    if config.writer.endpoint:
        writer = EndpointWriter(config.writer, MAX_CHARACTERS, MAX_CLUES)
    ledger = Ledger(run.folder / "synthesis", ledger_name(config, corpus.facts["fingerprint"]), 0)
    source = str(corpus.facts["source"]).rstrip("/").rpartition("/")[2]

    async def make() -> Kept:
        solver = None
        if config.solver.endpoint:
            tools = config.solver.tools
            own = None if tools.search or tools.service else LocalSearch(config.corpus)
            solver = Solver(config.solver, Toolbox(tools, search=own), config.seed)
        maker = Maker(corpus, writer, solver, config.walk.min_steps, config.seed, source)
        counts = {"train": config.train, "rl": config.rl, "heldout": config.heldout}
        return await make_all(
            counts, config.apart, config.heldout_pages, config.same_links, config.walk, maker, ledger, config.concurrency,
            config.attempts,
        )  # fmt: skip

    try:
        kept = asyncio.run(make())
    finally:
        ledger.close()
    measured = write_questions(run.folder / "questions", kept, facts_of(config, corpus, source))
    log.info("%s", "\n".join(f"{key:<32} {value:g}" for key, value in measured.items()))
    if not kept.rows:
        raise ValueError(f"no question is left of {kept.attempts.total()} walks, see the counts above: loosen walk.*, or build "
                         "the corpus of more pages")  # fmt: skip
    run.write_summary(config.seed, **measured)
    return kept


def facts_of(config: QuestionsConfig, corpus: Corpus, source: str) -> dict[str, Any]:
    """What the card says of the making."""
    writer = config.writer.endpoint
    away = {"path": " and no page of a path", "answer": " and no page that holds one"}
    return {
        "source": source, "pages": f"{len(corpus):,}", "links": f"{len(corpus.graph.out.targets):,}",
        "steps": f"{config.walk.min_steps} to {config.walk.max_steps}", "apart": away[config.apart],
        "heads": heads_told(config.walk, Walker(corpus.graph, config.walk)),
        "writer": f"Written by the model {writer.model or writer.base_url}." if writer else "Written by templates.",
    }  # fmt: skip


@job(QuestionsConfig, "synthesize_questions")
def main(config: QuestionsConfig) -> None:
    """Run the stage, or describe it."""
    if not config.corpus:
        command = "python -m megatron_nb.search build SOURCE --out FOLDER"
        raise ValueError(f"corpus is not given: build one with `{command}`, then give corpus=FOLDER")
    corpus = Corpus.open(config.corpus)
    report = describe_job(config, corpus)
    if elsewhere(config, "synthesize_questions", "megatron_nb.synthesize_questions", report):
        return
    with open_run(config, "synthesize_questions") as run:
        log.info("%s\n%s", run.folder, report)
        synthesize(run, config, corpus)


if __name__ == "__main__":
    main()
