"""One rank of a sharded GPT and Llama: what torch issues in a step, written down beside what we expect.

``python -m tests.program.sharding_worker WORLD_SIZE PATH`` runs ranks on gloo, or rank 37 of 256 on torch's fake group.
"""

from __future__ import annotations

import json
import os
import sys
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import loss_parallel
from torch.testing._internal.distributed.fake_pg import FakeStore

from meshwright.capture import capture_model
from meshwright.program import fsdp_collectives, padded_bytes, parameter_groups, shard_graph
from meshwright.spec import Sharding
from tests.processes import fork_prepared
from tests.program.parallel_models import BATCH, make_batch, parallelize, small_shape
from tests.program.recording import Recorder, SavedBytes

MODELS = ("gpt", "llama")
# Data times tensor ranks, by the number of all ranks.
MESHES = {2: ((1, 2), (2, 1)), 4: ((1, 4), (4, 1), (2, 2)), 256: ((32, 8), (256, 1))}
FAKE_RANKS, FAKE_RANK = 256, 37
KINDS = ("tensor", "sequence")


def cases(world_size: int):
    """Name, data and tensor ranks, sequence parallelism, fully sharded, let go behind the forward."""
    for data, tensor in MESHES[world_size]:
        for kind in KINDS if tensor > 1 else KINDS[:1]:
            if data == 1 or world_size == FAKE_RANKS:
                yield f"{data}x{tensor}/{kind}", data, tensor, kind == "sequence", False, False
            if data > 1:
                for reshard in (True, False):
                    name = f"{data}x{tensor}/{kind}/fsdp/{'let go' if reshard else 'kept'}"
                    yield name, data, tensor, kind == "sequence", True, reshard


def capture_graphs():
    graphs = {}
    for name in MODELS:
        shape = small_shape(name)
        tokens, targets = make_batch(shape)
        graphs[name] = capture_model(shape.build(), tokens, targets=targets, loss=shape.loss).graph
    return graphs


def expected(graph, sharding: Sharding, data: int, *, fully: bool, reshard: bool) -> list[list]:
    """Phase, kind, ranks and bytes of every collective, in the order of the step."""
    sharded = shard_graph(graph, sharding)
    events = []
    for c in sharded.collectives:
        place = c.at if c.phase == "forward" else -c.at
        row = [c.phase, c.kind, sharding.size(c.axis), c.num_bytes(sharded.graph, BATCH)]
        events += [(c.phase == "backward", place, 1, row)] * c.count
    if fully:
        groups = parameter_groups(sharded.graph)
        for c in fsdp_collectives(groups, reshard=reshard):
            group = groups[c.group]
            ids = group.parameters if c.kind == "all_gather" else group.trained
            place = c.at if c.phase == "forward" else -c.at
            row = [c.phase, c.kind, data, padded_bytes(sharded.graph, ids, data)]
            if c.kind == "reduce_scatter":
                # What each rank of the tensor axis has in part, FSDP2 completes first.
                summed = [i for i in ids if i in sharded.reduced_parameters.get("tensor", ())]
                whole = [
                    [c.phase, "all_reduce", sharding.tensor, sharded.graph.tensors[i].num_bytes(0)] for i in summed
                ]
                events += [(True, place, 2 + group.is_root, one) for one in whole]
            events.append((c.phase == "backward", place, 0 if c.kind == "all_gather" else 2 + group.is_root, row))
    events.sort(key=lambda event: event[:3])
    return [row for *_, row in events]


def record(name: str, data, tensor, *, sequence_parallel: bool, fully: bool, reshard: bool) -> tuple[list[list], int]:
    """The same of what torch issues, and the bytes that autograd keeps."""
    shape = small_shape(name)
    torch.manual_seed(0)
    model = shape.build()
    if tensor.size() > 1:
        parallelize(model, tensor, sequence_parallel=sequence_parallel)
    if fully:
        for block in model.blocks:
            fully_shard(block, mesh=data, reshard_after_forward=reshard)
        fully_shard(model, mesh=data, reshard_after_forward=False)
    tokens, targets = make_batch(shape)
    saved = SavedBytes(model)
    with Recorder() as recorder, loss_parallel() if tensor.size() > 1 else nullcontext():
        with saved.hooks():
            loss = shape.loss(model(tokens), targets)
        with recorder.backward():
            loss.backward()
    return [[found.phase, found.kind, found.num_ranks, found.num_bytes] for found in recorder.found], saved.total


def run_all(graphs, world_size: int) -> dict[str, list]:
    results = {}
    meshes = {}
    for case, data, tensor, sequence_parallel, fully, reshard in cases(world_size):
        if (data, tensor) not in meshes:
            mesh = init_device_mesh("cpu", (data, tensor), mesh_dim_names=("data", "tensor"))
            meshes[data, tensor] = mesh["data"], mesh["tensor"]
        sharding = Sharding(tensor=tensor, sequence_parallel=sequence_parallel)
        for name, graph in graphs.items():
            wanted = expected(graph, sharding, data, fully=fully, reshard=reshard)
            options = {"sequence_parallel": sequence_parallel, "fully": fully, "reshard": reshard}
            found, saved_bytes = record(name, *meshes[data, tensor], **options)
            local = shard_graph(graph, sharding).graph
            results[f"{name}/{case}"] = [wanted, found, local.saved_bytes(local.ops, BATCH), saved_bytes]
    return results


def run_gloo(graphs, world_size: int, path: str) -> None:
    dist.init_process_group("gloo")
    results = run_all(graphs, world_size)
    if dist.get_rank() == world_size - 1:
        Path(path).write_text(json.dumps(results), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


def run_fake(graphs, path: str) -> None:
    os.environ.pop("RANK", None)
    dist.init_process_group("fake", store=FakeStore(), rank=FAKE_RANK, world_size=FAKE_RANKS)
    Path(path).write_text(json.dumps(run_all(graphs, FAKE_RANKS)), encoding="utf-8")


if __name__ == "__main__":
    ranks, target = int(sys.argv[1]), sys.argv[2]
    if ranks == FAKE_RANKS:
        run_fake(capture_graphs(), target)
    else:
        fork_prepared(ranks, capture_graphs, lambda captured: run_gloo(captured, ranks, target))
