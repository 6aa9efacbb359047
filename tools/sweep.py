"""A sweep in one table and one plot: what differs between its points, what became of each, what it reached.

python tools/sweep.py runs/SWEEP [--metric heldout_loss] [--csv FILE] [--plot FILE]
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import sys
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[1]))

from megatron_nb.run import write_atomic
from megatron_nb.sweep import SWEEP_FILE
from tools.status import rows_of, status_of

# the first that every finished point has is shown, unless --metric names another
METRICS = ("heldout_loss", "accuracy", "heldout_reward_after", "reward_after", "win_rate_after", "loss_last", "loss")
LOG_LINES = 3


def points_of(root: Path) -> list[dict[str, Any]]:
    """For each point: name, keys (swept key -> value), state, reason, and its numbers (summary, last of the metrics)."""
    path = root / SWEEP_FILE
    if not path.exists():
        sys.exit(f"error: {root} is no sweep: there is no {path.name}; give the folder that --multirun has named")
    points = []
    for told in json.loads(path.read_text()):
        folder = root / told["name"]
        status = status_of(folder, told["name"], LOG_LINES)
        numbers = {key: value for row in rows_of(folder) for key, value in row.items() if isinstance(value, (int, float))}
        if (folder / "summary.json").exists():
            numbers |= json.loads((folder / "summary.json").read_text())
        keys = dict(word.split("=", 1) for word in told["words"])
        points.append({"name": told["name"], "keys": keys, "state": status.state, "reason": status.reason, "numbers": numbers})
    return points


def metric_of(points: list[dict], asked: str | None) -> str | None:
    """The metric to show. SystemExit when no point has the one that was asked for."""
    known = sorted({name for point in points for name in point["numbers"]})
    if asked is not None:
        if asked not in known:
            sys.exit(f"error: --metric {asked}: no point has it; they have {', '.join(known) or 'no numbers yet'}")
        return asked
    done = [point for point in points if point["state"] == "done"] or points
    return next((name for name in METRICS if all(name in point["numbers"] for point in done)), None)


def as_csv(points: list[dict]) -> str:
    """A row a point: its keys, its state, its numbers."""
    keys = list(dict.fromkeys(key for point in points for key in point["keys"]))
    numbers = sorted({name for point in points for name in point["numbers"]})
    out = io.StringIO()
    writer = csv.writer(out)
    writer.writerow(["point", *keys, "state", *numbers])
    for point in points:
        told = [point["keys"].get(key, "") for key in keys]
        writer.writerow([point["name"], *told, point["state"], *(point["numbers"].get(name, "") for name in numbers)])
    return out.getvalue()


def draw(points: list[dict], metric: str, title: str) -> bytes:
    """The metric over the key with the most numeric values, a line for each setting of the others; bars without such a key."""
    keys = list(dict.fromkeys(key for point in points for key in point["keys"]))
    with_value = [point for point in points if metric in point["numbers"]]
    numeric = [key for key in keys if all(_number(point["keys"].get(key)) is not None for point in with_value)]
    figure = Figure((7, 4.5), layout="constrained")
    axis = figure.subplots()
    if numeric and with_value:
        over = max(numeric, key=lambda key: len({point["keys"][key] for point in with_value}))
        lines: dict[str, list[tuple[float, float]]] = {}
        for point in with_value:
            rest = "  ".join(f"{key.rpartition('.')[2]} {value}" for key, value in point["keys"].items() if key != over)
            lines.setdefault(rest, []).append((_number(point["keys"][over]), point["numbers"][metric]))
        for label, values in lines.items():
            axis.plot(*zip(*sorted(values)), marker="o", label=label or None)
        x = [value for values in lines.values() for value, _ in values]
        if min(x) > 0 and max(x) / min(x) >= 8:
            axis.set_xscale("log")
        axis.set_xlabel(over)
        if any(lines):
            axis.legend(fontsize=8)
    else:
        axis.barh([point["name"] for point in with_value], [point["numbers"][metric] for point in with_value])
    axis.set_ylabel(metric)
    axis.set_title(title)
    out = io.BytesIO()
    figure.savefig(out, format="png", dpi=140)
    return out.getvalue()


def _number(text: str | None) -> float | None:
    try:
        return float(text)
    except (TypeError, ValueError):
        return None


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="the sweep's folder")
    parser.add_argument("--metric", help=f"to be shown and drawn (the first that all have of {', '.join(METRICS)})")
    parser.add_argument("--csv", type=Path, help="where the table goes (RUN/sweep.csv)")
    parser.add_argument("--plot", type=Path, help="where the plot goes (RUN/sweep.png)")
    args = parser.parse_args()
    points = points_of(args.run)
    metric = metric_of(points, args.metric)
    keys = list(dict.fromkeys(key for point in points for key in point["keys"]))
    table = Table(*keys, "state", *([metric] if metric else []), "why")
    for point in points:
        value = point["numbers"].get(metric)
        told = [point["keys"].get(key, "") for key in keys]
        shown = [f"{value:.5g}" if value is not None else ""] if metric else []
        table.add_row(*told, point["state"], *shown, point["reason"].splitlines()[-1][:80] if point["reason"] else "")
    Console().print(table)
    csv_file, plot = args.csv or args.run / "sweep.csv", args.plot or args.run / "sweep.png"
    write_atomic(csv_file, as_csv(points))
    print(csv_file)
    if metric:
        write_atomic(plot, draw(points, metric, args.run.name))
        print(plot)


if __name__ == "__main__":
    main()
