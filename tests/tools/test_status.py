"""The status of a run: its servers, the reason that its job left, the end of its log without what says nothing."""

import json
import subprocess
import sys

from tools import status


def test_the_status_of_a_run_tells_of_its_servers_and_of_the_reason_that_its_job_left(tmp_path):
    (tmp_path / "logs" / "attempt-1").mkdir(parents=True)
    for folder in ("services", "slurm"):
        (tmp_path / folder).mkdir()
    record = {"name": "engine", "replica": 0, "url": "http://n2:8000", "state": "down", "said": "exit 1", "node": "n2",
              "restarts": 2, "start": "1.0"}  # fmt: skip
    (tmp_path / "services" / "engine-0.json").write_text(json.dumps(record))
    (tmp_path / "slurm" / "job.json").write_text('{"id": "7"}')
    (tmp_path / "slurm" / "stopped-7.txt").write_text("data.sources.a.path=gone.jsonl is no file\n")
    done = subprocess.run([sys.executable, "tools/status.py", str(tmp_path), "--json"], capture_output=True, text=True)
    (one,) = json.loads(done.stdout)
    assert done.returncode == 1 and one["reason"] == "data.sources.a.path=gone.jsonl is no file"
    assert one["services"] == ["engine-0 is down, exit 1: http://n2:8000 on n2, started again 2 times"]


def test_the_end_of_a_log_is_shown_without_what_torchrun_says_of_it(tmp_path):
    noise = ["1: [W1130 16:44:03.94 TCPStore.cpp:138] [c10d] failed", "1: frame #3: <unknown function> + 0x6940cdd", "1: "]
    noise += ["1: E1130 16:44:03.791000 16044 torch/distributed/elastic/agent/server/api.py:1008] Traceback"]
    kept = ["0: ValueError: no row", "1: E1130 16:44:04.0 1 torch/distributed/elastic/api.py] failed (exitcode: -9)"]
    (tmp_path / "slurm").mkdir()
    (tmp_path / "slurm" / "job-1.log").write_text("\n".join([kept[0], *noise, kept[1], *noise]))
    assert status.last_lines(tmp_path, 3).splitlines()[1:] == kept
