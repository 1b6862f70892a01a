"""Plans to export: data parallel, two stages, and two stages with replicas, of a model that all systems know.

`SPLITS` are plans that split ops, share states out or compute again.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from meshwright.spec import (
    GradientExchange,
    Graph,
    Layer,
    Optimizer,
    Plan,
    Sharding,
    StagePlan,
    Workload,
    read_recompute,
)
from tests.graphs import chain_graph

LLAMA = ("embedding", *(f"blocks.{i}" for i in range(32)), "head")
OPS_PER_LAYER = 3


@lru_cache
def graph_of(names=LLAMA) -> Graph:
    """A graph of layers with these names, each a product, scores of attention, and a product."""
    chain = chain_graph(OPS_PER_LAYER * len(names))
    kinds = ("aten.linear.default", "aten.softmax.int", "aten.matmul.default")
    ops = [replace(op, kind=kinds[index % OPS_PER_LAYER]) for index, op in enumerate(chain.ops)]
    starts = range(0, len(ops), OPS_PER_LAYER)
    layers = [Layer(name=name, start=i, stop=i + OPS_PER_LAYER) for name, i in zip(names, starts, strict=True)]
    return replace(chain, ops=tuple(ops), layers=tuple(layers))


def plan_of(bounds, ranks, *, count=8, size=2, model="llama3-8b", cluster="2x8xH100", **options) -> Plan:
    """A plan with these layer bounds and ranks per stage."""
    workload = {
        "global_batch": count * size,
        "precision": options.pop("precision", "bfloat16"),
        "optimizer": options.pop("optimizer", Optimizer()),
        "kind": options.pop("kind", "training"),
    }
    stages = tuple(
        StagePlan(start=start, stop=stop, ranks=tuple(group))
        for (start, stop), group in zip(bounds, ranks, strict=True)
    )
    return Plan(
        model=model,
        graph_hash="0" * 16,
        cluster=cluster,
        workload=Workload(**workload),
        stages=stages,
        num_microbatches=count,
        **options,
    )


PLANS = {
    "data": plan_of([(0, 34)], [range(4)], cluster="4xH100", exchange=GradientExchange(bucket_bytes=2**20)),
    "pipeline": plan_of([(0, 15), (15, 34)], [[0], [1]], cluster="2xH100", schedule="gpipe"),
    "pipeline x data": plan_of([(0, 17), (17, 34)], [range(8), range(8, 16)], count=128, size=1),
}


def split_of(
    plan: Plan,
    *,
    zero: int = 0,
    shard_size: int = 0,
    again: str = "none",
    names: tuple[str, ...] = LLAMA,
    **sharding: object,
) -> Plan:
    """The plan with its ops split, states shared out and parts computed again."""
    found = read_recompute(graph_of(names), again)
    return replace(
        plan,
        exchange=replace(plan.exchange, zero=zero, shard_size=shard_size),
        recompute=found.ranges,
        keeps=found.keeps,
        sharding=Sharding(**sharding),
    )


_DATA = plan_of([(0, 34)], [range(2)])
_WIDE = plan_of([(0, 34)], [range(8)])
_PIPELINE = plan_of([(0, 17), (17, 34)], [range(2), range(2, 4)])
SPLITS = {
    "tensor": split_of(_DATA, tensor=4),
    "tensor x pipeline": split_of(_PIPELINE, tensor=2, sequence_parallel=True, zero=1, again="full"),
    "sequence": split_of(_DATA, tensor=2, sequence_parallel=True),
    "context": split_of(_DATA, context=2),
    "both x pipeline": split_of(_PIPELINE, tensor=2, context=2),
    "zero 1": split_of(_DATA, zero=1),
    "zero 2": split_of(_DATA, zero=2),
    "zero 3": split_of(_DATA, zero=3),
    "zero 3 x both": split_of(_DATA, zero=3, tensor=2, context=2, again="full"),
    "hybrid": split_of(_WIDE, zero=3, shard_size=4),
    "full": split_of(_DATA, again="full"),
    "attention": split_of(_DATA, again="attention"),
    "op": split_of(_DATA, zero=3, again="op"),
    "first blocks": split_of(_PIPELINE, again="1:5,17:21"),
    "some blocks": split_of(_DATA, again="7:9"),
}
