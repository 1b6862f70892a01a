"""Slabs: what one process writes into a slot is what another reads there."""

import numpy as np
import pytest

from meshwright.serving.datatypes import NUMPY_TYPES
from meshwright.serving.server.slabs import Slab, slot_layout
from meshwright.spec import DATATYPES, ServingError, TensorSpec


def test_every_datatype_has_its_size():
    assert NUMPY_TYPES.keys() == DATATYPES.keys()
    assert all(np.dtype(kind).itemsize == DATATYPES[name] for name, kind in NUMPY_TYPES.items())


def test_two_views_of_a_slab_are_one(tmp_path):
    inputs = [TensorSpec(name="x", shape=(3, 2)), TensorSpec(name="k", datatype="INT8", shape=(5,))]
    outputs = [TensorSpec(name="y", datatype="FP64")]
    ours = Slab(tmp_path / "slab", inputs, outputs, 7)
    theirs = Slab(tmp_path / "slab", inputs, outputs, 0)
    assert len(ours) == len(theirs) == 7
    random = np.random.default_rng(0)
    x, k = random.random((7, 3, 2), np.float32), random.integers(-128, 127, (7, 5), np.int8)
    ours.inputs[0][:], ours.inputs[1][:] = x, k
    slots = np.array([5, 0, 3])
    assert np.array_equal(theirs.inputs[0][slots], x[slots])
    assert np.array_equal(theirs.inputs[1][slots], k[slots])
    theirs.outputs[0][slots] = [1.5, 2.5, 3.5]
    assert ours.outputs[0].tolist() == [2.5, 0, 0, 3.5, 0, 1.5, 0]
    # Neighbours were left alone.
    assert np.array_equal(ours.inputs[0], x)
    assert np.array_equal(ours.inputs[1], k)


def test_tensors_begin_at_multiples_of_64_bytes():
    odd = [TensorSpec(name=str(size), datatype="UINT8", shape=(size,)) for size in (1, 63, 64, 65)]
    layout = slot_layout(odd, odd)
    assert [layout.fields[name][1] % 64 for name in layout.names] == [0] * 8
    assert layout.itemsize == 2 * (64 + 64 + 64 + 128)
    assert slot_layout([], []).itemsize == 64


def test_a_slab_is_made_once_and_opened_only_if_it_is_there(tmp_path):
    spec = [TensorSpec(name="x")]
    with pytest.raises(ServingError, match=r"The shared memory .*slab cannot be used"):
        Slab(tmp_path / "slab", spec, spec, 0)
    slab = Slab(tmp_path / "slab", spec, spec, 2)
    with pytest.raises(ServingError, match=r"The shared memory .*slab cannot be used"):
        Slab(tmp_path / "slab", spec, spec, 2)
    slab.remove()
    slab.inputs[0][1] = 4
    assert slab.inputs[0].tolist() == [0, 4]
