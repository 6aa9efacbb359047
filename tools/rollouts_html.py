"""Rollouts as one static HTML page: every token coloured by its advantage or by its ratio. No script, nothing from a network.

The page forbids itself all but its own style (Content-Security-Policy): whatever an answer holds stays text.
"""

from __future__ import annotations

import math
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from megatron_nb.data.tokenizer import load_tokenizer
from megatron_nb.training.checkpoint_folder import newest_complete, resolve
from tools.rollouts_read import Episode, Numbers, by_group, numbers, visible

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

RATIO_EDGES = (0.01, 0.05, 0.2, 0.5)  # of |log ratio|: clipping is usual near 0.2
UP, DOWN = ("#e4f4e4", "#bfe6bf", "#8fd38f", "#5bbb5b"), ("#fbe6e4", "#f5c4c0", "#ec9a94", "#e06c66")
ABOVE, BELOW = ("#fff1dc", "#ffdca8", "#ffc06a", "#fba02e"), ("#e4eefb", "#bfd7f6", "#8fb8ee", "#5d96e3")
PENDING = 8  # ids of one character that is not complete yet; more are broken bytes, shown as such

STYLE = """
:root { color-scheme: light; }
body { font: 14px/1.45 system-ui, sans-serif; margin: 1.5em auto; max-width: 75em; padding: 0 1em; color: #222; }
table { border-collapse: collapse; margin: .5em 0 1.5em; }
th, td { padding: .15em .7em; border-bottom: 1px solid #ddd; text-align: right; }
td.w, th.w { text-align: left; max-width: 30em; overflow: hidden; text-overflow: ellipsis; white-space: nowrap; }
.words { white-space: pre-wrap; overflow-wrap: anywhere; font: 13px/1.6 ui-monospace, monospace; margin: .4em 0; }
.prompt { background: #f4f6f8; padding: .3em .8em; border-left: 3px solid #9ab; }
.role, .turn { color: #57708a; font: 12px system-ui, sans-serif; }
details.answer { margin: .4em 0; padding: .2em .8em; border: 1px solid #ddd; border-radius: 4px; }
details.invalid { border-color: #e06c66; } .why { color: #b3261e; font-weight: 600; }
summary { cursor: pointer; } .facts { color: #667; }
.words i { font-style: normal; } .words i.t { color: #99a; }
.key i { font-style: normal; padding: 0 .5em; }
#by-a:checked ~ main .key.ratio, #by-r:checked ~ main .key.adv { display: none; }
"""


def levels() -> str:
    """The style rules of the eight levels of each colouring; `.key` shows its own whatever is chosen."""
    rules = []
    for switch, key, names in (("by-a", "adv", {"p": UP, "n": DOWN}), ("by-r", "ratio", {"u": ABOVE, "d": BELOW})):
        for name, colours in names.items():
            for level, colour in enumerate(colours, 1):
                where = f"#{switch}:checked ~ main .words .{name}{level}, .key.{key} .{name}{level}"
                rules.append(f"{where} {{ background: {colour}; }}")
    return "\n".join(rules)


def tokenizer_of(run: Path, given: str | None) -> PreTrainedTokenizerBase:
    """The tokenizer the run's ids belong to. ValueError when there is none, with what to pass."""
    if given:
        try:
            return load_tokenizer(given)
        except ValueError as error:
            raise ValueError(f"--tokenizer {given} holds no tokenizer: give a folder with tokenizer.json") from error
    newest = newest_complete(run)
    places = [*([newest / "hf"] if newest else []), run / "hf"]
    if (run / "config.yaml").is_file():
        places += _named(yaml.safe_load((run / "config.yaml").read_text()))
    for place in places:
        try:
            return load_tokenizer(str(resolve(place) or place))
        except ValueError:
            continue
    looked = ", ".join(map(str, places))
    raise ValueError(f"{run} has no tokenizer to turn ids into words (looked in {looked}): pass --tokenizer FOLDER")


def _named(config: Any) -> list[Path]:
    """What a configuration calls tokenizer, then what it started from."""
    if not isinstance(config, dict):
        return []
    inner = [path for value in config.values() for path in _named(value)]
    own = [Path(config[name]) for name in ("tokenizer", "init_from") if isinstance(config.get(name), str)]
    return [*own, *inner]


