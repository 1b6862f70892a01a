"""Collectives of a sharded graph are those that torch issues: op, ranks, bytes and order, forward and backward.

Tensor and sequence parallelism, FSDP2 with parameters let go or kept, and both together; on gloo, and as one of 256.
"""

import json

import pytest

from tests.processes import run_ranks
from tests.program.sharding_worker import MESHES, MODELS, cases

pytestmark = [pytest.mark.long, pytest.mark.distributed, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    found = {}
    for world_size in MESHES:
        path = tmp_path_factory.mktemp("expansion") / "results.json"
        run_ranks("tests.program.sharding_worker", world_size, str(path), timeout_s=240)
        found |= {(world_size, key): value for key, value in json.loads(path.read_text(encoding="utf-8")).items()}
    return found


@pytest.mark.parametrize(
    ("world_size", "case"), [(size, case) for size in MESHES for case, *_ in cases(size) if case != "256x1/tensor"]
)
@pytest.mark.parametrize("name", MODELS)
def test_torch_issues_what_is_expected(results, name, world_size, case):
    expected, found, *_ = results[world_size, f"{name}/{case}"]
    assert found == expected
    assert len(found) >= 6


@pytest.mark.parametrize(
    ("world_size", "case"), [(size, f"1x{size}/{kind}") for size in (2, 4) for kind in ("tensor", "sequence")]
)
@pytest.mark.parametrize("name", MODELS)
def test_autograd_keeps_what_the_local_graph_says(results, name, world_size, case):
    *_, expected, found = results[world_size, f"{name}/{case}"]
    assert found == expected > 0
