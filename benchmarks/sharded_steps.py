"""Predicted against measured step time of every kind of plan on this machine: pinned ranks, one thread each, gloo.

    tensor    ops are split over all ranks (tensor parallelism), but for those outside of the blocks. Measured:
              the local graph of `program.sharding`, run op by op by torch, with its exchanges
    fsdp      parameters are shared out (ZeRO-3). Measured: torch's fully_shard on every block and on the model
    data      replicas with gradients summed once per step. Measured, like the two below, by `meshwright run`'s launcher
    gpipe     a stage per rank, of nearly equal numbers of layers, two microbatches for each
    1f1b      the same

First the links are timed, then the ops of every share of a model with the neighbouring core busy; nothing is fitted to
steps. A step is forward, backward and AdamW. The figure is |predicted - measured| / measured, measured being the median
over the steps after the warm-up. The configurations were written down before the first run of this file.
"""

from __future__ import annotations

import sys
import tempfile
import time
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from harness import parse_options, prediction_row, publish, score_row
from torch.distributed.fsdp import fully_shard

from meshwright.capture import rebuild
from meshwright.cost import CostModel
from meshwright.cost.collectives.fitting import fit_measured
from meshwright.measurement import measure_links, measure_machine
from meshwright.measurement.processes import run_ranks
from meshwright.program import lower_graph
from meshwright.program.sharding import MESH
from meshwright.simulator import simulate_plan
from meshwright.spec import (
    GradientExchange,
    Graph,
    Measurements,
    Optimizer,
    Plan,
    StagePlan,
    Workload,
    load_cluster,
    load_shipped_graph,
    slice_graph,
    write_document,
)
from meshwright.spec.sharding import UNSHARDED, OpPlacement, Sharding
from meshwright.training import Job, measure_here, run_plan
from meshwright.training.shares import share_source
from meshwright.zoo import load_model

NUM_STEPS, QUICK_STEPS, WARM_UP = 40, 12, 5
TARGET = 0.10
SCORED_RANKS = 2
PIPELINES = ("gpipe", "1f1b")
KINDS = ("tensor", "fsdp", "data", *PIPELINES)


@dataclass(frozen=True, kw_only=True)
class Configuration:
    model: str
    kind: str
    microbatch: int
    num_microbatches: int = 2
    num_ranks: int = 2

    @property
    def name(self) -> str:
        return f"{self.model}, {self.kind}, {self.num_ranks} ranks, {self.num_microbatches} x {self.microbatch}"

    @property
    def sharding(self) -> Sharding:
        if self.kind != "tensor":
            return UNSHARDED
        ops = load_shipped_graph(self.model).ops
        outside = dict.fromkeys(op.module for op in ops if op.module and not op.module.startswith("blocks"))
        return Sharding(tensor=self.num_ranks, placements=tuple(OpPlacement(op=name) for name in outside))


CONFIGURATIONS = [
    Configuration(model=model, kind=kind, microbatch=size)
    for model, size in (("gpt-tiny", 8), ("llama-tiny", 8), ("bert-tiny", 8))
    for kind in KINDS
]
CONFIGURATIONS += [Configuration(model="gpt-tiny", kind=kind, microbatch=8, num_ranks=4) for kind in KINDS]


