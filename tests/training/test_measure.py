"""What `meshwright measure` times, from a model reference on."""

import pytest

from meshwright.measurement import build_segments
from meshwright.training.step_measuring import op_source


@pytest.mark.parametrize("reference", ["gpt-tiny", "resnet-tiny", "unet-tiny"])
@pytest.mark.matrix
def test_every_op_of_the_graph_is_timed_under_its_own_name(reference):
    source = op_source(reference, (), 2)
    (segment,) = build_segments(source, 2, max_bytes=2**33)
    nodes = {node.name for node in segment.module.graph.nodes}
    assert {op.name for op in source.graph.ops} == segment.keys.keys()
    assert segment.keys.keys() <= nodes
    assert [tuple(value.shape) for value in segment.feeds] == [
        tuple(extent.at(2) for extent in source.graph.tensors[i].shape) for i in source.graph.inputs
    ]
