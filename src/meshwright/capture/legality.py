"""The positions where a captured model may be cut into stages, and the values that each stage recomputes for itself.

A cut is a position c between op c-1 and op c. Rules, each found by a failure (own experiments with corner models):

1. Memory that is written in place must not cross a cut before its last write: spans [first producer, last write] forbid
   cuts. Values that may share memory (by schema, or seen to) form one group.
2. State that is written (batch norm's statistics, counters, a batch that forward changes) is read and written in one
   stage: all of its uses form one span, or its value would silently differ between stages.
3. An op is replicable if it depends on no input, parameter, random number or written memory, and writes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from meshwright.spec import CaptureError

if TYPE_CHECKING:
    from meshwright.capture.table import CaptureTable


@dataclass(frozen=True, slots=True, kw_only=True)
class Legality:
    """``cuts``: where the op list may be cut. ``replicable``: per op. ``groups``: per tensor, its memory group."""

    cuts: frozenset[int]
    replicable: tuple[bool, ...]
    groups: tuple[int, ...]


def judge_cuts(table: CaptureTable) -> Legality:
    """Work out the legal cuts of a table; raises CaptureError if forward writes to a parameter or a constant."""
    groups = _memory_groups(table)
    mutated = {groups[i] for op in table.ops for i in op.written}
    _refuse_lost_writes(table, groups)
    forbidden = [0] * (len(table.ops) + 1)
    for first, last in _spans(table, groups, mutated):
        # The cuts first+1 .. last are forbidden.
        forbidden[first + 1] += 1
        forbidden[last + 1] -= 1
    cuts, depth = [], 0
    for position in range(1, len(table.ops)):
        depth += forbidden[position]
        if depth == 0:
            cuts.append(position)
    return Legality(cuts=frozenset(cuts), replicable=_replicable(table, groups, mutated), groups=tuple(groups))


def _memory_groups(table: CaptureTable) -> list[int]:
    """Union-find over tensors that share memory or may do so."""
    parent = list(range(len(table.tensors)))

    def find(i: int) -> int:
        while parent[i] != i:
            parent[i] = parent[parent[i]]
            i = parent[i]
        return i

    first: dict[int, int] = {}
    for i, row in enumerate(table.tensors):
        if row.slot.storage >= 0:
            parent[find(i)] = find(first.setdefault(row.slot.storage, i))
    for op in table.ops:
        for i in op.aliased:
            for j in op.outputs:
                parent[find(j)] = find(i)
    return [find(i) for i in range(len(parent))]


def _spans(table: CaptureTable, groups: list[int], mutated: set[int]) -> list[tuple[int, int]]:
    held = {
        groups[i] for i, row in enumerate(table.tensors) if row.role in ("input", "parameter", "buffer", "constant")
    }
    touched: dict[int, list[int]] = {}
    last_write: dict[int, int] = {}
    for position, op in enumerate(table.ops):
        for group in {groups[i] for i in (*op.inputs, *op.outputs)} & mutated:
            touched.setdefault(group, []).append(position)
        for i in op.written:
            last_write[groups[i]] = position
    return [
        (positions[0], positions[-1] if group in held else last_write[group]) for group, positions in touched.items()
    ]


def _replicable(table: CaptureTable, groups: list[int], mutated: set[int]) -> tuple[bool, ...]:
    free = {i for i, row in enumerate(table.tensors) if row.role in ("buffer", "constant") and groups[i] not in mutated}
    verdicts = []
    for op in table.ops:
        verdict = (
            not op.random
            and not op.written
            and all(i in free for i in op.inputs)
            and all(groups[i] not in mutated for i in op.outputs)
        )
        verdicts.append(verdict)
        if verdict:
            free.update(op.outputs)
    return tuple(verdicts)


def _refuse_lost_writes(table: CaptureTable, groups: list[int]) -> None:
    lasting = {groups[i]: row for i, row in enumerate(table.tensors) if row.role in ("parameter", "constant")}
    for op in table.ops:
        for i in op.written:
            row = lasting.get(groups[i])
            if row is not None:
                place = op.node.meta["where"] or op.node.meta["module"] or "forward"
                what = (
                    f"parameter {row.name!r}"
                    if row.role == "parameter"
                    else "a tensor that is neither parameter nor buffer"
                )
                raise CaptureError(
                    f"{place}: forward writes to {what} in place; a captured model would lose the write or repeat it. "
                    "Keep such values in a buffer (register_buffer)."
                )
