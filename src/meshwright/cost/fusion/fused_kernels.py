"""Fusion of a unit's loops into kernels, as in inductor, and the memory traffic of such kernels.

Two loops are fused if they iterate over the same elements (or one iterates over the rows that the other sums) and share
memory. Either one loop reads in the same order what the other writes, and nothing has to run between them; or both read
the same buffer. Pairs that share the most bytes are fused first. This is repeated until no pair is left (torch 2.13,
torch/_inductor/scheduler.py, fuse_nodes; codegen/simd.py, codegen/cpp.py, can_fuse). On GPUs, sums over rows and over
columns of the same large matrix also become one kernel (MixOrderReduction).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from meshwright.cost.fusion.inductor_lowering import Read, Stored
    from meshwright.cost.fusion.written_values import Device, FusedValue

# torch/_inductor/config.py, choices.py: max_fusion_size; the largest distance of loops that only read the same.
_MOST_LOOPS, _MOST_BETWEEN, _ROUNDS = 64, 64, 10
# Elements of at most this number of bytes are narrow.
_NARROW = 2
# The fewest shared bytes for a fusion (score_fusion_memory_threshold).
_LEAST_SHARED = 10
# MixOrderReduction.can_fuse: elements, rows, rows per column, columns.
_MIXED_ELEMENTS, _MIXED_ROWS, _MIXED_RATIO, _MIXED_COLUMNS = 5 * 2**20, 4096, 2, 16 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class FusedKernel:
    """One kernel of a compiled unit's forward or backward, with the ops that it computes and its memory traffic.

    ``backward``: whether the kernel runs in the backward. ``members``: pairs (op, whether its backward is computed),
    with ops counted from the start of the unit. A pair (op, False) in a kernel of the backward is a recomputed op.
    ``read``, ``written``: bytes, each tensor counted once. ``fresh``: bytes of ``read`` that the previous kernel has
    just written. ``narrow``: whether most bytes belong to elements of at most two bytes. ``rows``: length of the rows
    that the kernel sums, 0 without row sums. ``columns``: number of columns that it sums over ``summed`` rows, 0
    without column sums. ``extern``: whether it is a library's kernel, not one that inductor generates.
    """

    backward: bool
    members: frozenset[tuple[int, bool]]
    read: float
    written: float
    narrow: bool
    fresh: float = 0.0
    rows: int = 0
    columns: int = 0
    summed: int = 0
    extern: bool = False


class _Group:
    """Loops that form one kernel."""

    def __init__(self, loops: list[Stored], orders: list[int], before: set[int]) -> None:
        self.loops, self.orders, self.before = loops, orders, before
        self.reads: dict[Read, int] = {}
        self.writes: dict[Read, int] = {}
        for loop in loops:
            self.reads.update(loop.reads)
            self.writes.update(loop.writes)
        self.made = {buffer for buffer, _ in self.writes}
        sums = [loop for loop in loops if loop.rnumel > 1]
        self.sums = bool(sums)
        self.numel = sums[0].numel if sums else loops[0].numel
        self.rnumel = sums[0].rnumel if sums else 1
        self.in_rows = bool(sums) and sums[0].in_rows
        self.mixed = len({(loop.numel, loop.in_rows) for loop in sums}) > 1
        self.extern = loops[0].extern
        self.scatters = any(loop.scatters for loop in loops)

    def dependencies(self) -> dict[Read, int]:
        """Return the buffers that the kernel reads or writes, with bytes."""
        return {**self.reads, **self.writes}


def fuse(
    values: Sequence[FusedValue], loops: list[Stored], kept: set[int], start: int, device: Device, *, backward: bool
) -> tuple[FusedKernel, ...]:
    """Return the kernels into which the loops of a pass are fused, in a valid order of execution.

    ``kept``: buffers that are needed after the pass. ``start``: index of the unit's first op in the graph.
    """
    writers: dict[int, list[int]] = {}
    before: list[set[int]] = []
    for order, loop in enumerate(loops):
        sources = {other for buffer, _ in loop.reads for other in writers.get(buffer, ())}
        before.append(sources | {far for other in sources for far in before[other]})
        for buffer, _ in loop.writes:
            writers.setdefault(buffer, []).append(order)
    groups = {order: _Group([loop], [order], before[order]) for order, loop in enumerate(loops)}
    of = list(range(len(loops)))
    for _ in range(_ROUNDS):
        if not _round(groups, of, device):
            break
    ordered = _sorted(groups, of)
    made = [set(), *(group.made for group in ordered)]
    return tuple(
        _kernel(values, group, groups, kept, start, fresh, backward=backward)
        for group, fresh in zip(ordered, made, strict=False)
    )


def _sorted(groups: dict[int, _Group], of: list[int]) -> list[_Group]:
    """Return groups in a possible order of execution."""
    found: dict[int, None] = {}

    def visit(key: int) -> None:
        if key in found:
            return
        for other in sorted({of[i] for i in groups[key].before} - {key}):
            visit(other)
        found.setdefault(key)

    for key in sorted(groups, key=lambda key: min(groups[key].orders)):
        visit(key)
    return [groups[key] for key in found]


def _round(groups: dict[int, _Group], of: list[int], device: Device) -> bool:
    """Fuse all possible pairs, those that share the most first; return whether any was fused."""
    users: dict[int, list[int]] = {}
    for key, group in groups.items():
        if not group.extern:
            for buffer in {buffer for buffer, _ in group.dependencies()}:
                users.setdefault(buffer, []).append(key)
    pairs = {}
    for keys in users.values():
        for place, first in enumerate(keys):
            for second in keys[place + 1 :]:
                if (first, second) not in pairs and (
                    score := _score(groups[first], groups[second], device)
                ) is not None:
                    pairs[first, second] = score
    fused = False
    for first, second in sorted(pairs, key=pairs.__getitem__, reverse=True):
        one, two = of[first], of[second]
        if one == two or ((one, two) != (first, second) and _score(groups[one], groups[two], device) is None):
            continue
        if _cycles(groups, of, one, two):
            continue
        _merge(groups, of, one, two)
        fused = True
    return fused


def _merge(groups: dict[int, _Group], of: list[int], first: int, second: int) -> None:
    one, two = groups[first], groups.pop(second)
    pairs = sorted(zip(one.orders + two.orders, one.loops + two.loops, strict=True), key=lambda pair: pair[0])
    orders = [order for order, _ in pairs]
    groups[first] = _Group([loop for _, loop in pairs], orders, (one.before | two.before) - set(orders))
    for order in two.orders:
        of[order] = first


def _score(one: _Group, two: _Group, device: Device) -> tuple[int, int, int] | None:
    """Return the score of fusing two groups; None if it is impossible."""
    if max(two.orders) < min(one.orders) or one.before & set(two.orders):
        one, two = two, one
    if one.before & set(two.orders) or len(one.loops) + len(two.loops) > _MOST_LOOPS:
        return None
    mine, theirs = one.dependencies(), two.dependencies()
    shared = sum(size for read, size in mine.items() if read in theirs)
    mixed = device == "cuda" and _mixed(one, two, mine, theirs)
    vertical = bool(two.before & set(one.orders))
    if not mixed and (shared == 0 or not _same_elements(one, two, device, vertical=vertical)):
        return None
    distance = max(abs(min(one.orders) - max(two.orders)), abs(min(two.orders) - max(one.orders)))
    if vertical:
        if any(read[0] in one.made and read not in one.writes for read in two.reads):
            return None
    elif not mixed and (shared < _LEAST_SHARED or distance > _MOST_BETWEEN):
        return None
    return int(one.sums == two.sums), shared, -distance


def _same_elements(one: _Group, two: _Group, device: Device, *, vertical: bool) -> bool:
    if one.mixed or two.mixed:
        return False
    if one.sums and two.sums:
        if device == "cpu" and vertical:
            return one.numel == two.numel > 1
        return (one.numel, one.rnumel, one.in_rows) == (two.numel, two.rnumel, two.in_rows)
    if not one.sums and not two.sums:
        return one.numel == two.numel
    summing, plain = (one, two) if one.sums else (two, one)
    if plain.numel == summing.numel * summing.rnumel:
        return summing.in_rows and (device == "cuda" or _rows_alike(plain, summing))
    # On CPUs loops have to match dim by dim, with at least one dim.
    alike = plain.numel > 1 and (summing.in_rows or not plain.scatters)
    return plain.numel == summing.numel and (device == "cuda" or alike)


def _rows_alike(plain: _Group, summing: _Group) -> bool:
    """Return whether a CPU iterates over a loop's elements row by row: some input must have such rows."""
    by_row = {summing.numel, summing.rnumel}
    counts = set().union(*(loop.counts for loop in plain.loops))
    return bool(counts & by_row) and counts <= by_row | {plain.numel, 1}


