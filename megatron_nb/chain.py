"""The stages of a recipe as links of a chain: configuration, what each waits for, and what would stop it.

Nothing is run here; cascade.py does that.
"""

from __future__ import annotations

import dataclasses
import importlib
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from megatron_nb import slurm
from megatron_nb.config import STAGES, ConfigError, compose, groups_in, is_group, schema_in
from megatron_nb.evals.overlap import training_sources
from megatron_nb.launch import LaunchConfig
from megatron_nb.ledger import Gate, Known, LedgerConfig, summary_of
from megatron_nb.run import run_folder
from megatron_nb.schema import plain, require_key

JOBS = {  # the schema that a stage file begins with -> its job
    "SftConfig": "megatron_nb.sft",
    "RewardModelConfig": "megatron_nb.reward_model",
    "RlConfig": "megatron_nb.rl",
    "PreferencesConfig": "megatron_nb.synthesize_preferences",
    "ComplexityConfig": "megatron_nb.synthesize_complexity",
    "QuestionsConfig": "megatron_nb.synthesize_questions",
    "TrajectoriesConfig": "megatron_nb.synthesize_trajectories",
    "RefineConfig": "megatron_nb.refine_solutions",
    "EvaluateConfig": "megatron_nb.evaluate",
    "ExportConfig": "megatron_nb.export_model",
    "HeadlineConfig": "megatron_nb.headline",
}
POLICIES = ("megatron_nb.sft", "megatron_nb.rl")  # jobs whose checkpoints are worth an evaluation
TRAINERS = (*POLICIES, "megatron_nb.reward_model")  # jobs whose rows are searched for items of headline tasks
SEARCH = "headline"  # the stage file of that search
TAKE_OUT = "take out the rows that its overlap_report.json names"
CHAIN = "chain"  # {chain} in words: the folder of the chain itself
NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*")  # of a stage: a folder's, and a key's of the command line
PLACE = re.compile(r"\{([A-Za-z_][\w.-]*)\}")  # braces of Hydra's mappings hold a colon
SPAN = r"[^\s,:='\"\[\]{}()]*"
VALUE = re.compile(rf"""'[^']*'|"[^"]*"|{SPAN}{PLACE.pattern}{SPAN}""")  # of a word: in quotes, or around a place
PLAIN = re.compile(r"[A-Za-z0-9_./+@%-]*")  # what Hydra reads without quotes


@dataclass
class StageConfig:
    """One link of the chain."""

    stage: str = ""  # its stage file
    words: list[str] = field(default_factory=list)  # its command line; {NAME} is the run folder of stage NAME
    start_from: str | None = None  # the stage whose checkpoint it starts from; null: its words say, or it needs none
    after: list[str] = field(default_factory=list)  # stages to be done first, beside those that its words name
    gate: Gate | None = None  # what it must reach for those behind it to begin


@dataclass
class CascadeConfig:
    """A chain; its stages' runs lie in runs_dir/name/STAGE."""

    name: str = "cascade"
    runs_dir: str = "runs"
    stages: dict[str, StageConfig] = field(default_factory=dict)  # in order
    words: list[str] = field(default_factory=list)  # of every stage that knows their key, before its own: [model=tiny]
    ledger: LedgerConfig = field(default_factory=LedgerConfig)  # evaluations after stages
    from_stage: str | None = None  # run this one and those behind it again; what they made before is moved aside
    action: Literal["run", "cancel"] = "run"  # cancel: take every job of the chain out of the queue
    launch: LaunchConfig = field(default_factory=LaunchConfig)

    def __post_init__(self):
        names = list(self.stages)
        for place, (name, stage) in enumerate(self.stages.items()):
            if not NAME.fullmatch(name):
                raise ValueError(f"stages.{name}: a stage's name must be made of letters, digits, _ and -, a letter first")
            if name == CHAIN or name.startswith(("evaluate_", "headline_")):
                own = f"{CHAIN}, evaluate_... and headline_..."
                raise ValueError(f"stages.{name}: {own} are names of the chain's own; take another")
            for other in filter(None, [stage.start_from, *stage.after]):
                if other not in names[:place]:
                    before = ", ".join(names[:place]) or "none"
                    raise ValueError(f"stages.{name} waits for {other!r}, which is no stage before it; those are: {before}")
        if self.from_stage is not None and self.from_stage not in names:
            raise ValueError(f"from_stage={self.from_stage!r} must be one of {', '.join(names)}")
        for name in self.ledger.of or ():
            if name not in names:
                raise ValueError(f"ledger.of names {name!r}, which is no stage; those are: {', '.join(names)}")


@dataclass
class Link:
    """A stage, an evaluation behind one, or the search before one, ready to run."""

    name: str
    stage: str
    module: str
    config: Any  # the job's dataclass
    command: list[str]  # words of the same
    run: Path
    waits_for: list[str]
    start_from: str | None = None
    gate: Gate | None = None
    evaluates: str | None = None  # a stage; "": the model before all
    searches: str | None = None  # a stage, whose rows are searched for items of the headline tasks
    anew: bool = False  # made again, whatever lies there

    @property
    def done(self) -> bool:
        summary = None if self.anew else summary_of(self.run)
        if summary is None or self.searches is None:
            return summary is not None
        # rows may become others until they are trained on: the search is made again, of what has changed
        return self.gate.passed(summary) and summary_of(self.run.parent / self.searches) is not None

    @property
    def known(self) -> Known:
        return Known(self.name, self.stage, self.start_from, self.gate, self.evaluates)


