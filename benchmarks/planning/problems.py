"""Problems of the split files, and their search in one call."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from meshwright.cost import CostModel, read_software
from meshwright.cost.memory import MemoryLimit
from meshwright.planner import Choices, Limits, Plans, Problem, list_shardings, search_plans
from meshwright.spec import Workload, load_cluster, load_shipped_graph
from meshwright.templates import decoder_graph
from meshwright.templates.shapes import ExpertLayers, TransformerShape

BENCHMARKS = Path(__file__).resolve().parents[1]


def solve(problem: Problem, method="auto", **limits) -> Plans:
    """What a method finds; ``limits`` are those of `Limits`."""
    return search_plans(problem, method, Limits(**limits))


def problem_of(spec: dict, choices: Choices | None = None) -> Problem:
    """The problem that an entry describes; ``choices`` replace those of the entry.

    ``model`` is a shipped graph; or ``shape`` are the sizes of a decoder (`templates.shapes.TransformerShape`) on
    sequences of ``sequence_length`` tokens. ``cluster``: short form, or a file of benchmarks/clusters.
    """
    software = read_software(spec.get("software"))
    graph = graph_of(spec, fused_attention=software.fused_attention)
    cluster, limit = cluster_of(spec["cluster"]), spec.get("memory_limit_gib")
    return Problem(
        graph_for=lambda _: graph,
        cluster=cluster,
        workload=Workload(global_batch=spec["batch"], precision=spec["precision"], kind=graph.mode),
        cost=CostModel(cluster=cluster, precision=spec["precision"], software=software),
        memory=MemoryLimit(num_bytes=None if limit is None else int(limit * 2**30)),
        model=spec.get("model", spec["name"]),
        choices=choices_of(spec) if choices is None else choices,
    )


def choices_of(spec: dict) -> Choices:
    """What an entry says of axes, sharing, recompute, schedules and microbatches; without a word, one value."""
    sizes = {axis: spec.get(axis, (1,)) for axis in ("tensor", "context", "expert")}
    apart = {**sizes, "tensor": [size for size in sizes["tensor"] if size > 1]}
    shardings = list_shardings(**sizes)
    if spec.get("sequence_parallel") and apart["tensor"]:
        shardings += list_shardings(**apart, sequence_parallel=True)
    return Choices(
        shardings=shardings,
        zero=tuple(spec.get("zero", (0,))),
        shard_sizes=tuple(spec.get("shard_sizes", (0,))),
        recompute=tuple(spec.get("recompute", ("none",))),
        microbatch_sizes=tuple(spec.get("microbatch_sizes", ())),
        schedules=tuple(spec.get("schedules", ("gpipe", "1f1b"))),
        num_chunks=tuple(spec.get("num_chunks", (2,))),
        num_stages=tuple(spec.get("num_stages", ())),
    )


def cluster_of(name: str):
    """A cluster by its file of benchmarks/clusters, or its short form."""
    named = BENCHMARKS / "clusters" / f"{name}.toml"
    return load_cluster(named if named.exists() else name)


def graph_of(spec: dict, *, fused_attention: bool = True):
    """The training graph of an entry."""
    if "model" in spec:
        return _shipped(spec["model"])
    sizes = dict(spec["shape"])
    experts = sizes.pop("experts", None)
    shape = TransformerShape(**sizes, experts=ExpertLayers(**experts) if experts else None)
    return decoder_graph(shape, spec["sequence_length"], fused_attention=fused_attention)


def layout_words(plan):
    """A plan in words, its stages only counted."""
    positions = len({stage.ranks for stage in plan.stages})
    replicas = sorted({len(stage.ranks) for stage in plan.stages})
    recompute = f", {len(plan.recompute)} parts recomputed" if plan.recompute else ""
    kept = f" but for {len(plan.keeps)} ops" if plan.keeps else ""
    zero = f", ZeRO {plan.exchange.zero}" if plan.exchange.zero else ""
    groups = f" in groups of {plan.exchange.shard_size}" if plan.exchange.shard_size else ""
    return (
        f"{plan.sharding.describe() or 'whole ops'}, {len(plan.stages)} stages on {positions} positions, "
        f"{'/'.join(map(str, replicas))} replicas, {plan.schedule}, {plan.num_microbatches} microbatches of "
        f"{plan.microbatch_size}{zero}{groups}{recompute}{kept}"
    )


_shipped = cache(load_shipped_graph)
