"""Training under any plan gives the numbers of one process (design: Trust), in float64 to 1e-9 per tensor.

Every layout is tried with two models, one optimizer each, and the other models in few; the whole matrix is slow.
"""

from __future__ import annotations

import json

import pytest

from tests.processes import run_ranks
from tests.runtime.cases import CASES, all_cases, main_cases
from tests.runtime.models import MODELS

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("equality")

    def run(which, world_size, dtype):
        path = folder / f"{which}-{world_size}-{dtype}.json"
        if not path.exists():
            run_ranks("tests.runtime.equality_worker", world_size, which, dtype, str(path), timeout_s=800)
        return json.loads(path.read_text())

    return run


def cases(worlds, optimizers=("sgd", "adamw")):
    """Which run a case is of, the world size, and its name."""
    found = []
    for world in worlds:
        for model in MODELS:
            main = [case.key for case in main_cases(model, world)]
            for case in all_cases(model, world):
                if case.optimizer in optimizers:
                    which, marks = ("main", []) if case.key in main else ("all", [pytest.mark.slow])
                    name = f"{model}/{case.key}"
                    found.append(pytest.param(which, world, name, id=f"{world}-{name}", marks=marks))
    return found


@pytest.mark.parametrize(("which", "world_size", "case"), cases(CASES))
def test_state_and_losses_equal_a_serial_loop(results, which, world_size, case):
    result = results(which, world_size, "float64")[case]
    assert result["moved"] > 1e-4, "training must change the model, or equality says nothing"
    assert max(result["tensors"].values()) <= 1e-9, result["tensors"]
    found, wanted = result["losses"]
    assert found == pytest.approx(wanted, rel=1e-9)


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