def links_of(config: CascadeConfig) -> list[Link]:
    """Every link with its composed configuration, in order. ConfigError naming the stage whose words are wrong."""
    links, folders, used = [], {CHAIN: run_folder(config.runs_dir, config.name)}, set()
    for name, stage in _planned(config):
        link = _link(config, name, stage, folders, used)
        if name not in config.stages:
            link.evaluates = "" if name == "evaluate_base" else name.removeprefix("evaluate_")
        elif link.stage == SEARCH:
            raise ConfigError(f"stages.{name}: name the tasks in ledger.headline: it stands before all that train then")
        elif config.ledger.headline and link.module in TRAINERS and (rows := training_sources(plain(link.config))):
            before = _link(config, f"headline_{name}", _search(config.ledger, list(rows.values()), folders), folders, used)
            before.searches = name
            link.waits_for.append(before.name)
            links.append(before)
        links.append(link)
        folders[name] = link.run
    if lost := [word for word in config.words if word not in used]:
        raise ConfigError(f"words: no stage of the chain knows {', '.join(lost)}")
    return links


def _link(config: CascadeConfig, name: str, link: StageConfig, folders: dict[str, Path], used: set[str]) -> Link:
    """One of the chain. folders: of the links before it; used: takes the chain's words that it knows."""
    root = folders[CHAIN]
    try:
        module, schema = job_of(link.stage)
        shared = [word for word in _for_all(config) if _knows(schema, link.stage, word)]
        used.update(shared)
        own = [*link.words, *([f"init_from={{{link.start_from}}}"] if link.start_from else [])]
        read = [place for word in [*shared, *own] for place in PLACE.findall(word)]
        told = [placed(word, folders) for word in [*shared, *own]] + [f"name={name}", f"runs_dir={quoted(root)}"]
        waits_for = [other for other in dict.fromkeys([*read, *link.after]) if other != CHAIN]
        return Link(
            name, link.stage, module, compose(schema, link.stage, told), [f"--config-name={link.stage}", *told], root / name,
            waits_for, link.start_from, link.gate,
        )  # fmt: skip
    except (ValueError, KeyError) as error:
        what = f"no stage before it is named {error}" if isinstance(error, KeyError) else error
        raise ConfigError(f"{f'stages.{name}' if name in config.stages else f'ledger ({name})'}: {what}") from error


def placed(word: str, folders: dict[str, Path]) -> str:
    """The word with folders in the places of their names. KeyError for a name that has none."""

    def fill(value: re.Match) -> str:
        filled = PLACE.sub(lambda place: str(folders[place[1]]), value[0])
        return filled if value[0][0] in "'\"" else quoted(filled)

    return VALUE.sub(fill, word)


def quoted(value: Any) -> str:
    """A value as Hydra reads it: not every folder is made of plain letters."""
    text = str(value)
    return text if PLAIN.fullmatch(text) else "'" + text.replace("'", "\\'") + "'"


def _planned(config: CascadeConfig) -> Iterator[tuple[str, StageConfig]]:
    """The stages, and behind each that is to be evaluated its evaluation."""
    ledger = config.ledger
    if ledger.words and ledger.base:
        yield "evaluate_base", StageConfig(ledger.stage, [*ledger.words, f"checkpoint={ledger.base}"])
    for name, stage in config.stages.items():
        yield name, stage
        wanted = name in ledger.of if ledger.of is not None else JOBS.get(schema_in(stage.stage) or "") in POLICIES
        if ledger.words and wanted:
            yield f"evaluate_{name}", StageConfig(ledger.stage, [*ledger.words, f"checkpoint={{{name}}}"])


def _search(ledger: LedgerConfig, rows: list[str], folders: dict[str, Path]) -> StageConfig:
    """The search of a stage's rows for the headline tasks. It waits for those who make the rows, not for the stage's start."""
    schema = job_of(SEARCH)[1]
    words = [word for word in ledger.words if _knows(schema, SEARCH, word)]
    words += [f"only=[{','.join(map(quoted, ledger.headline))}]", f"rows=[{','.join(map(quoted, dict.fromkeys(rows)))}]"]
    words += ["launch.slurm.nodes=1", "launch.slurm.ranks_per_node=1"]
    makers = [name for name, folder in folders.items() if any(Path(path).absolute().is_relative_to(folder) for path in rows)]
    return StageConfig(SEARCH, words, after=makers, gate=Gate("items_met", at_most=0, remedy=TAKE_OUT))


def _for_all(config: CascadeConfig) -> list[str]:
    """Words of every stage: how the chain is launched, then the chain's own."""
    launch, usual = config.launch, asdict(slurm.SlurmConfig())
    told = [f"launch={launch.kind}"]
    if launch.kind == "slurm":
        told += [f"launch.slurm.{key}={quoted(value)}" for key, value in asdict(launch.slurm).items()
                 if value != usual[key] and key != "after"]  # fmt: skip
    elif launch.ranks:
        told += [f"launch.ranks={launch.ranks}"]
    return [*told, *config.words]


def _knows(schema: type, stage: str, word: str) -> bool:
    """Whether a word says something to a stage: a key of its schema, or a group of its file."""
    key = word.lstrip("+~").partition("=")[0]
    if is_group(key):
        return key in groups_in(stage)
    if key == "launch.ranks":
        return "parallel" in {one.name for one in dataclasses.fields(schema)}  # the others are one process
    try:
        require_key(schema, key.split("."))
    except ConfigError:
        return False
    return True


def job_of(stage: str) -> tuple[str, type]:
    """(module, schema) of a stage file."""
    name = schema_in(stage)
    if name is None:
        raise ConfigError(f"there is no stage file {stage!r} in {STAGES}, or it does not begin with a schema")
    if name not in JOBS:
        raise ConfigError(f"the stage file {stage!r} belongs to none of the jobs {', '.join(JOBS)}")
    module = importlib.import_module(JOBS[name])
    return JOBS[name], getattr(module, name)
