"""The whole recipe as one command: stages in order, each from the checkpoint of the one before, here or as jobs of Slurm.

python -m megatron_nb.cascade --config-name cascade name=RECIPE [launch=slurm] [overrides] [--dry-run]

A stage that is done is never run again, and one that waits or runs is not submitted again: the same command continues. A stage
whose gate does not hold ends the chain (exit code 86), and so do rows that hold items of headline tasks, before a stage trains
on them. ledger.json tells what every stage has come to.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import logging
import os
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.table import Table

from megatron_nb import processes, slurm
from megatron_nb.chain import CascadeConfig, Link, links_of
from megatron_nb.chain_check import Checked, absent, changed_since, check_links, refuse
from megatron_nb.config import ConfigError, job, to_yaml
from megatron_nb.launch import slurm_job
from megatron_nb.ledger import GATE_EXIT, GateShut, check_gate, summary_of, write_chain, write_ledger
from megatron_nb.run import Lock, run_folder, write_atomic

STAGE = "stage"  # the resolved configuration of a link, as a stage file in its run

log = logging.getLogger(__name__)


def run_here(links: list[Link]) -> None:
    """One after the other; the first that fails ends the chain with its exit code. GateShut when one is not good enough."""
    root = links[0].run.parent
    for number, link in enumerate(links, 1):
        place = f"[{number}/{len(links)}] {link.name}"
        if link.done:
            log.info("%s is done: %s", place, link.run)
        else:
            log.info("%s begins: %s", place, link.run)
            refuse_queued([link])
            began = time.monotonic()
            code = processes.run(link.module, as_checked(link), ranks_of(link))
            write_ledger(root)
            if code:
                log.error("%s ended with %d after %.0f s: see tools/status.py %s; the same command goes on", place, code,
                          time.monotonic() - began, root)  # fmt: skip
                sys.exit(code if code > 0 else 128 - code)
            if summary_of(link.run) is None:
                raise ConfigError(
                    f"{link.name} ended well, but wrote no {link.run}/summary.json: do its words start it elsewhere?"
                )
            log.info("%s is done in %.0f s", place, time.monotonic() - began)
        check_gate(root, link.name, link.gate)


def as_checked(link: Link) -> list[str]:
    """Words that start a link with the configuration of now, whatever becomes of the stage files; a copy lies in its run."""
    link.run.mkdir(parents=True, exist_ok=True)
    write_atomic(link.run / f"{STAGE}.yaml", to_yaml(link.config))
    return [f"--config-dir={link.run.absolute()}", f"--config-name={STAGE}"]


def ranks_of(link: Link) -> int:
    """Processes that a stage is begun with here; one that has services starts them and its ranks by itself."""
    launch = link.config.launch
    return 1 if launch.services else launch.ranks or 1


def submit(links: list[Link], slurm_config: slurm.SlurmConfig) -> dict[str, str]:
    """Link -> job of those that are not done; each waits for the stages that it needs, and checks its gate when it ends.

    ConfigError when Slurm refuses, GateShut when a stage that is done is not good enough.
    """
    jobs: dict[str, str] = {}
    for link in links:
        if not link.done and (known := slurm.running(link.run)) is not None and slurm.state(known) == "COMPLETING":
            raise ConfigError(f"{link.name} is job {known}, which ends just now: give the same command again in a minute")
    for link in links:
        if link.done:
            log.info("%s is done: %s", link.name, link.run)
            check_gate(link.run.parent, link.name, link.gate)
            continue
        known = slurm.running(link.run)
        if known is None and link.searches and slurm.running(link.run.parent / link.searches) is not None:
            continue  # its stage was submitted behind a search
        if known is None:
            ready = slurm_job(link.config, link.name, link.module)
            ready.finish = shlex.join(["python", "-m", "megatron_nb.ledger", str(link.run.parent), link.name])
            ready.config.after = [*slurm_config.after, *(jobs[name] for name in link.waits_for if name in jobs)]
            known = ready.submit()
        jobs[link.name] = known
        log.info("%s is job %s", link.name, known)
    return jobs


def cancel(links: list[Link]) -> None:
    """Take the chain out of the queue, last stage first so that none starts in between. ConfigError without a queue."""
    if not slurm.here():
        raise ConfigError("action=cancel: there is no squeue on this machine: stop a chain that runs here by Ctrl-C")
    jobs = {link.name: job_id for link in reversed(links) if (job_id := slurm.running(link.run)) is not None}
    for name, job_id in jobs.items():
        subprocess.run(["scancel", job_id])  # says by itself what it cannot do: a job may have ended by now
        log.info("cancelled %s, job %s", name, job_id)
    if not jobs:
        log.info("no stage of this chain is in the queue")


def move_aside(links: list[Link]) -> None:
    """Rename the runs of these links, the last first: a kill in between leaves none whose sources are gone.

    ConfigError or RunFolderError when one of them waits or runs.
    """
    refuse_queued(links)
    for lock in (link.run / "lock" for link in links):
        if lock.exists():
            Lock(lock).release()
    for link in reversed(links):
        if link.run.exists():
            names = (link.run.with_name(f"{link.name}.before-{number}") for number in itertools.count(1))
            aside = link.run.rename(next(name for name in names if not name.exists()))
            log.warning("moved aside: %s", aside)
    log.warning("to go on later leave from_stage out: with it everything from there on is made anew once more")


def refuse_queued(links: list[Link]) -> None:
    """ConfigError when a link waits or runs as a job of Slurm."""
    for link in links:
        if slurm.here() and (job_id := slurm.running(link.run)) is not None:
            raise ConfigError(f"{link.name} is job {job_id}: action=cancel first")


@contextlib.contextmanager
def alone(root: Path) -> Iterator[None]:
    """Holds the chain. ConfigError when another command has it; one that was killed holds nothing."""
    root.mkdir(parents=True, exist_ok=True)
    with open(root / "chain.lock", "a+") as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # of this process only: its stages do not inherit it
        except OSError as error:
            file.seek(0)
            if error.errno in (errno.EAGAIN, errno.EACCES):
                raise ConfigError(f"{root} is the chain of {file.read()}, which is at work: wait for it, or stop it") from error
            log.warning("%s: no locks on this file system (%s): two commands at once are not noticed", file.name, error)
        file.truncate(0)
        print(f"process {os.getpid()} on {socket.gethostname()}", end="", file=file, flush=True)
        yield


def describe(links: list[Link], checked: dict[str, Checked]) -> None:
    """Print what every stage would do, what is missing, and what would stop it."""
    for link in links:
        state = "done" if link.done else "to do"
        print(f"\n== {link.name:<24} {state}\npython -m {link.module} {shlex.join(link.command)}")
        for label, told in {"waits for": ", ".join(link.waits_for), "gate": link.gate.told if link.gate else ""}.items():
            if told:
                print(f"{label:<12} {told}")
        if link.done:
            continue
        found = checked[link.name]
        lines = [found.report, f"not there    {len(found.missing)} of its inputs, see the end" if found.missing else ""]
        lines += [f"more is known when {', '.join(dict.fromkeys(found.later))} is done"] if found.later else []
        lines += [f"PROBLEM      {found.problem}"] if found.problem else []
        print("\n".join(filter(None, lines)))
    missing = absent(checked)
    print("\n".join(["", *(["== not there, and read by"] if missing else []), *missing]))
    print(f"{len(links)} links, {sum(link.done for link in links)} done, {len(missing)} inputs are not there")


def tell(root: Path) -> None:
    """Print the ledger: what every stage took and came to."""
    table = Table("stage", "state", "time", "gate", "evaluation (change)", title=str(root))
    for row in write_ledger(root):
        took = f"{row['seconds']:.0f} s" if row["seconds"] is not None else ""
        scores = []
        for task, metrics in (row["evaluation"] or {}).items():
            name = next(iter(metrics), None)
            if name is not None:
                change = ((row["changed"] or {}).get(task) or {}).get(name)
                scores.append(f"{task} {metrics[name]:.3g}" + (f" ({change:+.2g})" if change is not None else ""))
        table.add_row(row["name"], row["state"], took, row["gate"]["told"] if row["gate"] else "", "  ".join(scores))
    Console().print(table)


def run(config: CascadeConfig) -> None:
    """The chain to its end, or into the queue. ConfigError before any work; SystemExit with a stage's code; GateShut."""
    links, root = links_of(config), run_folder(config.runs_dir, config.name)
    first = [config.from_stage in (link.name, link.searches) for link in links].index(True) if config.from_stage else len(links)
    behind = links[first:]
    for link in behind:
        link.anew = True
    warn(links)
    refuse(links, check_links(links))
    with alone(root):
        if behind:
            move_aside(behind)
            for link in behind:
                link.anew = False
        write_chain(root, [link.known for link in links])
        write_ledger(root)
        if config.launch.kind == "slurm":
            submit(links, config.launch.slurm)
            print(f"see it: python tools/status.py {root}")
            return
        run_here(links)
        tell(root)


def warn(links: list[Link]) -> None:
    """Name the stages that are done and would be made in another way now."""
    for link in links:
        if link.done and link.searches is None and (changed := changed_since(link)):
            told = ", ".join(f"{key}: {then!r} then, {now!r} now" for key, (then, now) in changed.items())
            log.warning("%s is done with other settings (%s): from_stage=%s makes it anew", link.name, told, link.name)


@job(CascadeConfig, "cascade")
def main(config: CascadeConfig) -> None:
    """Run or submit the chain, describe it, or take it out of the queue."""
    logging.basicConfig(level=logging.INFO, format="%(message)s", force=True)
    if config.launch.dry_run:
        links = links_of(config)
        print(to_yaml(config))
        warn(links)
        describe(links, check_links(links))
    elif config.action == "cancel":
        cancel(links_of(config))
    else:
        try:
            run(config)
        except GateShut as shut:
            print(f"error: {shut}", file=sys.stderr)
            sys.exit(GATE_EXIT)


if __name__ == "__main__":
    main()
