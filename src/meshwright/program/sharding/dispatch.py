"""Dispatch and combine: the ops that send sorted choices to the ranks of their experts, and back.

    exchange_counts   ends of all experts → number of rows from each rank for each local expert
    arrival           those counts → indices, into the rows that arrive rank by rank, in the order of their experts
    return            → the inverse of that
    group_ends        → ends of the rows of each local expert
    group_ids         → the expert of each row, for biases
    dispatch          rows → the rows that arrive; combine: the reverse
    aten.index        rows that arrived → in the order of the experts, and back

Only counts and rows are exchanged. The tensors have the sizes for experts that are chosen equally often.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from meshwright.program.sharding.sharded import MESH
from meshwright.spec.graph import Extent, Op, Tensor

if TYPE_CHECKING:
    from meshwright.program.sharding.convert import Conversions
    from meshwright.program.sharding.grouped import Grouped

_INDEX = "aten.index.Tensor"


def exchange_rows(made: Conversions, mixture: Grouped) -> None:
    """Add the exchanges of a mixture of experts to the conversions of its graph."""
    graph, size = made.state.facts.graph, made.state.facts.size
    behind = made.state.facts.producer[mixture.ends]
    here = mixture.num_experts // size
    some = replace(made.tensors[min(mixture.ids)], dtype="int64")
    ends = made.tensors[mixture.ends]
    count_shape = (Extent(size), Extent(here))
    counts = _behind(made, behind, "exchange_counts", mixture.ends, replace(some, shape=count_shape))
    made.swap(counts, counts)
    arrival, home = (_behind(made, behind, what, counts, some) for what in ("arrival", "return"))
    group_ends = _behind(made, behind, "group_ends", counts, replace(ends, shape=(Extent(here),)))
    of_ids = None
    if any(not mixture.ids.isdisjoint(graph.ops[index].inputs) for index in mixture.moved):
        of_ids = _behind(made, behind, "group_ids", counts, some)
    moved = set(mixture.moved)
    instead = {mixture.ends: group_ends} | ({} if of_ids is None else dict.fromkeys(mixture.ids, of_ids))
    for tensor in mixture.entering:
        first = next(index for index in mixture.moved if tensor in graph.ops[index].inputs)
        arrived = made.new(tensor, "dispatch", made.tensors[tensor])
        sorted_ = made.new(tensor, "by_expert", made.tensors[tensor])
        made.before.setdefault(first, []).extend(
            (
                _op(made, "dispatch", (tensor, mixture.ends, counts), arrived, first),
                _op(made, _INDEX, (arrived, arrival), sorted_, first),
            )
        )
        made.swap(arrived, tensor)
        instead[tensor] = sorted_
    for index in mixture.moved:
        made.read_instead(index, instead)
    for tensor in mixture.leaving:
        last = made.state.facts.producer[tensor]
        leaving = made.new(tensor, "by_rank", made.tensors[tensor])
        combined = made.new(tensor, "combine", made.tensors[tensor])
        made.behind.setdefault(last, []).extend(
            (
                _op(made, _INDEX, (tensor, home), leaving, last),
                _op(made, "combine", (leaving, mixture.ends, counts), combined, last),
            )
        )
        made.swap(combined, tensor)
        for index, _ in made.state.facts.readers.get(tensor, ()):
            if index not in moved:
                made.read_instead(index, {tensor: combined})


def _behind(made: Conversions, index: int, what: str, source: int, like: Tensor) -> int:
    """Insert an op after another; return what it makes of one tensor."""
    new = made.new(source, what, like)
    made.behind.setdefault(index, []).append(_op(made, what, (source,), new, index))
    return new


def _op(made: Conversions, what: str, inputs: tuple[int, ...], new: int, index: int) -> Op:
    return Op(
        name=made.tensors[new].name,
        kind=what if what == _INDEX else f"{MESH}{what}.default",
        inputs=inputs,
        outputs=(new,),
        module=made.state.facts.graph.ops[index].module,
        # The backward restores the order of the rows by the index.
        saved=inputs[1:] if what == _INDEX and made.tensors[inputs[0]].requires_grad else (),
    )
