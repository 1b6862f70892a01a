"""Keys and values travel round the ranks as in torch's ring attention: how often, and how many bytes at a time."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor.experimental._context_parallel import _attention as torch_ring
from torch.testing._internal.distributed.fake_pg import FakeStore

from meshwright.program import shard_graph
from meshwright.spec import Sharding, load_shipped_graph
from tests.program.recording import Recorder

SIZE, BATCH = 4, 2


@pytest.fixture
def group(monkeypatch):
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=SIZE)
    monkeypatch.setattr(torch_ring._cp_options, "rotate_method", torch_ring._RotateMethod.ALL_TO_ALL)
    yield dist.group.WORLD
    dist.destroy_process_group()


def ring(group, shape: tuple[int, ...]) -> list:
    """What torch issues for the attention of one layer; its kernels are replaced, for they run on GPUs."""

    def attend(query, key, value, **_):
        return query, query[..., 0]

    def attend_back(*, query, key, value, **_):
        return query, key, value

    values = [torch.rand(shape) for _ in range(3)]
    with Recorder() as recorder:
        out, statistic = torch_ring._templated_ring_attention(group, 2, attend, *values, is_causal=True)
        with recorder.backward():
            torch_ring._templated_ring_attention_backward(
                group, 2, attend_back, out, "grad_out", *values, out, statistic, is_causal=True
            )
    return recorder.found


@pytest.mark.filterwarnings("ignore")
def test_keys_and_values_go_round_as_in_torch(group):
    sharded = shard_graph(load_shipped_graph("gpt-tiny"), Sharding(context=SIZE))
    graph = sharded.graph
    attention = next(op for op in graph.ops if op.kind.startswith("aten.scaled_dot_product"))
    shape = tuple(extent.at(BATCH) for extent in graph.tensors[attention.inputs[0]].shape)
    found = ring(group, shape)
    for phase in ("forward", "backward"):
        keys, values = [c for c in sharded.collectives if c.phase == phase and c.axis == "context"][:2]
        # torch sends keys and values in one buffer, and calls that an all-to-all, of which each rank has a part.
        together = keys.num_bytes(graph, BATCH) + values.num_bytes(graph, BATCH)
        theirs = [c.num_bytes // SIZE for c in found if c.phase == phase]
        assert theirs == [together] * keys.count
        assert values.count == keys.count
