"""A checkpoint of any plan goes on under any other; boxes of tensors; files that torch reads; folders that are full."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from meshwright.training.sharded_state import Box, cut_range, spread
from tests.rank_results import read_results
from tests.training.reshard_worker import CASES, PAIRS


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return read_results("tests.training.reshard_worker", 2, tmp_path_factory.mktemp("resharded"))


@pytest.mark.long
@pytest.mark.distributed
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("first", "then"), PAIRS)
def test_another_plan_goes_on_as_the_first(results, first, then):
    found = results[f"{first} to {then}"]
    assert (found["done"], found["steps"]) == (4, 2)
    assert found["losses"] < 1e-9
    assert found["weights"] < 1e-9


@pytest.mark.long
@pytest.mark.distributed
def test_what_does_not_fit_is_refused(results):
    said = results["said"]
    assert "model.down.weight has the shape [6, 8] in the checkpoint and [5, 8] in the model" in said["model"]
    assert "the checkpoint has seed 0, but the run has 5" in said["seed"]
    assert "the checkpoint has optimizer AdamW, but the run has SGD" in said["optimizer"]


@pytest.mark.long
@pytest.mark.distributed
@pytest.mark.parametrize("case", CASES)
def test_processes_share_the_writing(results, case):
    assert results["files"][case]["names"] == ["process-0.safetensors", "process-1.safetensors"]
    # Each tensor is written once: 122 parameters with two states, and 9 statistics, of 8 bytes.
    assert results["files"][case]["bytes"] < 3 * 122 * 8 + 9 * 8 + 12_000


@pytest.mark.long
@pytest.mark.distributed
def test_another_precision_goes_on_with_the_cast(results):
    """As torch's own reader of checkpoints finds them."""
    assert len(results["precisions"]) == 12
    assert {name: wrong for name, wrong in results["precisions"].items() if wrong} == {}


@pytest.mark.long
@pytest.mark.distributed
def test_a_full_folder_is_an_error_on_all_ranks_and_the_checkpoint_before_is_used(results):
    found = results["full"]
    for said in found["said"]:
        assert "cannot write a checkpoint to this folder (" in said
        assert "checkpoints before it are complete. Choose a folder" in said
    assert found["left"] == ["step-00000001"]
    assert found["done"] == 1


shapes = st.lists(st.integers(1, 5), min_size=1, max_size=4)


@given(shapes, st.data())
def test_boxes_of_a_range_are_its_elements_in_order(shape, data):
    count = math.prod(shape)
    start = data.draw(st.integers(0, count))
    stop = data.draw(st.integers(start, count))
    whole = torch.arange(count).reshape(shape)
    boxes = list(cut_range(shape, start, stop))
    found = [whole[tuple(slice(o, o + s) for o, s in zip(box.offsets, box.sizes, strict=True))] for box in boxes]
    assert torch.cat([torch.zeros(0, dtype=torch.int64), *(item.flatten() for item in found)]).tolist() == list(
        range(start, stop)
    )
    assert len(boxes) <= 2 * len(shape) - 1


@given(shapes, st.data())
def test_spread_boxes_are_the_elements_of_the_local_tensor(shape, data):
    indices = []
    for extent in shape:
        chosen = data.draw(st.lists(st.integers(0, 11), min_size=extent, max_size=extent, unique=True))
        indices.append(torch.tensor(sorted(chosen)))
    whole = torch.arange(12 ** len(shape)).reshape([12] * len(shape))
    local = whole[tuple(torch.meshgrid(*indices, indexing="ij"))]
    made = torch.full_like(local, -1)
    for far, near in spread(Box((0,) * len(shape), tuple(shape)), indices):
        places = [tuple(slice(o, o + s) for o, s in zip(box.offsets, box.sizes, strict=True)) for box in (far, near)]
        made[places[1]] = whole[places[0]]
    assert torch.equal(made, local)
