"""tools/setup_venv.sh: what a newcomer's first command refuses."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_a_disk_without_room_is_named_before_anything_is_installed(tmp_path):
    (tmp_path / "tools").mkdir()
    for name in ("tools/setup_venv.sh", "setup.py", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path / name)
    disk = tmp_path / "bin" / "df"
    disk.parent.mkdir()
    disk.write_text('#!/bin/sh\necho "Filesystem 1024-blocks Used Available Capacity Mounted on"\necho "x 9 6 5242880 1% /"\n')
    disk.chmod(0o755)
    environment = {**os.environ, "PATH": f"{disk.parent}:{os.environ['PATH']}", "PYTHON": sys.executable}
    done = subprocess.run(["bash", tmp_path / "tools/setup_venv.sh"], env=environment, capture_output=True, text=True)
    assert done.returncode == 1
    assert "needs 10 GB and 5 GB are free on its disk" in done.stderr
    assert not (tmp_path / ".venv").exists()
