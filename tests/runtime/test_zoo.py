"""What is special in the zoo runs as one process would: adapters on a frozen base, experts, embeddings read twice, a
bias that all blocks share, recurrent layers, skips over stages (float64, 1e-9 per tensor)."""

import json

import pytest

from tests.processes import run_ranks
from tests.runtime.zoo_worker import CASES, SIZES

pytestmark = [pytest.mark.long, pytest.mark.distributed, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    path = tmp_path_factory.mktemp("zoo") / "results.json"
    run_ranks("tests.runtime.zoo_worker", 2, "float64", str(path), timeout_s=300)
    return json.loads(path.read_text(encoding="utf-8"))


@pytest.mark.parametrize("layout", [case.key for case in CASES])
@pytest.mark.parametrize("name", SIZES)
def test_state_and_losses_equal_a_serial_loop(results, name, layout):
    result = results[f"{name}/{layout}"]
    assert result["moved"] > 1e-4
    assert max(result["tensors"].values()) <= 1e-9, result["tensors"]
    found, wanted = result["losses"]
    assert found == pytest.approx(wanted, rel=1e-9)
