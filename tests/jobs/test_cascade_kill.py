"""The whole recipe in miniature, killed ten times over all kinds of stages, ends with the bits of one that was never killed.

Each kill waits for its link to begin, and then for a random part of the time that the link takes.
"""

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import yaml

from megatron_nb.chain import CascadeConfig, Link, links_of
from megatron_nb.processes import die_with
from megatron_nb.schema import build
from tests.jobs.cascade_words import recipe, write_inputs
from tests.jobs.test_resume_job import _content, _equal

ROOT, KILLS = Path(__file__).parents[2], 10
WAYS = ("all die", "the chain dies", "the chain is asked to stop", "Ctrl-C twice")
TEXTS = ("questions/questions/questions.jsonl", "trajectories/trajectories/trajectories.jsonl", "pairs/pairs/pairs.jsonl")


def begin(folder: Path, name: str) -> subprocess.Popen:
    """The command. Sums of several threads may come in another order, so each process has one."""
    command = [sys.executable, "-m", "megatron_nb.cascade", f"--config-dir={folder}", "--config-name=chain", f"name={name}"]
    test, alone = os.getpid(), {**os.environ, "OMP_NUM_THREADS": "1"}

    def first():
        signal.signal(signal.SIGINT, signal.default_int_handler)  # tests in the background ignore it
        die_with(test)

    with (folder / f"{name}.log").open("a") as log:
        return subprocess.Popen(command, cwd=ROOT, env=alone, stdout=log, stderr=log, preexec_fn=first)


def alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def until_there(chain: subprocess.Popen, path: Path, within: float) -> None:
    """Returns when the path is there, or the chain has ended."""
    end = time.monotonic() + within
    while chain.poll() is None and not path.exists():
        assert time.monotonic() < end, f"{path} was never written"
        time.sleep(0.005)


def kill(chain: subprocess.Popen, way: str) -> None:
    """Returns when nothing of the chain is left: what it began saves and leaves."""
    chain.send_signal(signal.SIGSTOP)  # begins nothing meanwhile
    below = psutil.Process(chain.pid).children(recursive=True)
    if way == "all die":
        for process in below:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
    chain.send_signal({"the chain is asked to stop": signal.SIGTERM, "Ctrl-C twice": signal.SIGINT}.get(way, signal.SIGKILL))
    chain.send_signal(signal.SIGCONT)
    if way == "Ctrl-C twice":
        time.sleep(0.3)
        chain.send_signal(signal.SIGINT)
    chain.wait(600)
    end = time.monotonic() + 600
    while any(alive(process) for process in below):
        assert time.monotonic() < end, f"a stage outlived its chain: {way}"
        time.sleep(0.1)


def moments(links: list[Link], draw: random.Random) -> list[int]:
    """The links to be killed in: one of every job, others until there are ten, in the order of the chain."""
    by_job: dict[str, list[int]] = {}
    for place, link in enumerate(links):
        by_job.setdefault(link.module, []).append(place)
    chosen = [draw.choice(places) for places in by_job.values()]
    rest = [place for place in range(len(links)) if place not in chosen]
    return sorted([*chosen, *draw.sample(rest, KILLS - len(chosen))])


def seconds_of(links: list[Link]) -> list[float]:
    """What each link of a chain took, from the end of the one before."""
    files = [links[0].run.parent / "chain.json", *(link.run / "summary.json" for link in links)]
    ends = [file.stat().st_mtime for file in files]
    return [after - before for before, after in zip(ends, ends[1:])]


@pytest.mark.slow
@pytest.mark.timeout(7200)  # eight minutes on a quiet machine
def test_a_recipe_killed_ten_times_ends_with_the_same_weights(tmp_path):
    write_inputs(tmp_path)
    told = {"runs_dir": str(tmp_path / "runs"), **recipe(tmp_path)}
    (tmp_path / "chain.yaml").write_text(yaml.safe_dump(
        {"defaults": ["CascadeConfig", {"launch": "local"}, "_self_"], **told}, sort_keys=False
    ))  # fmt: skip
    chains = {name: links_of(build(CascadeConfig, {"name": name, **told})) for name in ("whole", "killed")}

    def ends_well(name: str) -> None:
        assert begin(tmp_path, name).wait(3000) == 0, (tmp_path / f"{name}.log").read_text()[-3000:]

    ends_well("whole")
    took = seconds_of(chains["whole"])
    draw, links, hit = random.Random(7), chains["killed"], []
    for place in moments(links, draw):
        chain, way = begin(tmp_path, "killed"), WAYS[len(hit) % len(WAYS)]
        until_there(chain, links[place].run / "lock", 1800)
        time.sleep(draw.uniform(0, 0.3) * took[place])
        assert chain.poll() is None, (tmp_path / "killed.log").read_text()[-3000:]
        hit.append((next(link.name for link in links if not link.done), way))
        kill(chain, way)
    print(f"seconds of each link: {[round(one, 1) for one in took]}; killed in: {hit}", file=sys.stderr)
    modules = {link.name: link.module for link in links}
    assert {modules[name] for name, _ in hit} == set(modules.values()), f"a kind of stage was not killed: {hit}"
    ends_well("killed")

    whole, killed = tmp_path / "runs" / "whole", tmp_path / "runs" / "killed"
    for link in chains["whole"]:
        for step in sorted((whole / link.name).glob("checkpoints/step-*"))[-1:]:
            expected, found = _content(step), _content(killed / step.relative_to(whole))
            assert expected.keys() == found.keys()
            different = [key for key, value in expected.items() if not _equal(value, found[key]) and "/python/" not in key]
            # chain.json and paths differ by the chain's name; weights, moments, schedule and data position may not
            assert [key for key in different if not isinstance(expected[key], str)] == [], link.name
    for text in TEXTS:
        assert (whole / text).read_text().replace(str(whole), "") == (killed / text).read_text().replace(str(killed), ""), text
    model = "export/model/model.safetensors"
    assert (whole / model).read_bytes() == (killed / model).read_bytes()
    assert json.loads((killed / "ledger.json").read_text())["stages"][-1]["state"] == "done"
