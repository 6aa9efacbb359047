"""Fixtures that several test folders use."""

import os
import sys
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")  # two cores thrash with more threads than that over several ranks
os.environ.setdefault("WANDB_MODE", "offline")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when nb_kernels is first imported, by whichever test that is

ROOT = Path(__file__).parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))  # `tests.x` and `tools.x` are importable, also in the pool's ranks

from tools.rank_pool import RankPool  # noqa: E402


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Real files beside the checkout; a fresh clone has none, and these tests skip."""
    folder = ROOT.parent / "shared" / "data"
    if not folder.is_dir():
        pytest.skip("no ../shared/data beside this checkout")
    return folder


@pytest.fixture(scope="session")
def ranks():
    """ranks.run(world, function, *args): `function` runs on `world` gloo ranks (at most 4), results by rank."""
    pool = RankPool()
    yield pool
    pool.close()