def _mixed(one: _Group, two: _Group, mine: dict[Read, int], theirs: dict[Read, int]) -> bool:
    if not one.sums or not two.sums or one.in_rows == two.in_rows or two.before & set(one.orders):
        return False
    rows, columns = (one, two) if one.in_rows else (two, one)
    if (rows.numel, rows.rnumel) != (columns.rnumel, columns.numel):
        return False
    common = any(read in theirs for read in mine)
    big = rows.numel * rows.rnumel >= _MIXED_ELEMENTS and rows.numel >= max(_MIXED_ROWS, _MIXED_RATIO * rows.rnumel)
    return common and big and rows.rnumel <= _MIXED_COLUMNS


def _cycles(groups: dict[int, _Group], of: list[int], first: int, second: int) -> bool:
    """Return whether something outside of both would have to run after one and before the other."""
    own = {first, second}
    todo = [of[i] for key in own for i in groups[key].before if of[i] not in own]
    seen: set[int] = set()
    while todo:
        key = todo.pop()
        if key in seen:
            continue
        seen.add(key)
        for order in groups[key].before:
            if of[order] in own:
                return True
            todo.append(of[order])
    return False


def _kernel(
    values: Sequence[FusedValue],
    group: _Group,
    groups: dict[int, _Group],
    kept: set[int],
    start: int,
    fresh: set[int],
    *,
    backward: bool,
) -> FusedKernel:
    elsewhere = {buffer for other in groups.values() if other is not group for buffer, _ in other.reads}
    read: dict[int, int] = {}
    for (buffer, _), size in group.reads.items():
        if buffer not in group.made:
            read[buffer] = min(read.get(buffer, 0) + size, values[buffer].num_bytes)
    written: dict[int, int] = {}
    for (buffer, _), size in group.writes.items():
        if buffer in elsewhere or buffer in kept:
            written[buffer] = written.get(buffer, 0) + size
    moved = [(values[buffer].width, size) for each in (read, written) for buffer, size in each.items()]
    narrow = sum(size for width, size in moved if width <= _NARROW)
    computed = {i for loop in group.loops for i in loop.values if values[i].op >= 0}
    sums = [loop for loop in group.loops if loop.rnumel > 1]
    return FusedKernel(
        backward=backward,
        members=frozenset((values[i].op - start, values[i].backward) for i in computed),
        read=float(sum(read.values())),
        written=float(sum(written.values())),
        narrow=2 * narrow > sum(size for _, size in moved),
        fresh=float(sum(size for buffer, size in read.items() if buffer in fresh)),
        rows=max((loop.rnumel for loop in sums if loop.in_rows), default=0),
        columns=max((loop.numel for loop in sums if not loop.in_rows), default=0),
        summed=max((loop.rnumel for loop in sums if not loop.in_rows), default=0),
        extern=group.extern,
    )
