"""How long given orders take and what they hold, by the definition; and all orders there are of two short stages."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from itertools import pairwise

from meshwright.spec import Opcode

KINDS = (Opcode.FORWARD, Opcode.BACKWARD_INPUT, Opcode.BACKWARD_WEIGHT)


def length_of(orders, ranks_of_stages, seconds, sending, returning, edges=None) -> int:
    """The end of the last computation.

    ``orders``: per rank (opcode, stage, microbatch, joint); ``seconds[stage][rank]`` are those of the three kinds;
    ``sending[k]`` along the k-th of the edges (from, to) and ``returning[k]`` back, between two ranks. None: a chain.
    """
    edges = list(pairwise(range(len(ranks_of_stages)))) if edges is None else edges
    blocks: dict[tuple[int, int, int], tuple[int, int]] = {}
    by_rank: list[list[list[tuple[int, int, int]]]] = []
    for rank, rows in enumerate(orders):
        own: list[list[tuple[int, int, int]]] = [[]]
        for opcode, stage, microbatch, joint in rows:
            own[-1].append((opcode, stage, microbatch))
            kind = 0 if opcode == Opcode.FORWARD else 2 if opcode == Opcode.BACKWARD_WEIGHT else 1
            blocks[kind, stage, microbatch] = rank, len(own) - 1
            if not joint:
                own.append([])
        by_rank.append(own[:-1])

    def lasts(rank, opcode, stage):
        forward, inputs, weights = seconds[stage][rank]
        return {0: forward, 1: inputs + weights, 8: inputs, 9: weights}[int(opcode)]

    @cache
    def end(rank, place):
        begin = end(rank, place - 1) if place else 0
        for opcode, stage, microbatch in by_rank[rank][place]:
            if opcode == Opcode.BACKWARD_WEIGHT:
                continue
            kind, times = (0, sending) if opcode == Opcode.FORWARD else (1, returning)
            for edge, away in zip(edges, times, strict=True):
                if edge[1 - kind] == stage:
                    other, where = blocks[kind, edge[kind], microbatch]
                    begin = max(begin, end(other, where) + (away if other != rank else 0))
        return begin + sum(lasts(rank, opcode, stage) for opcode, stage, _ in by_rank[rank][place])

    return max(end(rank, len(own) - 1) for rank, own in enumerate(by_rank))


def most_held(rows, kept) -> int:
    """The most bytes that a rank holds: those of a forward until its backward, or the part for weights."""
    held = most = 0
    for opcode, stage, *_ in rows:
        held += kept[stage] * {0: 1, 1: -1, 8: 0, 9: -1}[int(opcode)]
        most = max(most, held)
    return most


def all_orders(stage: int, count: int, most: int) -> Iterator[tuple[tuple[int, int, int, bool], ...]]:
    """Every order of one stage in which microbatches keep their turn and at most ``most`` are held.

    Microbatches are alike, so that no other order is shorter.
    """

    def grow(rows, done) -> Iterator[tuple[tuple[int, int, int, bool], ...]]:
        if len(rows) == 3 * count:
            yield rows
        for place, opcode in enumerate(KINDS):
            before = done[place - 1] if place else min(count, done[2] + most)
            if done[place] < before:
                more = tuple(number + (i == place) for i, number in enumerate(done))
                yield from grow((*rows, (opcode, stage, done[place], False)), more)

    return grow((), (0, 0, 0))
