"""Conversions: ops that are inserted to bring tensors to the layout in which they are read, and their collectives.

`placements.toml` lists the conversions. A tensor that several ops read in the same layout is converted once, before the
first of these ops; the gradients of its readers are summed before the collective. Readers that give whole gradients and
readers that give partial sums need separate conversions. `exchange_rows` adds the all-to-alls of a mixture of experts.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple

from meshwright.program.sharding.placement_table import Conversion, find_conversion
from meshwright.program.sharding.sharded import MESH
from meshwright.spec import Extent, Op, Partial, Replicate, Shard, Sharding, Tensor

if TYPE_CHECKING:
    from collections.abc import Mapping

    from meshwright.program.sharding.expert_ops import Grouped
    from meshwright.program.sharding.propagate import Place, PropagationState
    from meshwright.spec.exchange import Axis, CollectiveKind
    from meshwright.spec.graph import Role
    from meshwright.spec.sharding import Layout


_INDEX = "aten.index.Tensor"


# Dispatch and combine, the ops that send sorted choices to the ranks of their experts, and back:
#
#     exchange_counts   ends of all experts → number of rows from each rank for each local expert
#     arrival           those counts → indices, into the rows that arrive rank by rank, in the order of their experts
#     return            → the inverse of that
#     group_ends        → ends of the rows of each local expert
#     group_ids         → the expert of each row, for biases
#     dispatch          rows → the rows that arrive; combine: the reverse
#     aten.index        rows that arrived → in the order of the experts, and back
#
# Only counts and rows are exchanged. The tensors have the sizes for experts that are chosen equally often.
def exchange_rows(made: Conversions, mixture: Grouped) -> None:
    """Add dispatch and combine, the all-to-alls of a mixture of experts, to the conversions of its graph."""
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


_ATTENTION = "aten.scaled_dot_product_attention"
_KEYS_AND_VALUES = (1, 2)
# Conversions whose result is a view of the converted tensor.
_VIEWS = ("copy", "ring")


@dataclass(frozen=True, slots=True)
class PendingCollective:
    """A `Collective` of an op whose position in the local graph is not known yet.

    ``backward``: it runs in the backward phase. The other fields are those of `spec.exchange.Collective`.
    """

    kind: CollectiveKind
    backward: bool
    tensor: int
    copies: int = 1
    count: int = 1


class _Reader(NamedTuple):
    """An op, and the position at which it reads a tensor in another layout."""

    op: int
    position: int


@dataclass(slots=True)
class Conversions:
    """Changes that turn a propagated graph into a local graph. All keys are indices of ops and ids of tensors.

    ``tensors`` have local shapes; new tensors are appended. ``before`` and ``behind``: ops to insert before or after an
    op of the whole graph. ``read``: by (op, input position), the tensor that the op reads instead of its own input.
    ``kept``: by (op, tensor), the tensors that the op saves for its backward instead of that tensor. ``summed``: the
    partial sum that an op makes instead of a tensor. ``layouts`` and ``sources``: the layout of a new tensor, and the
    tensor that it is made from. ``exchanges``: the collectives of an inserted op, by the tensor that it makes;
    ``inside``: those of ops of the whole graph. ``reduced``: parameters (as keys) whose gradients are partial on each
    rank and are summed once per step.
    """

    state: PropagationState
    axis: Axis
    sharding: Sharding
    tensors: list[Tensor]
    before: dict[int, list[Op]] = field(default_factory=dict)
    behind: dict[int, list[Op]] = field(default_factory=dict)
    read: dict[tuple[int, int], int] = field(default_factory=dict)
    kept: dict[tuple[int, int], tuple[int, ...]] = field(default_factory=dict)
    summed: dict[int, int] = field(default_factory=dict)
    layouts: dict[int, Layout] = field(default_factory=dict)
    sources: dict[int, int] = field(default_factory=dict)
    exchanges: dict[int, list[PendingCollective]] = field(default_factory=dict)
    inside: dict[int, list[PendingCollective]] = field(default_factory=dict)
    reduced: dict[int, None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for mixture in self.state.facts.mixtures:
            exchange_rows(self, mixture)
        for index in range(len(self.state.splits)):
            self._complete_sums(index)
            self._exchange_inside(index)
        for (tensor, want, partial), readers in self._readers().items():
            self._convert(tensor, want, readers, partial=partial)

    def new(self, source: int, what: str, like: Tensor) -> int:
        """Append a tensor like ``like``, made from tensor ``source`` and split over dim 0; return its id.

        ``what`` is appended to the tensor's name.
        """
        new = len(self.tensors)
        given = replace(like, name=self.tensors[source].name)
        self.tensors.append(_derived(given, what, shape=like.shape, storage=new))
        self.layouts[new], self.sources[new] = Shard(0), source
        return new

    def swap(self, new: int, source: int) -> None:
        """Record an all-to-all for the op that makes tensor ``new``, and one for the gradient in training.

        Each rank's part has the size of the tensor ``source``.
        """
        size, exchange = self.state.facts.size, PendingCollective("all_to_all", backward=False, tensor=source)
        self.exchanges[new] = [replace(exchange, copies=size)]
        if self.state.facts.graph.mode == "training" and self.tensors[new].requires_grad:
            self.exchanges[new].append(replace(exchange, copies=size, backward=True))

    def read_instead(self, index: int, tensors: Mapping[int, int]) -> None:
        """Make op ``index`` read, and save for its backward, ``tensors[i]`` instead of each input i."""
        op = self.state.facts.graph.ops[index]
        for position, tensor in enumerate(op.inputs):
            if tensor in tensors:
                self.read[index, position] = tensors[tensor]
                self.kept[index, tensor] = (tensors[tensor],)

    def layout_of(self, tensor: int) -> Layout:
        """Return the layout that a tensor of the whole graph has on the axis."""
        if tensor in self.state.partial and self._stays_partial(tensor):
            return Partial()
        return self._layout(self.state.places.get(tensor))

    def _layout(self, place: Place) -> Layout:
        if place is None:
            return Replicate()
        dim, parts = place
        batched, rest = divmod(parts, self.state.facts.samples)
        symbolic = self.state.facts.graph.batch_size is None and not rest
        return Shard(dim, Extent(0, batched) if symbolic else Extent(parts))

    def _stays_partial(self, tensor: int) -> bool:
        """Whether a partial sum is left as it is: scalars are."""
        return not self.state.facts.shapes[tensor]

    def _readers(self) -> dict[tuple[int, Place, bool], list[_Reader]]:
        """Return readers of each tensor to convert, by wanted place, and whether they give parts of its gradient.

        Parts of a parameter's gradient are summed once per step, unless other readers give all of it on every rank.
        """
        state, facts = self.state, self.state.facts
        found: dict[tuple[int, Place, bool], list[_Reader]] = {}
        mixed = self._mixed_gradients()
        for index, op in enumerate(facts.graph.ops):
            for position, (tensor, want) in enumerate(zip(op.inputs, state.wanted(index), strict=True)):
                have, partial = state.places.get(tensor), state.sums_gradient(index, position)
                # For tensors that depend on parameters alone, ranks with samples of their own have parts of the
                # gradient, which are summed together with the parameters' gradients.
                is_summed = facts.own_samples and facts.input_free[tensor] and not facts.is_parameter(tensor)
                if (index, position) in self.read or (have == want and is_summed):
                    continue
                if have == want and facts.is_parameter(tensor) and not (partial and tensor in mixed):
                    self.reduced |= {tensor: None} if partial else {}
                elif have != want or (have is None and partial):
                    found.setdefault((tensor, want, partial), []).append(_Reader(index, position))
        return found

    def _mixed_gradients(self) -> set[int]:
        """Return parameters for which some readers give parts of the gradient, and others, converted or not, all."""
        state, facts = self.state, self.state.facts
        parts: set[int] = set()
        whole: set[int] = set()
        for index, op in enumerate(facts.graph.ops):
            for position, (tensor, want) in enumerate(zip(op.inputs, state.wanted(index), strict=True)):
                if facts.is_parameter(tensor):
                    is_part = state.places.get(tensor) == want and state.sums_gradient(index, position)
                    (parts if is_part else whole).add(tensor)
        return parts & whole

    def _convert(self, tensor: int, want: Place, readers: list[_Reader], *, partial: bool) -> None:
        facts = self.state.facts
        have = self._layout(self.state.places.get(tensor))
        conversion = find_conversion(have, self._layout(want), partial_gradient=partial)
        if conversion is None:
            return
        kind = "ring" if self._goes_round(conversion, readers) else conversion.kind
        new, first, size = len(self.tensors), readers[0].op, facts.size
        old = self.tensors[tensor]
        shape = split_shape(facts.graph.tensors[tensor].shape, want, size)
        storage = old.storage if kind in _VIEWS else new
        self.tensors.append(_derived(old, kind, shape=shape, storage=storage))
        self.layouts[new], self.sources[new] = self._layout(want), tensor
        self.before.setdefault(first, []).append(self._op(kind, tensor, new, first))
        if kind == "ring":
            # Parts are sent while the attention computes, not before.
            self.inside.setdefault(first, []).extend(self._sends(tensor))
        else:
            self.exchanges[new] = self._exchanges(conversion, tensor, new)
        for reader in readers:
            self.read[reader] = new
        self._keep(tensor, new, [reader.op for reader in readers], regathers=conversion.backward == "reduce_scatter")

    def _keep(self, tensor: int, new: int, readers: list[int], *, regathers: bool) -> None:
        """Make ops save for their backward what they read, or its source before a gather, to gather it again."""
        ops = self.state.facts.graph.ops
        keepers = [index for index in dict.fromkeys(readers) if tensor in ops[index].saved]
        if self.sharding.regather and self.axis == "tensor" and regathers and keepers:
            again = PendingCollective("all_gather", backward=True, tensor=new)
            self.inside.setdefault(keepers[-1], []).append(again)
            return
        for index in keepers:
            positions = [at for at, i in enumerate(ops[index].inputs) if i == tensor]
            self.kept[index, tensor] = tuple(dict.fromkeys(self.read.get((index, at), tensor) for at in positions))

    def _goes_round(self, conversion: Conversion, readers: list[_Reader]) -> bool:
        """Whether keys and values travel round a ring of ranks instead of being gathered."""
        ops = self.state.facts.graph.ops
        attention = all(
            ops[reader.op].kind.startswith(_ATTENTION) and reader.position in _KEYS_AND_VALUES for reader in readers
        )
        ring = self.axis == "context" and self.sharding.context_method == "ring"
        return ring and attention and conversion.kind == "all_gather"

    def _sends(self, source: int) -> list[PendingCollective]:
        """Return the sends of a ring for keys, or values: every rank sees the parts of all others.

        Backward sends them round again, and gradients all the way home (torch, _templated_ring_attention_backward).
        """
        size = self.state.facts.size
        sends = [PendingCollective("send", backward=False, tensor=source, count=size - 1)]
        if self.state.facts.requires_gradient(source):
            sends.append(PendingCollective("send", backward=True, tensor=source, count=2 * size - 1))
        return sends

    def _exchanges(self, conversion: Conversion, source: int, new: int) -> list[PendingCollective]:
        gathers, swaps = conversion.kind == "all_gather", conversion.kind == "all_to_all"
        full, copies = (new if gathers else source), (self.state.facts.size if swaps else 1)
        found = []
        if conversion.forward:
            found.append(PendingCollective(conversion.forward, backward=False, tensor=full, copies=copies))
        if conversion.backward and self.state.facts.requires_gradient(source):
            found.append(PendingCollective(conversion.backward, backward=True, tensor=full, copies=copies))
        return found

    def _complete_sums(self, index: int) -> None:
        """Insert, after an op whose outputs are sums over the ranks, the collective that completes or scatters them."""
        facts = self.state.facts
        for tensor in facts.graph.ops[index].outputs:
            if tensor not in self.state.partial or self._stays_partial(tensor):
                continue
            new = len(self.tensors)
            shape = facts.graph.tensors[tensor].shape
            self.tensors.append(_derived(self.tensors[tensor], "partial", shape=shape, storage=new))
            conversion = find_conversion(Partial(), self.layout_of(tensor), partial_gradient=False)
            assert conversion is not None
            self.summed[tensor], self.layouts[new], self.sources[new] = new, Partial(), tensor
            self.behind.setdefault(index, []).append(self._op(conversion.kind, new, tensor, index))
            self.exchanges[tensor] = [
                replace(exchange, tensor=new) for exchange in self._exchanges(conversion, tensor, tensor)
            ]

    def _exchange_inside(self, index: int) -> None:
        """Record the collectives inside an op: one number per element of its second input."""
        facts, split = self.state.facts, self.state.splits[index]
        row, op = facts.rows[index], facts.graph.ops[index]
        if index in facts.sorted_ops or row is None or split is None or split.label not in facts.dims[index].inner:
            return
        new = len(self.tensors)
        targets = self.tensors[op.inputs[1]]
        number = replace(self.tensors[op.inputs[0]], role="saved", requires_grad=False, aliases=())
        self.tensors.append(_derived(number, "statistic", shape=targets.shape, storage=new))
        self.layouts[new], self.sources[new] = Replicate(), op.inputs[1]
        self.inside[index] = [PendingCollective(kind, backward=False, tensor=new) for kind in row.exchanges]

    def _op(self, kind: str, source: int, new: int, index: int) -> Op:
        graph = self.state.facts.graph
        made = self.state.facts.producer.get(source)
        return Op(
            name=f"{self.tensors[min(source, new)].name}_{kind}",
            kind=f"{MESH}{kind}.default",
            inputs=(source,),
            outputs=(new,),
            module=graph.ops[index].module,
            replicable=made is not None and graph.ops[made].replicable,
        )


def _derived(tensor: Tensor, what: str, *, shape: tuple[Extent, ...], storage: int) -> Tensor:
    """Return a new tensor that an existing one is converted to."""
    role: Role = "activation" if tensor.role != "saved" else "saved"
    return replace(tensor, name=f"{tensor.name}_{what}", shape=shape, storage=storage, role=role, aliases=())


def split_extent(extent: Extent, size: int) -> Extent:
    """Return the size of the largest part if a dim of size ``extent`` is split over ``size`` ranks."""
    return Extent(-(-extent.fixed // size), -(-extent.per_sample // size))


def split_shape(shape: tuple[Extent, ...], place: Place, size: int) -> tuple[Extent, ...]:
    """Return the local shape of a tensor that is split at ``place`` = (dim, parts) over ``size`` ranks.

    For None, the shape stays as it is.
    """
    if place is None:
        return shape
    dim = place[0]
    return (*shape[:dim], split_extent(shape[dim], size), *shape[dim + 1 :])
