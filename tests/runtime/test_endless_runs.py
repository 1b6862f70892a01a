"""Schedules that never flush train as delayed gradients do in one process, in float64 to 1e-9 per tensor.

Two models are tried in every layout, with one optimizer each, the others in few; the whole matrix is slow.
"""

from __future__ import annotations

import json

import pytest

from tests.processes import run_ranks
from tests.runtime.endless_cases import CASES, MODELS, all_cases, main_cases

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("endless")

    def run(which, world_size):
        path = folder / f"{which}-{world_size}.json"
        if not path.exists():
            run_ranks("tests.runtime.endless_worker", world_size, which, "float64", str(path), timeout_s=500)
        return json.loads(path.read_text())

    return run


def cases():
    for world in CASES:
        for model in MODELS:
            main = [case.key for case in main_cases(model, world)]
            for case in all_cases(model, world):
                which, marks = ("main", []) if case.key in main else ("all", [pytest.mark.slow])
                name = f"{model}/{case.key}"
                yield pytest.param(which, world, name, id=f"{world}-{name}", marks=marks)


@pytest.mark.parametrize(("which", "world_size", "case"), list(cases()))
def test_state_and_losses_are_those_of_delayed_gradients(results, which, world_size, case):
    result = results(which, world_size)[case]
    assert result["moved"] > 1e-4, "training must change the model, or equality says nothing"
    assert max(result["tensors"].values()) <= 1e-9, result["tensors"]
    found, wanted = result["losses"]
    assert found == pytest.approx(wanted, rel=1e-9)
    # Copies of weights: as many sets as the program has versions at once, never one per minibatch.
    assert result["sets"] == result["versions"]