def token_texts(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> list[str]:
    """The text every id adds. A character of several ids belongs to the last of them; special tokens are shown."""

    def decode(start: int, stop: int) -> str:
        return tokenizer.decode(ids[start:stop], skip_special_tokens=False, clean_up_tokenization_spaces=False)

    texts, start, read = [], 0, 0  # ids[start:read] are shown and give the next ones their context (leading spaces)
    for stop in range(1, len(ids) + 1):
        text = decode(start, stop)
        if text.endswith("\ufffd") and stop - read < PENDING and stop < len(ids):
            texts.append("")
            continue
        texts.append(text[len(decode(start, read)) :])
        start, read = read, stop
    return texts


def advantage_class(advantage: float | None, largest: float) -> str:
    if not advantage or not math.isfinite(advantage):
        return ""
    return ("p" if advantage > 0 else "n") + str(min(4, 1 + int(4 * abs(advantage) / largest)))


def ratio_class(ratio: float | None) -> str:
    if ratio is None or not ratio > 0:
        return ""
    level = sum(abs(math.log(ratio)) >= edge for edge in RATIO_EDGES)
    return f"{'u' if ratio > 1 else 'd'}{level}" if level else ""


def shown(text: str) -> str:
    return escape(visible(text))


def tokens_html(row: dict[str, Any], advantage: float | None, largest: float, tokenizer: PreTrainedTokenizerBase) -> str:
    """The ids of one row, turn by turn; the tip of a sampled token tells log-prob, ratio and version of the weights."""
    texts, ratios = token_texts(tokenizer, row["ids"]), row.get("ratio") or [None] * len(row["ids"])
    heads = {turn["start"]: turn for turn in row["turns"]} if len(row["turns"]) > 1 else {}
    parts = []
    for place, text in enumerate(texts):
        if turn := heads.get(place):
            told = [turn["kind"], *([turn["status"]] if turn.get("status") else [])]
            told += [f"{turn['calls']} calls"] if turn.get("calls") else []
            told += [f"reward {turn['reward']:.4g}"] if turn.get("reward") is not None else []
            parts.append(f'<div class="turn">{shown(", ".join(told))}</div>')
        if not row["sampled_mask"][place]:
            parts.append(f'<i class="t">{shown(text)}</i>')
            continue
        colours = " ".join(filter(None, (advantage_class(advantage, largest), ratio_class(ratios[place]))))
        tip = f"{row['ids'][place]}: log-prob {row['logprob'][place]:.3f}"
        tip += "" if ratios[place] is None else f", ratio {ratios[place]:.4f}"
        parts.append(f'<i class="{colours}" title="{tip}, weights {row["weight_version"][place]}">{shown(text)}</i>')
    return f'<div class="words">{"".join(parts)}</div>'


def number(value: float | None, form: str = ".3f") -> str:
    return "-" if value is None else format(value, form)


def table(title: str, first: list[str], rows: list[tuple[list[str], Numbers]]) -> str:
    """`first`: heads of the cells that come before the numbers; those cells are HTML already."""
    heads = ["rollouts", "invalid", "mean reward", "spread", "lowest", "highest", "mean length", "cut off"]
    body = []
    for own, n in rows:
        values = [str(n.rollouts), str(n.invalid), number(n.reward), number(n.spread), number(n.lowest), number(n.highest)]
        cells = [f"<td>{value}</td>" for value in [*values, number(n.length, ".0f"), str(n.truncated)]]
        body.append("<tr>" + "".join(f'<td class="w">{cell}</td>' for cell in own) + "".join(cells) + "</tr>")
    head = "".join(f'<th class="w">{name}</th>' for name in first) + "".join(f"<th>{name}</th>" for name in heads)
    return f"<h2>{title}</h2><table><tr>{head}</tr>{''.join(body)}</table>"


def prompt_html(prompt: list[dict[str, Any]]) -> str:
    parts = []
    for message in prompt:
        words = str(message.get("content") or message.get("tool_calls") or "")
        parts.append(f'<span class="role">{shown(message["role"])}</span>\n{shown(words)}\n')
    return f'<details class="prompt" open><summary>prompt</summary><div class="words">{"".join(parts)}</div></details>'


def episode_html(episode: Episode, largest: float, tokenizer: PreTrainedTokenizerBase) -> str:
    parts = ", ".join(f"{shown(name)} {value:.4g}" for name, value in (episode.score.get("parts") or {}).items())
    if episode.reward is None:
        verdict = f'<span class="why">invalid: {shown(episode.reason)}</span>'
    else:
        verdict = f"<b>reward {episode.reward:.4g}</b>" + (f" ({parts})" if parts else "")
        verdict += f" {shown(episode.reason)}" if episode.reason else ""
    facts = f"advantage {number(episode.advantage, '+.4g')}, {episode.length} tokens, ended by {shown(episode.ended)}"
    rows = "".join(tokens_html(row, episode.advantage, largest, tokenizer) for row in episode.rows)
    invalid = " invalid" if episode.reward is None else ""
    summary = f"#{episode.index} {verdict} <span class='facts'>{facts}</span>"
    return f'<details class="answer{invalid}" open><summary>{summary}</summary>{rows}</details>'


def legend(largest: float, has_ratio: bool) -> str:
    bounds = [f"{largest * level / 4:.3g}" for level in range(5)]
    advantage = "".join(f'<i class="n{level}">&minus;{bounds[level]}</i>' for level in (4, 3, 2, 1)) + "<i>0</i>"
    advantage += "".join(f'<i class="p{level}">+{bounds[level]}</i>' for level in (1, 2, 3, 4))
    edges = list(enumerate(RATIO_EDGES, 1))
    ratio = "".join(f'<i class="d{level}">&lt; {math.exp(-edge):.2f}</i>' for level, edge in edges[::-1]) + "<i>1</i>"
    ratio += "".join(f'<i class="u{level}">&gt; {math.exp(edge):.2f}</i>' for level, edge in edges)
    missing = "" if has_ratio else " (this run wrote no ratios)"
    return (
        f'<p class="key adv">advantage, up to: {advantage}</p><p class="key ratio">ratio of the trained to the sampling weights'
        f"{missing}: {ratio}</p><p>Grey words were not sampled. The tip of a token tells its numbers.</p>"
    )


def page(name: str, steps: dict[int, Numbers], episodes: list[Episode], found: int, tokenizer: PreTrainedTokenizerBase) -> str:
    """The page of `episodes`, the first of `found` ones, below the numbers of `steps` and of their groups."""
    largest = max((abs(e.advantage) for e in episodes if e.advantage and math.isfinite(e.advantage)), default=1.0)
    has_ratio = any(row.get("ratio") for e in episodes for row in e.rows)
    groups = list(by_group(episodes).items())
    asked = [next((m.get("content") or "" for m in reversed(g[0].prompt) if m["role"] == "user"), "") for _, g in groups]
    first = [
        [str(step), f'<a href="#g{place}">{shown(group_id)}</a>', shown(" ".join(str(question).split())[:200])]
        for place, (((step, group_id), _), question) in enumerate(zip(groups, asked))
    ]
    sections = []
    for place, ((step, group_id), group) in enumerate(groups):
        answers = "".join(episode_html(episode, largest, tokenizer) for episode in group)
        sections.append(f'<h2 id="g{place}">step {step}, {shown(group_id)}</h2>{prompt_html(group[0].prompt)}{answers}')
    by_step = table("By step", ["step"], [([str(step)], n) for step, n in steps.items()])
    of_groups = table("By group, of the rollouts below", ["step", "group", "prompt"],
                      list(zip(first, (numbers(group) for _, group in groups))))  # fmt: skip
    return f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>Rollouts of {shown(name)}</title>
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<style>{STYLE}{levels()}</style></head><body>
<h1>Rollouts of {shown(name)}</h1>
<input type="radio" name="by" id="by-a" checked> <label for="by-a">advantage</label>
<input type="radio" name="by" id="by-r"> <label for="by-r">ratio</label>
<main>{legend(largest, has_ratio)}
{by_step}
{of_groups}
<p>{len(episodes)} of {found} rollouts.</p>
{"".join(sections)}
</main></body></html>
"""
