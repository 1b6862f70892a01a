"""Training under any plan gives the numbers of one process (design: Trust), in float64 to 1e-9 per tensor.

CI tries every layout with one of two models and one optimizer, and the other models in few layouts; the whole matrix
is slow.
"""

import pytest

from tests.runtime.cases import CASES, FEW, all_cases, main_cases
from tests.runtime.matrix import assert_equal, matrix_cases, matrix_runs
from tests.runtime.models import MODELS

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return matrix_runs("tests.runtime.equality_worker", tmp_path_factory.mktemp("equality"), timeout_s=800)


def cases(worlds, optimizers=("sgd", "adamw")):
    return matrix_cases(worlds, MODELS, main_cases, all_cases, optimizers, FEW)


@pytest.mark.parametrize(("which", "world_size", "case"), cases(CASES))
def test_state_and_losses_equal_a_serial_loop(results, which, world_size, case):
    assert_equal(results(which, world_size)[case])


@pytest.mark.slow
@pytest.mark.parametrize(("which", "world_size", "case"), cases([2], ["sgd"]))
def test_float32_sgd(results, which, world_size, case):
    result = results(which, world_size, "float32")[case]
    assert max(result["tensors"].values()) <= 1e-5, result["tensors"]


@pytest.mark.slow
@pytest.mark.parametrize(("which", "world_size", "case"), cases([2], ["adamw"]))
def test_float32_adamw_losses(results, which, world_size, case):
    found, wanted = results(which, world_size, "float32")[case]["losses"]
    assert found == pytest.approx(wanted, rel=1e-4)
