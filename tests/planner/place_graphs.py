"""Small graphs with branches, made by hand, and what the oracles of placements count by themselves."""

from __future__ import annotations

from itertools import pairwise

from meshwright.spec import Extent, Graph, Layer, Op, Tensor

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
