"""One static HTML page of a run or of a cascade: what each stage changed, curves, distributions, mixture, troubles, samples.

    python tools/report.py runs/NAME [--out FILE]        writes runs/NAME/report.html

The page needs no network and runs no script; it opens anywhere and prints. Runs that are not done, or failed, are shown as far
as they came. A folder of runs without a chain is shown as a cascade, in the order in which the runs began.
"""

from __future__ import annotations

import argparse
import sys
import time
from datetime import datetime
from pathlib import Path

import jinja2

sys.path.insert(0, str(Path(__file__).parents[1]))

from megatron_nb.run import write_atomic
from megatron_nb.training.metrics import duration
from tools.report_read import RunRead, read_json, stages_of
from tools.report_stage import cut, section_of
from tools.report_tables import evaluations, flips, ledger_rows
from tools.rollouts_read import visible

FLIPS = 3  # items of evaluations that rose, and as many that fell
TEMPLATE = Path(__file__).with_name("report.html.jinja")


def page(folder: Path) -> str:
    """The page's HTML. ValueError when the folder holds no run."""
    runs = stages_of(folder)
    sections = [
        section_of(run, runs[:number])
        for number, run in enumerate(runs)
        if run.config and (run.evaluates is None or run.status.reason)  # other evaluations are columns of the table
    ]
    base = (read_json(folder / "ledger.json") or {}).get("base_evaluation")
    stages, found = [run for run in runs if run.evaluates is None], evaluations(runs, base)
    loader = jinja2.FileSystemLoader(TEMPLATE.parent)
    environment = jinja2.Environment(
        loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined,
        finalize=lambda value: visible(value) if type(value) is str else value,
    )  # fmt: skip
    return environment.get_template(TEMPLATE.name).render(
        name=folder.resolve().name, made=datetime.now().strftime("%Y-%m-%d %H:%M"), whole=of_all(stages), cascade=len(runs) > 1,
        ledger=ledger_rows(stages, found), evaluations=found, flips=flips(runs, FLIPS), sections=sections, cut=cut,
        overlaps=read_json(folder / "overlap_report.json"),
    )  # fmt: skip


def of_all(runs: list[RunRead]) -> str:
    """The state of everything in one sentence."""
    done = sum(run.status.state == "done" for run in runs)
    seconds = sum(run.ledger.get("seconds") or run.summary.get("wall_s") or 0 for run in runs)
    stages = f"{done} of {len(runs)} stages done" if len(runs) > 1 else runs[0].status.state
    return f"{stages}, {duration(seconds)}" if seconds else stages


def main(arguments: list[str] | None = None) -> int:
    """Command line. 2 when there is nothing to show."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="folder of a run or of a cascade")
    parser.add_argument("--out", type=Path, help="where the page goes (RUN/report.html)")
    options = parser.parse_args(arguments)
    out, began = options.out or options.run / "report.html", time.monotonic()
    try:
        text = page(options.run)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    write_atomic(out, text.encode("utf-8", "replace"))
    print(f"{out}: {len(text) / 1e3:,.0f} kB in {time.monotonic() - began:.1f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
