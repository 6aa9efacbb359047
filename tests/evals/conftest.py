"""What tests of several files ask for."""
import pytest

from megatron_nb.evals.bfcl_rows import package_folder


@pytest.fixture(scope="module")
def bfcl():
    """The data of package bfcl-eval; skips when it is not installed."""
    try:
        return package_folder()
    except ValueError as error:
        pytest.skip(str(error))
