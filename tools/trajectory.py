"""Look at what an agent did: its turns, calls and results, in the terminal or as one HTML page.

    python tools/trajectory.py FILE                 a trace of a run, or trajectories.jsonl: table, and the first one
    python tools/trajectory.py runs/NAME            the newest trace of a run
    python tools/trajectory.py FILE --show 3 7      the 4th and the 8th of the table; --id NAME shows one by name
    python tools/trajectory.py FILE --status invalid --limit 0        what ended so, texts in full
    python tools/trajectory.py FILE --html page.html                  opens without a network

Exit 2 with a message when there is nothing to show.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

sys.path.insert(0, str(Path(__file__).parents[1]))

from tools.rollouts_read import visible
from tools.trajectory_read import Trajectory, Turn, head_of, read

COLOURS = {"ok": "green", "error": "yellow", "failed": "red"}
ROWS = 40  # of the table


def table(found: list[Trajectory]) -> Table:
    shown = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, header_style="bold", collapse_padding=True)
    shown.add_column("#", justify="right")
    shown.add_column("trajectory", overflow="fold")
    shown.add_column("status")
    for name in ("reward", "turns", "calls", "errors", "malformed", "tokens", "seconds"):
        shown.add_column(name, justify="right", no_wrap=True)
    for number, one in enumerate(found[:ROWS]):
        calls, malformed = sum(len(turn.calls) for turn in one.said), sum(bool(turn.problems) for turn in one.said)
        counts = [str(count or "-") for count in (len(one.said), calls, one.count("error"), malformed)]
        reward = "-" if one.reward is None else f"{one.reward:.3g}"
        took = [str(one.tokens or "-"), f"{one.seconds:.3g}" if one.seconds else "-"]
        shown.add_row(str(number), Text(visible(one.name)), Text(one.status or "-"), reward, *counts, *took)
    return shown


def clipped(text: str, limit: int) -> str:
    """The text with steering characters shown, cut in its middle; limit 0: all of it."""
    text = visible(text)
    if not limit or len(text) <= limit:
        return text
    return f"{text[: limit * 2 // 3]}\n[... {len(text) - limit} characters ...]\n{text[-limit // 3 :]}"


def turn_text(turn: Turn, limit: int) -> Text:
    text = Text()
    if turn.thinking:
        text.append(clipped(turn.thinking, limit) + "\n", "italic dim")
    if turn.text:
        text.append(clipped(turn.text, limit) + "\n")
    for name, arguments in turn.calls:
        text.append(visible(name), "bold cyan").append(f" {clipped(arguments, limit)}\n")
    for problem in turn.problems:
        text.append(f"cannot be read: {clipped(problem, limit)}\n", "yellow")
    for result in turn.results:
        text.append(visible(head_of(result)) + "\n", COLOURS.get(result["status"], "red"))
        text.append(clipped(result["content"], limit) + "\n")
    if turn.verdict:
        text.append(f"critic: {clipped(turn.verdict, limit)}\n", "magenta")
    return text


def title_of(number: int, turn: Turn) -> str:
    """The head of a turn: its number, whose it is, what it cost, and what was said of it."""
    told = [f"{number} {'model' if turn.kind == 'assistant' else 'tools' if turn.kind == 'tool' else turn.kind}", *turn.facts]
    told += [] if turn.reward is None else [f"reward {turn.reward:.3g}"]
    told += [] if turn.loss is None else ["trained" if turn.loss else "not trained"]
    return ", ".join(told)


def show(console: Console, one: Trajectory, limit: int) -> None:
    prompt = Text()
    for message in one.prompt:
        prompt.append(f"{message['role']}: ", "bold cyan").append(clipped(str(message.get("content") or ""), limit) + "\n")
    facts = Text(f"{one.status or 'no status'}" + ("" if one.reward is None else f"  reward {one.reward:.4g}"), "bold")
    facts.append("".join(f"  {visible(fact)}" for fact in one.facts), "dim")
    facts.append(f"\n{visible(one.reason)}" if one.reason else "", "bold red" if one.status == "invalid" else "italic")
    console.print(Panel(Group(facts, prompt), title=Text(visible(one.name)), title_align="left", style="cyan"))
    for number, turn in enumerate(one.turns):
        style = "white" if turn.kind == "assistant" else "blue"
        console.print(Panel(turn_text(turn, limit), title=Text(title_of(number, turn)), title_align="left", border_style=style))


def look(options: argparse.Namespace, console: Console) -> None:
    """Do what was asked. ValueError when there is nothing to show."""
    everything = read(options.file)
    found = [one for one in everything if not options.status or one.status in options.status]
    if options.id:
        found = [one for one in found if one.name == options.id]
    if not found:
        states = ", ".join(sorted({one.status or "-" for one in everything}))
        raise ValueError(f"none of {len(everything)} trajectories meets these conditions; their status is {states}")
    if wrong := [number for number in options.show or () if not 0 <= number < len(found)]:
        raise ValueError(f"--show {wrong[0]}: there are {len(found)} trajectories, 0 to {len(found) - 1}")
    chosen = [found[number] for number in options.show] if options.show else found[: len(found) if options.html else 1]
    if options.html:
        from tools.trajectory_html import page

        options.html.write_text(page(options.file.resolve().name, chosen), encoding="utf-8")
        console.print(Text(f"{options.html}: {len(chosen)} of {len(found)} trajectories"))
        return
    if len(found) > 1:
        console.print(table(found))
        console.print(Text(f"{max(len(found) - ROWS, 0)} more" if len(found) > ROWS else "", "dim"))
    for one in chosen:
        show(console, one, options.limit)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help="a JSONL file, or the folder of a run")
    parser.add_argument("--show", type=int, nargs="+", help="numbers in the table; the first one when left out")
    parser.add_argument("--id", help="the trajectory of this name")
    parser.add_argument("--status", nargs="+", help="done, turns, length, invalid, stopped")
    parser.add_argument("--limit", type=int, default=800, help="characters of a text; 0: all")
    parser.add_argument("--html", type=Path, help="write a page instead, with all that was chosen")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    try:
        look(parse(arguments), Console())
    except (ValueError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
