"""A pool of gloo ranks that stay up between calls: importing torch and megatron-core costs seconds a rank."""

from __future__ import annotations

import gc
import multiprocessing
import os
import sys
import tempfile
import time
import traceback
from datetime import timedelta
from pathlib import Path

ROOT = Path(__file__).parents[1]


def _serve(rank: int, connection) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    sys.path.insert(0, str(ROOT))
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    while True:
        request = connection.recv()
        if request is None:
            return
        world, store, function, args = request
        try:
            dist.init_process_group(
                "gloo", init_method=f"file://{store}", rank=rank, world_size=world, timeout=timedelta(seconds=120)
            )
            result = (True, function(*args))
        except BaseException:  # an assertion, a SystemExit: the test must see it
            result = (False, f"rank {rank} of {world}:\n{traceback.format_exc()}")
        try:
            if "megatron.core.parallel_state" in sys.modules:
                sys.modules["megatron.core.parallel_state"].destroy_model_parallel()
            if dist.is_initialized():
                dist.destroy_process_group()
            gc.collect()  # models are cycles that hold groups, and each idle group's threads wake a hundred times a second
        except Exception:
            result = (False, f"rank {rank} of {world}, tearing down:\n{traceback.format_exc()}")
        connection.send(result)


class RankPool:
    """`run(world, function, *args)` calls a top-level function of an importable module on `world` ranks."""

    def __init__(self, size: int = 4):
        self.size, self.workers = size, []

    def _start(self, count: int) -> None:
        context = multiprocessing.get_context("forkserver")  # imports once; a rank is then a fork, and starts in 0.1 s
        context.set_forkserver_preload(["megatron_nb.training.trainer"])
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # gloo's ranks are on the CPU, and a fork cannot use its parent's CUDA
        while len(self.workers) < count:
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(len(self.workers), theirs), daemon=True)
            process.start()
            theirs.close()
            self.workers.append((process, ours))
        del os.environ["CUDA_VISIBLE_DEVICES"]
        os.environ |= {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}

    def run(self, world: int, function, *args, timeout: float = 300.0) -> list:
        """Results by rank. The first failing rank's traceback is raised; a hang kills the pool."""
        assert world <= self.size, f"the pool has {self.size} ranks, {world} were asked for"
        self._start(world)
        with tempfile.TemporaryDirectory() as folder:
            for _, connection in self.workers[:world]:
                connection.send((world, f"{folder}/store", function, args))
            deadline, results = time.monotonic() + timeout, [None] * world
            waiting = set(range(world))
            failed = None
            while waiting:
                for rank in sorted(waiting):
                    process, connection = self.workers[rank]
                    if connection.poll(0.01):
                        try:
                            results[rank] = connection.recv()
                        except EOFError:
                            results[rank] = (False, f"rank {rank} died with exit code {process.exitcode}")
                        waiting.discard(rank)
                        if not results[rank][0] and failed is None:
                            failed = results[rank][1]
                            deadline = min(deadline, time.monotonic() + 10)  # the others may wait for it for ever
                if time.monotonic() > deadline:
                    self.close()
                    raise AssertionError(failed or f"ranks {sorted(waiting)} gave no answer in {timeout} s")
            if failed:
                self.close()  # a failed rank may have left its peers in an unknown state
                raise AssertionError(failed)
        return [value for _, value in results]

    def close(self) -> None:
        for process, connection in self.workers:
            process.kill()
            process.join()
            connection.close()
        self.workers = []