def make_plan(configuration: Configuration, graph: Graph) -> Plan:
    """One stage on all ranks, as one team or as replicas of whole ops; or a stage on each."""
    is_split, is_piped = configuration.kind == "tensor", configuration.kind in PIPELINES
    layers, num_ranks = len(graph.layers), configuration.num_ranks
    if is_piped:
        edges = [layers * index // num_ranks for index in range(num_ranks + 1)]
        stages = tuple(
            StagePlan(start=start, stop=stop, ranks=(rank,)) for rank, (start, stop) in enumerate(pairwise(edges))
        )
    else:
        stages = (StagePlan(start=0, stop=layers, ranks=(0,) if is_split else tuple(range(num_ranks))),)
    count = configuration.num_microbatches * (1 if is_split else num_ranks)
    return Plan(
        model=configuration.model,
        graph_hash=graph.content_hash,
        cluster=f"{num_ranks}xcpu",
        workload=Workload(global_batch=configuration.microbatch * count, optimizer=Optimizer(kind="adamw")),
        stages=stages,
        num_microbatches=count,
        schedule=configuration.kind if is_piped else "1f1b",
        sharding=configuration.sharding,
        exchange=GradientExchange(zero=3 if configuration.kind == "fsdp" else 0),
    )


def source_of(model: str, sharding: Sharding, batch_size: int):
    """Picklable: what every measuring process times."""
    return share_source(lower_graph(load_shipped_graph(model), sharding, ()), batch_size)


class _AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(_, value):
        value = value.clone()
        dist.all_reduce(value)
        return value

    @staticmethod
    def backward(_, gradient):
        return gradient


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(_, value):
        return value.view_as(value)

    @staticmethod
    def backward(_, gradient):
        gradient = gradient.clone()
        dist.all_reduce(gradient)
        return gradient


def _shard(value: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    for dim, size in enumerate(shape):
        if value.shape[dim] > size:
            value = value.narrow(dim, dist.get_rank() * size, size)
    return value


EXCHANGES = {
    f"{MESH}all_reduce.default": lambda value, _: _AllReduce.apply(value),
    f"{MESH}copy.default": lambda value, _: _Copy.apply(value),
    f"{MESH}shard.default": _shard,
}


def run_tensor(_, configuration: Configuration, num_steps: int) -> list[float]:
    """Steps of the local graph on this rank."""
    size = configuration.microbatch
    local = lower_graph(load_shipped_graph(configuration.model), configuration.sharding, ())
    (stage,) = slice_graph(local, [(0, len(local.layers))])
    module = rebuild(local, stage.inputs, stage.outputs, stage.ops, batch_size=size, converters=EXCHANGES)
    torch.manual_seed(0)
    module.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(std=0.02)
    batch = share_source(local, size).batch
    feeds = [dict(zip(local.inputs, batch(size), strict=True))[i] for i in stage.inputs]
    return _time_steps(lambda: module(*feeds)[0], module.parameters(), configuration, num_steps)


def run_fsdp(_, configuration: Configuration, num_steps: int) -> list[float]:
    """Steps of the model itself under fully_shard."""
    source = load_model(configuration.model, batch_size=configuration.microbatch)
    model = source.model
    torch.manual_seed(0)
    model.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.02)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    return _time_steps(
        lambda: source.loss(model(*source.inputs), *source.targets), model.parameters(), configuration, num_steps
    )


def _time_steps(forward, parameters, configuration: Configuration, num_steps: int) -> list[float]:
    held = list(parameters)
    optimizer = torch.optim.AdamW(held, lr=1e-5, foreach=False)
    seconds = []
    for _ in range(num_steps):
        dist.barrier()
        start = time.perf_counter()
        for _ in range(configuration.num_microbatches):
            forward().backward()
        optimizer.step()
        optimizer.zero_grad()
        dist.barrier()
        seconds.append(time.perf_counter() - start)
    return seconds


def measure(configuration: Configuration, plan: Plan, num_steps: int) -> list[float]:
    if configuration.kind in ("data", *PIPELINES):
        with tempfile.TemporaryDirectory() as folder:
            path = write_document(plan, Path(folder) / "plan.json")
            return list(run_plan(Job(plan=str(path), num_steps=num_steps), folder).step_seconds)
    run = run_tensor if configuration.kind == "tensor" else run_fsdp
    found = run_ranks(run, configuration, num_steps, num_ranks=configuration.num_ranks, timeout_s=600)
    return max(found, key=np.median)


@cache
def fitted_links(num_ranks: int) -> tuple:
    return fit_measured(measure_links(num_ranks=num_ranks))


@cache
def measured_ops(model: str, microbatch: int, num_ranks: int, sharding: Sharding) -> Measurements:
    """Of whole ops the table also has transfers and what the runtime's own instructions cost."""
    if sharding.is_whole:
        return measure_here(model, [microbatch], num_ranks=num_ranks)
    return measure_machine(partial(source_of, model, sharding), [microbatch], num_ranks=num_ranks, transfer_sizes=())


def predict(configuration: Configuration, plan: Plan, graph: Graph) -> float:
    """Seconds of a step, from ops and links timed with as many ranks at once."""
    num_ranks, cluster = configuration.num_ranks, load_cluster(plan.cluster)
    own, host = fitted_links(num_ranks)
    table = measured_ops(configuration.model, configuration.microbatch, num_ranks, plan.sharding)
    if configuration.kind == "fsdp":
        table = replace(table, overhead_s=0.0)
    cost = CostModel(cluster=cluster, measurements=table, collectives=own, collective_hosts=host)
    return simulate_plan(plan, graph, cluster, cost=cost, num_steps=3).step_time_s


def main() -> int:
    options = parse_options(__doc__)
    steps = QUICK_STEPS if options.quick else NUM_STEPS
    rows, scored = [], []
    for configuration in CONFIGURATIONS:
        graph = load_shipped_graph(configuration.model)
        plan = make_plan(configuration, graph)
        predicted = predict(configuration, plan, graph)
        seconds = np.array(measure(configuration, plan, steps)[WARM_UP:])
        rows.append(prediction_row(configuration.name, predicted, seconds))
        if configuration.num_ranks == SCORED_RANKS:
            scored.append(rows[-1])
        print(f"{configuration.name}: predicted {predicted:.4f} s, measured {rows[-1].baseline:.4f} s", file=sys.stderr)
    rows.append(score_row(scored, TARGET))
    notes = (
        "value = predicted, baseline = measured (median), spread of the measured steps; the last row scores the errors "
        f"of {SCORED_RANKS} ranks, each of which has a core of its own."
    )
    return publish("sharded_steps", rows, options, notes)


if __name__ == "__main__":
    sys.exit(main())
