"""A placement on two processes gives the numbers of one: training to 1e-9 in float64, inference bit for bit."""

import json

import pytest

from tests.processes import run_ranks
from tests.runtime.placed_models import PLACED_MODELS

pytestmark = [pytest.mark.long, pytest.mark.distributed, pytest.mark.timeout(400)]
HOW = ("searched", "thrown-1", "thrown-2", "apart")
# Whose parameters are read by ops on both devices.
SHARING = ("twins", "gpt-tied")
# What `place` puts on both devices of its own accord, for its branches are worth it.
BRANCHED = ("branched", "cond", "u-net")


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    path = tmp_path_factory.mktemp("placed") / "results.json"
    run_ranks("tests.runtime.placed_worker", 2, str(path), timeout_s=300)
    return json.loads(path.read_text())


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("model", PLACED_MODELS)
def test_training_equals_a_serial_loop(results, model, how):
    result = results[f"{model}/{how}/training"]
    assert result["moved"] > 1e-4, "training must change the model, or equality says nothing"
    assert max(result["tensors"].values()) <= 1e-9, result["tensors"]
    found, wanted = result["losses"]
    assert found == pytest.approx(wanted, rel=1e-9)


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("model", PLACED_MODELS)
def test_inference_equals_the_model_bit_for_bit(results, model, how):
    result = results[f"{model}/{how}/inference"]
    assert result["outputs"] > 0
    assert result["same"]


@pytest.mark.parametrize("mode", ["training", "inference"])
@pytest.mark.parametrize("model", PLACED_MODELS)
def test_both_devices_compute(results, model, mode):
    for how in ("searched", *HOW[1:]) if model in BRANCHED else HOW[1:]:
        result = results[f"{model}/{how}/{mode}"]
        assert result["ranks"] == 2
        assert result["sends"] > 0


@pytest.mark.parametrize("model", PLACED_MODELS)
def test_gradients_are_summed_where_both_devices_compute_with_a_parameter(results, model):
    assert (results[f"{model}/apart/training"]["sums"] > 0) == (model in SHARING)
    assert not any(results[f"{model}/{how}/{mode}"]["sums"] for how in HOW[:3] for mode in ("training", "inference"))
