"""Small graphs with branches, made by hand, and what the oracles of placements count by themselves."""

from __future__ import annotations

import random as dice
from dataclasses import replace
from itertools import pairwise

from meshwright.spec import Extent, Graph, Layer, Op, PlacedStage, Placement, Tensor, Workload

B = Extent(0, 1)


def graph_of(
    wiring: dict[str, tuple[str, ...]],
    *,
    kinds: dict[str, str] | None = None,
    storages: dict[str, str] | None = None,
    parameters: dict[str, str] | None = None,
    random: tuple[str, ...] = (),
    width: int = 4,
    mode: str = "inference",
) -> Graph:
    """One op per entry, named like the tensor that it makes; ``x`` is the graph's input.

    ``wiring[op]`` are the tensors that it reads, ``storages[op]`` the op whose memory it writes in place,
    ``parameters[op]`` the name of a weight of ``width`` x ``width`` that it reads besides. The last op is the output.
    """
    kinds, storages, parameters = kinds or {}, storages or {}, parameters or {}
    ids = {"x": 0}
    trained = mode == "training"
    tensors = [Tensor(name="x", shape=(B, Extent(width)), dtype="float32", role="input", storage=0)]
    for name in dict.fromkeys(parameters.values()):
        ids[name] = len(tensors)
        shape = (Extent(width), Extent(width))
        role = "parameter"
        tensors.append(
            Tensor(name=name, shape=shape, dtype="float32", role=role, storage=len(tensors), requires_grad=trained)
        )
    ops = []
    for index, (name, reads) in enumerate(wiring.items()):
        ids[name] = len(tensors)
        is_loss = trained and index == len(wiring) - 1
        tensors.append(
            Tensor(
                name=name,
                shape=() if is_loss else (B, Extent(width)),
                dtype="float32",
                role="activation",
                storage=ids[storages[name]] if name in storages else ids[name],
                requires_grad=trained,
            )
        )
        held = (ids[parameters[name]],) if name in parameters else ()
        ops.append(
            Op(
                name=name,
                kind=kinds.get(name, "aten.linear.default"),
                inputs=(*(ids[item] for item in reads), *held),
                outputs=(ids[name],),
                flops=Extent(0, 2 * width * width),
                backward_flops=Extent(0, 4 * width * width) if trained else Extent(),
                saved=tuple(ids[item] for item in reads) if trained else (),
                random=name in random,
                module=name,
            )
        )
    return Graph(
        name="wired",
        tensors=tuple(tensors),
        ops=tuple(ops),
        layers=(Layer(name="all", start=0, stop=len(ops)),),
        inputs=(0,),
        outputs=(ids[list(wiring)[-1]],),
        mode=mode,
        has_loss=trained,
    )


def random_graph(rng: dice.Random, num_ops: int, mode: str) -> Graph:
    """Ops that read from a few before them; some share weights, draw numbers, or may be computed anywhere."""
    names = [f"op{i}" for i in range(num_ops)]
    free = {name for name in names[:-1] if rng.random() < 0.25}
    reads = lambda i: tuple(sorted({rng.choice(names[max(0, i - 6) : i]) for _ in range(rng.randint(1, 3))}))
    graph = graph_of(
        {name: reads(i) if i and rng.random() < 0.9 else ("x",) for i, name in enumerate(names)},
        parameters={name: f"w{rng.randrange(3)}" for name in names if rng.random() < 0.3},
        random=tuple(name for name in names if name not in free and rng.random() < 0.15),
        mode=mode,
    )
    follows = lambda tensor: tensor.role != "activation" or tensor.name == names[-1] or rng.random() < 0.85
    return replace(
        graph,
        ops=tuple(replace(op, replicable=op.name in free) for op in graph.ops),
        tensors=tuple(replace(item, requires_grad=item.requires_grad and follows(item)) for item in graph.tensors),
    )


def random_placement(rng: dice.Random, graph: Graph, num_ranks: int, num_microbatches: int) -> Placement:
    """Stages of one op or a few, each on any rank."""
    left, stages = [index for index, op in enumerate(graph.ops) if not op.replicable], []
    while left:
        count = rng.choice([1, 1, 1, 2, 3])
        stages.append((rng.randrange(num_ranks), *left[:count]))
        left = left[count:]
    return placement_of(graph, stages, num_microbatches)


def placement_of(graph: Graph, stages: list[tuple[int, ...]], num_microbatches: int = 1) -> Placement:
    """Of each stage the rank and the ops."""
    return Placement(
        model="by hand",
        graph_hash=graph.content_hash,
        cluster="small",
        workload=Workload(kind=graph.mode, global_batch=2 * num_microbatches),
        stages=tuple(PlacedStage(rank=rank, ops=tuple(ops)) for rank, *ops in stages),
        num_microbatches=num_microbatches,
    )


def moved(placement: Placement, stage: int, rank: int) -> Placement:
    """The same with one stage elsewhere."""
    stages = list(placement.stages)
    stages[stage] = replace(stages[stage], rank=rank)
    return replace(placement, stages=tuple(stages))


def fork(depth: int, num_branches: int = 2, **options) -> Graph:
    """A stem, branches of so many ops, and a join."""
    wiring = {"stem": ("x",)}
    for branch in "abcdefgh"[:num_branches]:
        last = "stem"
        for step in range(depth):
            wiring[f"{branch}{step}"] = (last,)
            last = f"{branch}{step}"
    wiring["join"] = tuple(f"{branch}{depth - 1}" for branch in "abcdefgh"[:num_branches])
    return graph_of(wiring, **options)


def crossings(graph: Graph, rank_of: dict[int, int]) -> set[tuple[int, int]]:
    """(tensor, rank) of everything that a rank reads and another one makes, with what replicable ops need left out."""
    maker = {tensor: op for op in rank_of for tensor in graph.ops[op].outputs}
    return {
        (tensor, rank)
        for op, rank in rank_of.items()
        for tensor in graph.ops[op].inputs
        if tensor in maker and rank_of[maker[tensor]] != rank
    }


def generator_hops(graph: Graph, rank_of: dict[int, int]) -> int:
    """How often the next random op is on another rank."""
    ranks = [rank_of[op] for op in sorted(rank_of) if graph.ops[op].random]
    return sum(a != b for a, b in pairwise(ranks))
