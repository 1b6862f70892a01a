"""Schedules that never flush train as delayed gradients do in one process, in float64 to 1e-9 per tensor.

CI tries every layout with one of two models and one optimizer, and the other models in few layouts; the whole matrix
is slow.
"""

import pytest

from tests.runtime.endless_cases import CASES, MODELS, all_cases, main_cases
from tests.runtime.matrix import assert_equal, matrix_cases, matrix_runs

pytestmark = [pytest.mark.long, pytest.mark.distributed, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return matrix_runs("tests.runtime.endless_worker", tmp_path_factory.mktemp("endless"), timeout_s=500)


@pytest.mark.parametrize(("which", "world_size", "case"), matrix_cases(CASES, MODELS, main_cases, all_cases))
def test_state_and_losses_are_those_of_delayed_gradients(results, which, world_size, case):
    result = results(which, world_size)[case]
    # A prediction extrapolates weights by the last change, and multiplies what rounding left in it.
    assert_equal(result, 1e-8 if "predict" in case else 1e-9)
    # Copies of weights: as many sets as the program has versions at once, never one per minibatch.
    assert result["sets"] == result["versions"]
