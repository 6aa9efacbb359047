"""The sections of one stage on the report page: facts, curves, distributions, mixture, settings, troubles, samples."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from markdown_it import MarkdownIt
from markupsafe import Markup

from megatron_nb.training.metrics import duration
from tools.report_charts import curves, histogram, short
from tools.report_read import RunRead, Trouble, changed_most, differences, reasons
from tools.report_tables import Cell, headline
from tools.rollouts_read import Episode, visible

PANELS = {  # chart -> the metrics it draws
    "loss": r"loss|heldout_loss(_\w+)?",
    "reward": r"reward_mean|heldout_(reward|judge|win_rate)",
    "accuracy": r"(heldout_)?(accuracy|swap_agreement)",
    "reward by part": r"reward_part/[^/]+",
    "tokens of an answer": r"length_mean|heldout_length",
    "shares of answers": r"truncated|invalid_share|heldout_(truncated|invalid)|malformed|tool_errors|tool_failures",
    "groups of equal rewards": r"zero_advantage_groups",
    "turns of an episode": r"turns_mean|calls_mean",
    "entropy": r"entropy",
    "KL to the reference": r"kl_ref",
    "gradient norm": r"grad_norm",
    "learning rate": r"lr",
    "tokens/s": r"tokens_per_s_device|generated_tokens_per_s",
    "seconds of a step": r"seconds|generation_s|scoring_s|training_s|sync_s",
    "MFU": r"mfu",
    "peak memory, GB": r"peak_memory_gb",
}
SAMPLES = 3  # that rose, and as many that fell
CHARACTERS = 1400  # of an answer that are shown
TROUBLES = 12


@dataclass
class Sample:
    """A prompt and its best answers before and after."""

    question: str
    sides: list[tuple[str, str, str]]  # (which, numbers, answer)


@dataclass
class Section:
    """What the template shows of a stage."""

    run: RunRead
    facts: list[tuple[str, str]]
    headline: Cell | None
    described: str  # what the job said of itself: model, ranks, memory plan
    charts: list[Markup] = field(default_factory=list)
    more_charts: list[Markup] = field(default_factory=list)
    unchanged: list[str] = field(default_factory=list)
    mixture: list[dict[str, str]] = field(default_factory=list)
    compared: str = ""
    changed: list[tuple[str, str, str]] = field(default_factory=list)
    one_sided: list[str] = field(default_factory=list)
    troubles: list[Trouble] = field(default_factory=list)
    more_troubles: int = 0
    invalid: list[tuple[str, int]] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    reports: list[tuple[str, Markup]] = field(default_factory=list)


def section_of(run: RunRead, before: list[RunRead]) -> Section:
    """Everything about one stage; `before`: the stages in front of it."""
    section = Section(run, facts_of(run), headline(run), described(run.folder))
    section.charts, section.more_charts, section.unchanged = charts_of(run)
    kind, sides = run.answers()
    section.charts += distributions(kind, sides)
    section.mixture = mixture_of(run)
    if found := differences(run, [other for other in before if other.evaluates is None]):
        section.compared = found[0].name
        section.changed = [(key, plain(there), plain(here)) for key, there, here in found[1]]
        section.one_sided = found[2]
    troubles = run.troubles()
    section.troubles, section.more_troubles = troubles[:TROUBLES], max(0, len(troubles) - TROUBLES)
    section.invalid = reasons([one for side in sides.values() for one in side]).most_common(8)
    section.samples = samples_of(kind, sides)
    section.reports = [(str(path.relative_to(run.folder)), markdown(path)) for path in run.reports]
    return section


def facts_of(run: RunRead) -> list[tuple[str, str]]:
    """(label, value) of what has one number."""
    summary, status, config = run.summary, run.status, run.config
    seconds = run.ledger.get("seconds") or summary.get("wall_s")
    skipped = sum(row.get("skipped") or 0 for row in run.rows)
    facts = {
        "state": status.state, "took": duration(seconds) if seconds else "", "starts from": start_of(run),
        "seed": config.get("seed"), "attempts": status.attempts if status.attempts > 1 else None,
        "steps": f"{status.step} of {status.num_steps}" if status.step else None,
        "tokens": short(summary["tokens"]) if "tokens" in summary else None,
        "tokens/s of a device": short(summary.get("tokens_per_s_device")) if "tokens_per_s_device" in summary else None,
        "MFU": f"{summary['mfu']:.1%}" if "mfu" in summary else None,
        "peak memory": f"{summary['peak_memory_gb']:.3g} GB" if "peak_memory_gb" in summary else None,
        "updates refused": short(skipped) if skipped else None,
    }  # fmt: skip
    shown = [(name, str(value)) for name, value in facts.items() if value not in (None, "")]
    if not run.rows and not run.results:  # a synthesis: its counts are its result
        skip = ("seed", "wall_s", "attempts")
        shown += [(name.replace("_", " "), short(value)) for name, value in summary.items() if name not in skip]
    return shown


def start_of(run: RunRead) -> str | None:
    """init_from, short where it is a run of the same cascade."""
    start = run.config.get("init_from")
    beside = f"{run.folder.resolve().parent}/"
    return start.removeprefix(beside) if isinstance(start, str) else None


def described(folder: Path) -> str:
    """The lines that follow the first one in the newest attempt's log."""
    logs = sorted(folder.glob("logs/attempt-*/rank-0.log"), key=lambda path: int(path.parent.name.split("-")[1]))
    if not logs:
        return ""
    lines = []
    with open(logs[-1], errors="replace") as file:
        next(file, "")
        for line in file:
            if re.match(r"\d{4}-\d\d-\d\d ", line) or len(lines) > 60:
                break
            lines.append(line.rstrip())
    return visible("\n".join(lines))


