"""Trajectories as one static HTML page. No script, nothing from a network; whatever a tool or a model said stays text."""

from __future__ import annotations

from html import escape

from tools.rollouts_html import STYLE
from tools.rollouts_read import visible
from tools.trajectory import title_of
from tools.trajectory_read import Trajectory, Turn, head_of

OWN = """
.turn { margin: .3em 0; padding: .2em .8em; border-left: 3px solid #9ab; color: inherit; font: inherit; }
.turn.tool { border-color: #8fb8ee; background: #f7faff; margin-left: 2em; }
.thinking { color: #778; font-style: italic; } .call { color: #0b5c8a; font-weight: 600; }
.ok { color: #2a7d2a; } .error, .problem { color: #a06a00; } .failed { color: #b3261e; font-weight: 600; }
"""


def shown(text: str) -> str:
    return escape(visible(text))


def turn_html(number: int, turn: Turn) -> str:
    parts = []
    if turn.thinking:
        parts.append(f'<div class="words thinking">{shown(turn.thinking)}</div>')
    if turn.text:
        parts.append(f'<div class="words">{shown(turn.text)}</div>')
    for name, arguments in turn.calls:
        parts.append(f'<div class="words"><span class="call">{shown(name)}</span> {shown(arguments)}</div>')
    parts += [f'<div class="words problem">cannot be read: {shown(problem)}</div>' for problem in turn.problems]
    for result in turn.results:
        status = result["status"] if result["status"] in ("ok", "error", "failed") else "failed"
        parts.append(f'<span class="{status}">{shown(head_of(result))}</span>')
        parts.append(f'<div class="words">{shown(result["content"])}</div>')
    if turn.verdict:
        parts.append(f'<div class="words facts">critic: {shown(turn.verdict)}</div>')
    kind = "tool" if turn.kind == "tool" else "said"
    title = f'<summary class="facts">{shown(title_of(number, turn))}</summary>'
    return f'<details class="turn {kind}" open>{title}{"".join(parts)}</details>'


def trajectory_html(number: int, one: Trajectory) -> str:
    prompt = "".join(
        f'<span class="role">{shown(message["role"])}</span>\n{shown(str(message.get("content") or ""))}\n'
        for message in one.prompt
    )
    reward = "" if one.reward is None else f" reward {one.reward:.4g}"
    reason = f'<span class="why">{shown(one.reason)}</span>' if one.reason else ""
    facts = ", ".join([f"{len(one.said)} turns", f"{one.tokens} tokens", *one.facts])
    invalid = " invalid" if one.status == "invalid" else ""
    return (
        f'<h2 id="t{number}">{shown(one.name)}</h2><p><b>{shown(one.status or "no status")}{reward}</b> {reason} '
        f'<span class="facts">{shown(facts)}</span></p><details class="answer{invalid}" open>'
        f"<summary>{len(one.turns)} turns</summary>"
        f'<div class="prompt words">{prompt}</div>{"".join(turn_html(n, turn) for n, turn in enumerate(one.turns))}</details>'
    )


def page(name: str, found: list[Trajectory]) -> str:
    """The page of these trajectories, with a list of them on top."""
    rows = []
    for number, one in enumerate(found):
        errors = one.count("error") + one.count("failed")
        cells = [len(one.said), sum(len(turn.calls) for turn in one.said), errors, one.tokens]
        reward = "-" if one.reward is None else f"{one.reward:.3g}"
        rows.append(
            f'<tr><td class="w"><a href="#t{number}">{shown(one.name)}</a></td><td class="w">{shown(one.status or "-")}</td>'
            f"<td>{reward}</td>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>"
        )
    heads = "".join(f"<th>{head}</th>" for head in ("reward", "turns", "calls", "errors", "tokens"))
    return f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>Trajectories of {shown(name)}</title>
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<style>{STYLE}{OWN}</style></head><body>
<h1>Trajectories of {shown(name)}</h1>
<table><tr><th class="w">trajectory</th><th class="w">status</th>{heads}</tr>{"".join(rows)}</table>
{"".join(trajectory_html(number, one) for number, one in enumerate(found))}
</body></html>
"""
