"""Look at the rollouts of a run: in the terminal, as a difference between two steps, or as one HTML page.

    python tools/rollouts.py RUN                                  table by step; groups and answers of the newest one
    python tools/rollouts.py RUN --step 40 --reward :0.2 --sort reward --reverse     the worst of step 40
    python tools/rollouts.py RUN --status invalid                 what has no reward, and why
    python tools/rollouts.py RUN --heldout --diff 0 40            prompts that both steps have: rewards, lengths, best answers
    python tools/rollouts.py RUN --html page.html                 tokens coloured by advantage or ratio; opens without a network

A step shown alone is read alone; without --step every file is read. `invalid` are answers without a reward, whatever ended
them: they enter no mean. Exit 2 with a message when there is nothing to show.
"""

from __future__ import annotations

import argparse
import difflib
import re
import sys
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

sys.path.insert(0, str(Path(__file__).parents[1]))

from tools.rollouts_read import (
    SORTS,
    Change,
    Episode,
    Numbers,
    by_group,
    changes,
    numbers,
    paired,
    parse_range,
    read_step,
    select,
    step_files,
    visible,
)

WORDS = 2000  # beyond, two answers are shown one below the other: comparing them word by word takes seconds


def figure(value: float | None, form: str = ".3f") -> str:
    return "-" if value is None else format(value, form)


def cells(found: Numbers) -> list[str]:
    """The columns that groups and steps share."""
    span = "-" if found.reward is None else f"{found.lowest:.3g} .. {found.highest:.3g}"
    return [
        str(found.rollouts),
        str(found.invalid or "-"),
        figure(found.reward),
        figure(found.spread),
        span,
        figure(found.length, ".0f"),
        str(found.truncated or "-"),
    ]


COLUMNS = ["n", "invalid", "reward", "spread", "range", "tokens", "cut"]  # reward, tokens: means; cut: ended by length


def number_table(title: str, first: list[str]) -> Table:
    table = Table(title=title, title_justify="left", header_style="bold", box=SIMPLE_HEAD, show_edge=False,
                  pad_edge=False, collapse_padding=True)  # fmt: skip
    for name in first:
        table.add_column(name, overflow="fold")
    for name in COLUMNS:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def last_user(prompt: list[dict]) -> str:
    """The question of a prompt in one line."""
    asked = [str(message.get("content") or "") for message in prompt if message["role"] == "user"]
    return visible(" ".join((asked or [""])[-1].split()))


def steps_table(steps: dict[int, Numbers]) -> Table:
    table = number_table("by step", ["step", "groups", "equal"])  # equal: groups of equal rewards, which teach nothing
    for step, found in steps.items():
        table.add_row(str(step), str(found.groups), str(found.equal or "-"), *cells(found))
    return table


def groups_table(episodes: list[Episode]) -> Table:
    table = number_table("by group", ["step", "group", "prompt"])
    for (step, name), group in by_group(episodes).items():
        table.add_row(str(step), Text(visible(name)), Text(last_user(group[0].prompt)[:48]), *cells(numbers(group)))
    return table


def messages_text(prompt: list[dict]) -> Text:
    text = Text()
    for message in prompt:
        text.append(f"{message['role']}: ", "bold cyan")
        text.append(visible(str(message.get("content") or message.get("tool_calls") or "")) + "\n")
    return text


def facts(episode: Episode) -> Text:
    """Everything about one rollout but its words."""
    text = Text()
    if episode.reward is None:
        text.append(f"INVALID: {visible(episode.reason)}\n", "bold red")
    else:
        text.append(f"reward {episode.reward:.4g}", "bold")
        text.append("".join(f"  {visible(name)} {value:.4g}" for name, value in (episode.score.get("parts") or {}).items()))
        text.append(f"\nreason: {visible(episode.reason)}\n" if episode.reason else "\n", "italic")
    advantage = figure(episode.advantage, "+.4g")
    text.append(f"advantage {advantage}  tokens {episode.length}  ended by {episode.ended}", "dim")
    versions = episode.versions
    text.append(f"  weights {versions[0]}" + (f" to {versions[-1]}" if versions[1:] else "") if versions else "", "dim")
    text.append(f"  in {len(episode.rows)} segments\n" if len(episode.rows) > 1 else "\n", "dim")
    turns = [turn for row in episode.rows for turn in row["turns"]]
    for number, turn in enumerate(turns if len(turns) > 1 else []):
        reward = "" if turn.get("reward") is None else f"  reward {turn['reward']:.4g}"
        calls = f"  {turn['calls']} calls" if turn.get("calls") else ""
        status = f"  {turn['status']}" if turn.get("status") else ""
        text.append(f"turn {number}: {turn['kind']}  {turn['stop'] - turn['start']} tokens{calls}{status}{reward}\n", "dim")
    return text


def show(console: Console, episodes: list[Episode]) -> None:
    """Every episode in a frame; its prompt only where it is another than the one above."""
    above = None
    for episode in episodes:
        if episode.prompt != above:
            console.print(Panel(messages_text(episode.prompt), title="prompt", title_align="left", style="cyan"))
        above = episode.prompt
        title = Text(f"step {episode.step}  {visible(episode.group_id)}/{episode.index}")
        colour = "red" if episode.reward is None else "green" if (episode.advantage or 0) > 0 else "white"
        body = Group(facts(episode), Text(visible(episode.text)))
        console.print(Panel(body, title=title, title_align="left", border_style=colour))