def charts_of(run: RunRead) -> tuple[list[Markup], list[Markup], list[str]]:
    """(charts by PANELS, one chart for each other metric, metrics that never changed)."""
    keys = [key for key in run.keys if not key.endswith(("_error", "_std")) or f"{key.rpartition('_')[0]}" not in run.keys]
    charts, more, unchanged, shown = [], [], [], set()
    for title, pattern in PANELS.items():
        lines = {key: run.series(key) for key in keys if re.fullmatch(pattern, key)}
        errors = {key: run.series(f"{key}_error") for key in lines if f"{key}_error" in run.keys}
        shown |= lines.keys() | {f"{key}_error" for key in errors}
        if constant(lines.values()):
            unchanged += [f"{key} {short(line[0][1])}" for key, line in lines.items()]
        elif list(lines.values()) != [run.series("reward_mean")] or title == "reward":  # a single part is the whole
            charts += [chart] if (chart := curves(title, lines, errors)) else []
    for key in sorted(set(run.keys) - shown - {"tokens", "step", "time"}):
        values = {value for _, value in run.series(key)}
        if len(values) == 1:
            unchanged.append(f"{key} {short(values.pop())}")
        elif chart := curves(key, {key: run.series(key)}):
            more.append(chart)
    return charts, more, unchanged


def constant(lines: Iterable[list[tuple[int, float | None]]]) -> bool:
    """Whether all of them tell the same number only; True for no line."""
    return len({value for line in lines for _, value in line}) < 2


def distributions(kind: str, sides: dict[int, list[Episode]]) -> list[Markup]:
    """Rewards and lengths of the answers of the first and of the last step."""
    of = "held-out answers" if kind == "heldout" else "answers"
    steps = {f"step {step}": episodes for step, episodes in sides.items()}
    found = [
        histogram(f"reward of {of}", {n: [e.reward for e in es if e.reward is not None] for n, es in steps.items()}),
        histogram(f"tokens of {of}", {n: [float(e.length) for e in es] for n, es in steps.items()}),
    ]
    return [chart for chart in found if chart]


def mixture_of(run: RunRead) -> list[dict[str, str]]:
    """The sources of the training rows: the weight asked for, and the share of the tokens that was seen."""
    sources = sources_of(run.config)
    weights = {name: source.get("weight") for name, source in sources.items()}
    total = sum(weight or 0 for weight in weights.values())
    rows = []
    for name, source in sources.items():
        seen = run.summary.get(f"share_{name}")
        rows.append({
            "name": name, "path": str(source.get("path")),
            "asked": f"{weights[name] / total:.1%}" if weights[name] else "each row once",
            "seen": f"{seen:.1%}" if seen is not None else "", "bar": f"{100 * seen:.1f}" if seen is not None else "",
        })  # fmt: skip
    return rows


def sources_of(config: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The training sources of any job."""
    for section in ("data", "prompts", "questions", "tasks"):
        found = config.get(section)
        if isinstance(found, dict) and isinstance(found.get("sources"), dict):
            return {name: source for name, source in found["sources"].items() if isinstance(source, dict)}
    return {}


def samples_of(kind: str, sides: dict[int, list[Episode]]) -> list[Sample]:
    """Prompts whose mean reward changed most between the first and the last file, with the answer nearest to each mean."""
    samples = []
    for change in changed_most(sides, SAMPLES):
        steps = list(sides)
        told = []
        for step, group in zip(steps, (change.before, change.after)):
            valid = [one for one in group if one.reward is not None]
            reward = sum(one.reward for one in valid) / len(valid)
            episode = min(valid, key=lambda one: abs(one.reward - reward))  # a typical one, not the best
            mean = f"mean reward {short(reward)} of {len(group)}"
            told.append((f"step {step}", f"{mean}; shown: {short(episode.reward)}, {episode.length} tokens", cut(episode.text)))
        samples.append(Sample(cut(question_of(change.before[0])), told))
    return samples


def question_of(episode: Episode) -> str:
    asked = [str(message.get("content") or "") for message in episode.prompt if message["role"] == "user"]
    return (asked or [""])[-1]


def cut(text: str) -> str:
    """The beginning and the end of a long text."""
    text = visible(text)
    if len(text) <= CHARACTERS:
        return text
    left_out = len(text) - CHARACTERS
    return f"{text[: CHARACTERS // 2]}\n[... {left_out:,} characters left out ...]\n{text[-CHARACTERS // 2 :]}"


def plain(value: Any) -> str:
    return "null" if value is None else f"{value:.12g}" if isinstance(value, float) else visible(str(value))


def markdown(path: Path) -> Markup:
    """A report of a synthesis as HTML; markup in it stays text, and links are words."""
    text = path.read_text(encoding="utf-8", errors="replace")
    text = re.sub(r"\A---\n.*?\n---\n", "", text, flags=re.DOTALL)
    reader = MarkdownIt("commonmark", {"html": False}).enable("table").disable(["link", "image", "autolink"])
    return Markup(reader.render(visible(text)).replace("<h1>", "<h4>").replace("</h1>", "</h4>")
                  .replace("<h2>", "<h5>").replace("</h2>", "</h5>"))  # fmt: skip
