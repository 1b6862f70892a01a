"""Hugging Face models in a pipeline of two stages train as in one process (design: Trust), in float64 to 1e-9."""

import json

import pytest

from tests.processes import run_ranks

pytest.importorskip("transformers")
from tests.runtime.huggingface_worker import MODELS, PIPELINES

pytestmark = [pytest.mark.long, pytest.mark.distributed, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    path = tmp_path_factory.mktemp("huggingface") / "results.json"
    run_ranks("tests.runtime.huggingface_worker", 2, "float64", str(path), timeout_s=250)
    return json.loads(path.read_text())


@pytest.mark.parametrize("case", [f"{model}/{case.key}" for model in MODELS for case in PIPELINES])
def test_state_and_losses_equal_a_serial_loop(results, case):
    result = results[case]
    assert result["moved"] > 1e-4, "training must change the model, or equality says nothing"
    assert max(result["tensors"].values()) <= 1e-9, result["tensors"]
    found, wanted = result["losses"]
    assert found == pytest.approx(wanted, rel=1e-9)
