"""Predicted against measured step time of every kind of plan on this machine: pinned ranks, one thread each, gloo.

    tensor        ops are split over all ranks (tensor parallelism), but for those outside of the blocks
    fsdp, zero1   parameters are sharded (ZeRO 3), or optimizer states
    hsdp          parameters are sharded in pairs of replicas
    data          replicas with gradients summed once per step
    others        schedules of a pipeline with a stage per rank (interleaved: two), of nearly equal numbers of layers,
                  and two microbatches for each rank

All are run by `meshwright run`'s launcher. First the links are timed; then, for each configuration, half of its steps,
the ops of its share of the model with the neighbouring core busy, and the other half, for the machine's speed drifts;
nothing is fitted to steps. A step is forward, backward and AdamW. The figure is |predicted - measured| / measured,
measured being the median over the steps after the warm-up. How far the second half is from the first, of the same
program, says what of that is the machine's.
"""

from __future__ import annotations

import sys
import tempfile
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import pairwise
from pathlib import Path

import numpy as np
from harness import make_row, prediction_row, score_row
from running.shares import share_source

from meshwright.cost import CostModel
from meshwright.cost.collectives.uneven_links import fit_links
from meshwright.measurement import measure_links, measure_machine
from meshwright.program import lower_graph
from meshwright.report import compare_timelines
from meshwright.runtime import measure_overhead
from meshwright.simulator import Simulation, simulate_plan
from meshwright.spec import (
    GradientExchange,
    Graph,
    Measurements,
    OpPlacement,
    Optimizer,
    Plan,
    Sharding,
    StagePlan,
    Timeline,
    Workload,
    load_cluster,
    load_shipped_graph,
    read_document,
    write_document,
)
from meshwright.spec.sharding import UNSHARDED
from meshwright.training import Job, measure_here, run_plan

NUM_STEPS, QUICK_STEPS, WARM_UP = 40, 12, 5
TARGET = 0.10
SCORED_RANKS = 2
PIPELINES = ("gpipe", "1f1b", "zb-h1", "interleaved")
KINDS = ("tensor", "fsdp", "data", "gpipe", "1f1b")
MORE_KINDS = ("zero1", "zb-h1", "interleaved")
ZERO = {"fsdp": 3, "zero1": 1, "hsdp": 3}


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
    # BERT's attention drops weights, which shares of heads cannot do alike (docs/concepts/split-plans.md).
    if (model, kind) != ("bert-tiny", "tensor")
]
CONFIGURATIONS += [Configuration(model="gpt-tiny", kind=kind, microbatch=8) for kind in MORE_KINDS]
CONFIGURATIONS += [Configuration(model="gpt-tiny", kind=kind, microbatch=8, num_ranks=4) for kind in (*KINDS, "hsdp")]


def make_plan(configuration: Configuration, graph: Graph) -> Plan:
    """One stage on all ranks, as one team or as replicas of whole ops; or a stage on each."""
    is_split, is_piped = configuration.kind == "tensor", configuration.kind in PIPELINES
    layers, num_ranks = len(graph.layers), configuration.num_ranks
    if is_piped:
        count = num_ranks * (2 if configuration.kind == "interleaved" else 1)
        edges = [layers * index // count for index in range(count + 1)]
        stages = tuple(
            StagePlan(start=start, stop=stop, ranks=(index % num_ranks,))
            for index, (start, stop) in enumerate(pairwise(edges))
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
        exchange=GradientExchange(
            zero=ZERO.get(configuration.kind, 0), shard_size=2 if configuration.kind == "hsdp" else 0
        ),
    )


def source_of(model: str, sharding: Sharding, batch_size: int):
    """Picklable: what every measuring process times."""
    return share_source(lower_graph(load_shipped_graph(model), sharding, ()), batch_size)


def measure(plan: Plan, num_steps: int) -> tuple[list[float], Timeline]:
    """Seconds of steps, and the timeline of the last ones."""
    with tempfile.TemporaryDirectory() as folder:
        path = write_document(plan, Path(folder) / "plan.json")
        result = run_plan(Job(plan=str(path), num_steps=num_steps), folder)
        return list(result.step_seconds), read_document(Timeline, result.timeline)


@cache
def fitted_links(num_ranks: int) -> tuple:
    return fit_links(measure_links(num_ranks=num_ranks), load_cluster(f"{num_ranks}xcpu"))


def measured_ops(model: str, microbatch: int, num_ranks: int, sharding: Sharding) -> Measurements:
    """Of whole ops the table also has transfers and what the runtime's own instructions cost."""
    if sharding.is_whole:
        return measure_here(model, [microbatch], num_ranks=num_ranks)
    return measure_machine(partial(source_of, model, sharding), [microbatch], num_ranks=num_ranks, transfer_sizes=())


def predict(configuration: Configuration, plan: Plan, graph: Graph) -> Simulation:
    """From ops and links timed with as many ranks at once."""
    num_ranks, cluster = configuration.num_ranks, load_cluster(plan.cluster)
    own, host = fitted_links(num_ranks)
    table = measured_ops(configuration.model, configuration.microbatch, num_ranks, plan.sharding)
    if not plan.sharding.is_whole:
        # Its table is of ops alone.
        table = replace(table, overhead_s=measure_overhead())
    cost = CostModel(cluster=cluster, measurements=table, collectives=own, collective_hosts=host)
    return simulate_plan(plan, graph, cluster, cost=cost, num_steps=3)


def rows(quick: bool):
    """One row per configuration, the score, and whether all issued what was predicted in that order."""
    steps = QUICK_STEPS if quick else NUM_STEPS
    found, scored, in_order, drifts = [], [], [], []
    for configuration in CONFIGURATIONS:
        graph = load_shipped_graph(configuration.model)
        plan = make_plan(configuration, graph)
        before, _ = measure(plan, steps // 2)
        predicted = predict(configuration, plan, graph)
        after, timeline = measure(plan, steps // 2)
        halves = np.array([before, after])[:, WARM_UP:]
        found.append(prediction_row(configuration.name, predicted.step_time_s, halves.ravel()))
        in_order.append(compare_timelines(predicted.timeline, timeline).same_order)
        if configuration.num_ranks == SCORED_RANKS:
            scored.append(found[-1])
            drifts.append(abs(np.median(halves[1]) / np.median(halves[0]) - 1))
        print(
            f"{configuration.name}: predicted {predicted.step_time_s:.4f} s, measured {found[-1].baseline:.4f} s, "
            f"order {'as predicted' if in_order[-1] else 'another'}",
            file=sys.stderr,
        )
    found.append(score_row(scored, TARGET))
    low, middle, high = np.quantile(drifts, [0.1, 0.5, 0.9])
    found.append(make_row("median of second half / first half - 1, same program", middle, "", spread=(high - low) / 2))
    found.append(make_row("runs that issued another order than predicted", in_order.count(False), "", target=0))
    return found


NOTES = (
    "Rows of configurations: value = predicted, baseline = measured (median), spread of the measured steps; the score "
    f"is of {SCORED_RANKS} ranks, each of which has a core of its own."
)