def word_difference(before: str, after: str) -> Text:
    """`after`, with what is new in green and what is gone struck out; both, one below the other, when little is common."""
    left, right = (re.findall(r"\s+|\S+", visible(text)) for text in (before, after))
    match = difflib.SequenceMatcher(None, left, right, autojunk=False)
    if max(len(left), len(right)) > WORDS or match.ratio() < 0.5:
        return Text.assemble(("".join(left), "red"), ("\n---\n", "dim"), ("".join(right), "green"))
    text = Text()
    for kind, a, b, c, d in match.get_opcodes():
        if kind == "equal":
            text.append("".join(left[a:b]))
        else:
            text.append("".join(left[a:b]), "red strike")
            text.append("".join(right[c:d]), "green")
    return text


def show_difference(console: Console, found: list[Change], steps: tuple[int, int], limit: int) -> None:
    """Sums over the shared prompts, then the prompts by size of the change of their reward."""
    for name, form in (("reward", "+.4f"), ("length", "+.1f")):
        values = [value for change in found if (value := change.of(name)) is not None]
        if values:
            mean, error = paired(values)
            tail = f" ± {error:{form[1:]}} (standard error over {len(values)} prompts)" if error is not None else ""
            console.print(Text(f"change of the mean {name}, step {steps[0]} to {steps[1]}: {mean:{form}}{tail}"))
    found.sort(key=lambda change: -abs(change.of("reward") or 0))
    for change in found[:limit]:
        console.print(Panel(messages_text(change.before[0].prompt), title="prompt", title_align="left", style="cyan"))
        table = number_table("", ["step"])
        for step, side in zip(steps, (change.before, change.after)):
            table.add_row(str(step), *cells(numbers(side)))
        best = change.best()
        title = "best answers: " + " and ".join(f"{e.group_id}/{e.index} ({figure(e.reward, '.4g')})" for e in best)
        body = word_difference(best[0].text, best[1].text)
        console.print(table, Panel(body, title=Text(visible(title)), title_align="left"))


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="run folder, such as runs/NAME")
    parser.add_argument("--step", type=int, help="default: the newest")
    parser.add_argument("--heldout", action="store_true", help="the answers to the held-out prompts, asked after steps")
    parser.add_argument("--reward", metavar="LO:HI", help="bounds included; either may be left out")
    parser.add_argument("--status", nargs="+", choices=["done", "length", "turns", "invalid"])
    parser.add_argument("--group", metavar="ID")
    parser.add_argument("--sort", choices=list(SORTS), help="highest first")
    parser.add_argument("--reverse", action="store_true", help="with --sort: lowest first")
    parser.add_argument("--limit", type=int, help="answers (or changed prompts) shown; default: 10 here, 200 on a page")
    parser.add_argument("--diff", type=int, nargs=2, metavar=("N", "M"), help="what changed from step N to step M")
    parser.add_argument("--html", type=Path, metavar="OUT.html", help="write a page instead")
    parser.add_argument("--tokenizer", help="folder of the run's tokenizer, for --html; default: the run's own")
    options = parser.parse_args(arguments)
    if options.diff and (options.html or options.step is not None):
        parser.error("--diff is for the terminal and names its two steps: leave out --html and --step")
    return options


def chosen(files: dict[int, Path], step: int) -> list[Episode]:
    if step not in files:
        raise ValueError(f"step {step} has no rollouts: there are {', '.join(map(str, files))}")
    return read_step(files[step], step)


def look(options: argparse.Namespace, console: Console) -> None:
    """Do what was asked. ValueError when there is nothing to show."""
    files = step_files(options.run, "heldout" if options.heldout else "step")
    wanted = {
        "reward": parse_range(options.reward) if options.reward else None,
        "status": options.status,
        "group": options.group,
        "sort": options.sort,
        "reverse": options.reverse,
    }
    if options.diff:
        sides = [select(chosen(files, step), **wanted) for step in options.diff]
        console.print(steps_table({step: numbers(side) for step, side in zip(options.diff, sides)}))
        found = changes(*sides)
        if not found:
            raise ValueError(f"steps {options.diff[0]} and {options.diff[1]} have no prompt in common: nothing to compare")
        show_difference(console, found, tuple(options.diff), options.limit or 10)
        return
    step = max(files) if options.step is None else options.step
    episodes = chosen(files, step)
    steps = {step: numbers(episodes)}
    if options.step is None:
        steps = {number: numbers(episodes if number == step else read_step(path, number)) for number, path in files.items()}
    found = select(episodes, **wanted)
    if not found:
        raise ValueError(f"none of the {len(episodes)} rollouts of step {step} meets these conditions: relax one")
    if options.html:
        from tools.rollouts_html import page, tokenizer_of  # transformers, seconds: only a page needs tokens

        shown, tokenizer = found[: options.limit or 200], tokenizer_of(options.run, options.tokenizer)
        page_text = page(options.run.resolve().name, steps, shown, len(found), tokenizer)
        options.html.write_text(page_text, encoding="utf-8")
        console.print(Text(f"{options.html}: {len(shown)} of {len(found)} rollouts of step {step}"))
        return
    console.print(steps_table(steps), groups_table(found))
    show(console, found[: options.limit or 10])
    if len(found) > (options.limit or 10):
        console.print(Text(f"{len(found) - (options.limit or 10)} more: --limit shows them", "dim"))


def main(arguments: list[str] | None = None) -> int:
    try:
        look(parse(arguments), Console())
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
