"""A job that cannot succeed says why, once, where its script and its user look, and in one line."""

import errno
import json
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest

from megatron_nb.give_up import STOPPED, GivesUp, give_up, last_steps
from megatron_nb.run import Run
from megatron_nb.training.loop import count_bad

JOB = """
import sys
from dataclasses import dataclass
from megatron_nb.config import job
from megatron_nb.give_up import GivesUp

@dataclass
class Small:
    name: str = "a"

@job(Small, "small")
def main(config):
    raise {error}

main()
"""


@pytest.mark.parametrize(
    ("error", "said"),
    [
        ('ValueError("rows.jsonl, line 3: no role")', "rows.jsonl, line 3: no role"),
        ('GivesUp("two steps in a row")', "two steps in a row"),
        (f'OSError({errno.ENOSPC}, "No space left on device")', "the disk is full: .*make room"),
    ],
)
def test_what_no_further_try_could_change_is_one_line_and_the_reason_in_the_file(tmp_path, error, said):
    (tmp_path / "small.yaml").write_text("defaults: [Small, _self_]\n")
    (tmp_path / "job.py").write_text(JOB.format(error=error))
    reason = tmp_path / "stopped.txt"
    done = subprocess.run(
        [sys.executable, str(tmp_path / "job.py"), f"--config-dir={tmp_path}"], capture_output=True, text=True,
        env={"PATH": "/usr/bin:/bin", STOPPED: str(reason)},
    )  # fmt: skip
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr
    assert re.search(said, done.stderr) and re.search(said, reason.read_text())


def test_the_first_reason_is_kept_and_without_a_script_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.setenv(STOPPED, str(tmp_path / "stopped.txt"))
    give_up("the first")
    give_up("the second")
    assert (tmp_path / "stopped.txt").read_text() == "the first\n"
    monkeypatch.delenv(STOPPED)
    give_up("nobody asks")


def test_refused_steps_in_a_row_end_the_job_and_one_good_step_forgives():
    bad, good = SimpleNamespace(skipped=["a:3"]), SimpleNamespace(skipped=None)
    assert count_bad(0, 1, bad, 3) == 1 and count_bad(2, 2, good, 3) == 0
    with pytest.raises(GivesUp, match="3 steps in a row .* the last is 7, with samples a:3"):
        count_bad(2, 7, bad, 3)


def test_a_job_that_gives_up_shows_the_steps_that_led_to_it(tmp_path):
    with pytest.raises(GivesUp) as error, Run.open(tmp_path, "seed: 1\n") as run:
        rows = [{"step": step, "loss": step / 2, "lr": None} for step in range(1, 13)]
        run.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"st')
        raise GivesUp("no more")
    (note,) = error.value.__notes__
    assert note.splitlines()[0] == "step 4  loss 2" and note.splitlines()[-1] == "step 12  loss 6"
    assert last_steps(tmp_path / "none") == ""
