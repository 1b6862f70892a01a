"""Hugging Face mixtures whose experts are laid out train as in one process, in float64 to 1e-9 per tensor.

Experts over 2 and 4 ranks, with replicas, a pipeline, tensor parallelism and shared states; nothing is dropped, and
routers' losses are those of all tokens of a microbatch. What is exchanged is what is predicted, in order, group and
bytes: of an all-to-all the bytes of all ranks together, which no router changes.
"""

import pytest

pytest.importorskip("transformers")
from tests.runtime.matrix import assert_equal, matrix_runs
from tests.runtime.mixture_worker import CASES, MAIN, MODELS

pytestmark = [pytest.mark.long, pytest.mark.distributed, pytest.mark.timeout(600)]
# One stage of one replica: nothing else is exchanged.
ALONE = ("1/1f1b/expert4", "1/1f1b/expert-tensor")


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return matrix_runs("tests.runtime.mixture_worker", tmp_path_factory.mktemp("mixtures"), timeout_s=500)


@pytest.mark.parametrize("case", [f"{model}/{case.key}" for model in MODELS for case in MAIN[model]])
def test_state_and_losses_are_those_of_one_process(results, case):
    result = results("main", 4)[case]
    assert_equal(result)
    if any(f"/{name}/" in case for name in ALONE):
        assert result["exchanged"] == result["expected"]
        assert sum(kind == "all_to_all" for kind, *_ in result["exchanged"]) >= 2 * 5


@pytest.mark.slow
@pytest.mark.parametrize("case", [f"{model}/{case.key}" for model in MODELS for case in CASES])
def test_every_layout_of_every_mixture(results, case):
    assert_equal(results("all", 4)[case])
