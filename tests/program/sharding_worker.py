"""One rank of a sharded GPT and Llama: what torch issues in a step, written down beside what we expect.

``python -m tests.program.sharding_worker WORLD_SIZE PATH`` runs ranks on gloo, or rank 0 of 256 on torch's fake group.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import loss_parallel
from torch.testing._internal.distributed.fake_pg import FakeStore

from meshwright.capture import capture_model
from meshwright.program.sharding import shard_graph
from meshwright.spec.sharding import Sharding
from tests.processes import fork_ranks
from tests.program.parallel_models import BATCH, make_batch, parallelize, small_shape
from tests.program.recording import Recorder

MODELS = ("gpt", "llama")
FAKE_RANKS, FAKE_RANK, FAKE_TENSOR = 256, 37, 8


def expected(graph, sharding: Sharding) -> list[list]:
    """Phase, kind, ranks and bytes of every collective, in the order of the step."""
    sharded = shard_graph(graph, sharding)
    return [
        [c.phase, c.kind, sharding.size(c.axis), c.num_bytes(sharded.graph, BATCH)]
        for c in sharded.collectives
        for _ in range(c.count)
    ]


def record(name: str, mesh, *, sequence_parallel: bool) -> list[list]:
    """The same of what torch issues."""
    shape = small_shape(name)
    torch.manual_seed(0)
    model = parallelize(shape.build(), mesh, sequence_parallel=sequence_parallel)
    tokens, targets = make_batch(shape)
    with Recorder() as recorder:
        with loss_parallel():
            loss = shape.loss(model(tokens), targets)
            with recorder.backward():
                loss.backward()
    return [[found.phase, found.kind, found.num_ranks, found.num_bytes] for found in recorder.found]


def run_all(mesh, size: int) -> dict[str, list]:
    results = {}
    for name in MODELS:
        shape = small_shape(name)
        tokens, targets = make_batch(shape)
        graph = capture_model(shape.build(), tokens, targets=targets, loss=shape.loss).graph
        for sequence_parallel in (False, True):
            sharding = Sharding(tensor=size, sequence_parallel=sequence_parallel)
            found = record(name, mesh, sequence_parallel=sequence_parallel)
            results[f"{name}/{'sequence' if sequence_parallel else 'tensor'}"] = [expected(graph, sharding), found]
    return results


def run_gloo(world_size: int, path: str) -> None:
    dist.init_process_group("gloo")
    results = run_all(init_device_mesh("cpu", (world_size,)), world_size)
    if dist.get_rank() == world_size - 1:
        Path(path).write_text(json.dumps(results), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


def run_fake(path: str) -> None:
    os.environ.pop("RANK", None)
    dist.init_process_group("fake", store=FakeStore(), rank=FAKE_RANK, world_size=FAKE_RANKS)
    mesh = init_device_mesh("cpu", (FAKE_RANKS // FAKE_TENSOR, FAKE_TENSOR), mesh_dim_names=("data", "tensor"))
    Path(path).write_text(json.dumps(run_all(mesh["tensor"], FAKE_TENSOR)), encoding="utf-8")


if __name__ == "__main__":
    ranks, target = int(sys.argv[1]), sys.argv[2]
    if ranks == FAKE_RANKS:
        run_fake(target)
    else:
        fork_ranks(ranks, lambda: run_gloo(ranks, target))
