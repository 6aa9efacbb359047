"""What the tests on a real local Slurm share: the words of a tiny fine-tuning, a site file, waiting for jobs."""

import contextlib
import io
import json
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from megatron_nb import sft
from tests.data.data_tokenizers import chat, tiny
from tools.local_slurm import LocalSlurm

TINY = ["model=tiny", "model.vocab_size=400", "model.hidden_size=32", "model.head_dim=8", "model.ffn_hidden_size=64"]
SITE = """
partition: batch
rendezvous: address
environment: {OMP_NUM_THREADS: 1, WANDB_MODE: offline, GLOO_SOCKET_IFNAME: lo, HF_HUB_OFFLINE: 1, TORCHDYNAMO_DISABLE: 1}
"""
ENDED = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "DEADLINE", "OUT_OF_MEMORY"}


class Cluster:
    """A local Slurm, a folder with rows, a tokenizer and a site file, and the commands of a user."""

    def __init__(self, slurm: LocalSlurm, folder: Path):
        self.slurm, self.folder, self.site = slurm, folder, folder / "site.yaml"
        self.site.write_text(SITE)
        self.nodes, self.ranks_per_node, self.always = 2, 2, ["parallel=cpu4"]
        tiny().save_pretrained(folder / "tokenizer")
        draw, some = random.Random(5), ["some", "words", "of", "a", "question", "and", "an", "answer", "long", "short"]
        with (folder / "rows.jsonl").open("w") as file:
            for _ in range(80):
                question, answer = (" ".join(draw.choices(some, k=draw.randint(1, 12))) for _ in range(2))
                file.write(json.dumps(chat(question, answer)) + "\n")

    def words(self, name: str, *more: str) -> list[str]:
        """Of a job on `nodes` nodes of `ranks_per_node` ranks each."""
        data = [f"data.sources.a.path={self.folder}/rows.jsonl", f"data.tokenizer={self.folder}/tokenizer"]
        sizes = ["context=2k", "seq_len=128", "global_batch_size=4", "num_steps=10", "checkpoint.every=5"]
        rest = ["optimizer.lr=1e-2", "optimizer.warmup_steps=3", "data.workers=0", "data.loader_workers=0", "log.wandb=off"]
        slurm = ["launch=slurm", f"launch.slurm.nodes={self.nodes}", f"launch.slurm.ranks_per_node={self.ranks_per_node}"]
        where = [f"launch.slurm.site={self.site}", f"runs_dir={self.folder}/runs", f"name={name}"]
        return [*TINY, "data=files", *data, f"data.cache_dir={self.folder}/cache", *sizes, *rest, *slurm, *where,
                *self.always, *more]  # fmt: skip

    def main(self, *words: str, code: int = 0, main=sft.main) -> str:
        """What `python -m megatron_nb.sft WORDS` prints, run in this process: a new one takes seconds to import torch."""
        out, found = io.StringIO(), 0
        as_told = patch.object(sys, "argv", ["job", *words]), patch.dict(os.environ, self.slurm.env)
        with as_told[0], as_told[1], contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
            try:
                main()
            except SystemExit as left:
                found = left.code or 0
        assert found == code, out.getvalue()
        return out.getvalue()

    def run(self, *command: str, code: int = 0) -> str:
        """What `python COMMAND` prints, both streams; it must end with `code`."""
        done = subprocess.run([sys.executable, *command], env=self.slurm.env, capture_output=True, text=True, timeout=300)
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout + done.stderr

    def status(self, name: str, code: int = 0) -> str:
        """What tools/status.py says of a run or chain, in one line."""
        with patch.dict(self.slurm.env, {"COLUMNS": "250"}):
            return " ".join(self.run("tools/status.py", f"{self.folder}/runs/{name}", code=code).split())

    def submit(self, name: str, *more: str) -> str:
        """The id of the submitted job."""
        said = self.main(*self.words(name, *more))
        return said.rpartition("\njob ")[2].partition(":")[0]

    def slurm_says(self, *command: str) -> str:
        return subprocess.run(command, env=self.slurm.env, capture_output=True, text=True, check=True).stdout

    def state(self, job_id: str) -> str:
        return self.slurm_says("squeue", "-h", "-t", "all", "-j", job_id, "-o", "%T").strip()

    def until(self, what: str, true, seconds: float = 800) -> None:
        end = time.monotonic() + seconds
        while not true():
            assert time.monotonic() < end, f"{what} did not come to pass in {seconds:g} s\n{self.logs()}"
            time.sleep(0.2)

    def ended(self, job_id: str, state: str = "COMPLETED", seconds: float = 800) -> None:
        """Wait for the job's end, which must be `state`."""
        self.until(f"the end of job {job_id}", lambda: self.state(job_id) in ENDED, seconds)
        assert self.state(job_id) == state, self.logs()

    def steps(self, name: str) -> int:
        """Lines of metrics that the run has written."""
        path = self.folder / "runs" / name / "metrics.jsonl"
        return len(path.read_text().splitlines()) if path.exists() else 0

    def losses(self, name: str) -> list[float]:
        rows = [json.loads(line) for line in (self.folder / "runs" / name / "metrics.jsonl").read_text().splitlines()]
        return [row["loss"] for row in rows if "loss" in row]

    def weights(self, name: str) -> dict[str, torch.Tensor]:
        """Every tensor of a run's last checkpoint, optimizer moments too."""
        last = sorted((self.folder / "runs" / name / "checkpoints").glob("step-*"))[-1]
        dcp_to_torch_save(last, self.folder / "whole.pt")
        found = torch.load(self.folder / "whole.pt", weights_only=False)
        return {key: value for key, value in found.items() if isinstance(value, torch.Tensor)}

    def ranks(self, name: str) -> list[int]:
        """Process ids of the ranks of a run."""
        told = subprocess.run(["pgrep", "-f", f"[m]egatron_nb.sft --config-dir {self.folder}/runs/{name}/slurm"],
                              capture_output=True, text=True)  # fmt: skip
        pids = [int(pid) for pid in told.stdout.split()]
        return [pid for pid in pids if "\0LOCAL_RANK=" in Path(f"/proc/{pid}/environ").read_text()]

    def log(self, name: str) -> str:
        """What the jobs of a run have printed."""
        return "".join(path.read_text() for path in sorted(self.folder.glob(f"runs/{name}/slurm/*.log")))

    def logs(self) -> str:
        """The queue and the ends of all logs, for a failure's message."""
        paths = sorted(self.folder.glob("runs/*/slurm/*.log"))
        queue = subprocess.run(["squeue", "-t", "all"], env=self.slurm.env, capture_output=True, text=True).stdout
        return queue + "".join(f"\n{path}:\n{path.read_text()[-3000:]}" for path in paths)


def running_cluster(folder: Path, port: int) -> Iterator[Cluster]:
    """For a fixture: four nodes with two pretend GPUs each; the nodes take the ports above `port`."""
    slurm = LocalSlurm(folder / "cluster")
    slurm.up(nodes=4, gpus=2, cpus=8, memory_mb=4000, grace_s=20, port=port)
    try:
        yield Cluster(slurm, folder)
    finally:
        slurm.down()


def why_not() -> str | None:
    """Why there can be no local Slurm here."""
    from tools.local_slurm import check_host

    try:
        check_host()
    except RuntimeError as error:
        return str(error)
    return None if shutil.which("pgrep") and os.geteuid() == 0 else "needs pgrep"


needs_slurm = [pytest.mark.slurm, pytest.mark.timeout(1800), pytest.mark.skipif(why_not() is not None, reason=str(why_not()))]
