"""A unit written out: the values that its ops make one after the other, forward and backward.

Autograd runs backwards in the reverse order of the ops and adds up gradients of what several ops read. Casts of
autocast are values like others. An operator without a rule is a kernel of its own each way, which makes all outputs.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from meshwright.cost.autocast import cast_inputs, compute_type
from meshwright.cost.fusion.rules import Made, fusion_rules
from meshwright.cost.traits import family_of, is_in_place, is_view, operator_name
from meshwright.spec.units import DTYPE_BYTES, FLOAT_DTYPES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from meshwright.cost.fusion.rules import Steps
    from meshwright.cost.widths import Widths
    from meshwright.spec import Graph
    from meshwright.spec.precision import Numbers

Shape = tuple[int, ...]
Device = Literal["cuda", "cpu"]
# What stores nothing of its own.
VIEWS = frozenset({"view", "turned"})
# A copy in another order that autograd does not see: what is kept of its input is the copy.
ORDERED = "ordered"
REDUCTIONS = frozenset({"rows", "channels", "groups", "pixels", "all", "to", "reduced"})
EXTERNS = frozenset({"extern", "several", "random", "part"})
# Statistics are float32 whatever they are of.
_SINGLE_BYTES = 4
_IMAGE_DIMS = 4
# Where attention has its mask.
_MASK = 3


@dataclass(slots=True, kw_only=True, eq=False)
class Value:
    """A value: the op and pass that make it (``op`` -1: given to the unit), how, from what, and how large it is.

    ``shape`` in elements of ``width`` bytes; ``reduced``: elements that one of its own is made of. ``ops`` counts the
    operations of an element. ``turn`` tells how a view looks at its input where that is not in the same order.
    """

    op: int
    backward: bool
    sort: str
    inputs: tuple[int, ...]
    shape: Shape
    width: int
    ops: int = 1
    heavy: bool = False
    turn: tuple[object, ...] = ()
    parameter: bool = False

    @property
    def elements(self) -> int:
        """Number of elements."""
        count = 1
        for size in self.shape:
            count *= size
        return count

    @property
    def num_bytes(self) -> int:
        """Bytes."""
        return self.elements * self.width


@dataclass(slots=True, kw_only=True, eq=False)
class Written:
    """The values of a unit, in order; the first ``num_forward`` are the forward's. ``yielded``: what leaves each pass."""

    values: list[Value]
    num_forward: int = 0
    forward_yields: list[int] = field(default_factory=list)
    backward_yields: list[int] = field(default_factory=list)


def write_unit(
    graph: Graph, start: int, stop: int, batch_size: int, numbers: Numbers, widths: Widths, later: frozenset[int],
    device: Device = "cuda",
) -> Written:
    """Write out ops ``start:stop``; ``later``: tensors of theirs that others read."""
    writer = _Writer(graph, batch_size, numbers, widths, device)
    for op in range(start, stop):
        writer.forward(op)
    written = writer.written
    written.num_forward = len(written.values)
    left = [i for op in range(start, stop) for i in graph.ops[op].outputs if i in later]
    changed = [op for op in graph.ops[start:stop] if is_in_place(op) and graph.tensors[op.inputs[0]].role == "buffer"]
    written.forward_yields += [writer.of[i] for i in (*left, *(op.outputs[0] for op in changed))]
    if graph.mode == "training":
        for i in left:
            if graph.tensors[i].requires_grad:
                # The gradient that comes in.
                writer.gradients[i] = [writer.given(i, backward=True)]
        for op in reversed(range(start, stop)):
            writer.backward(op)
        written.backward_yields += writer.leave()
    return written


class _Writer:
    def __init__(self, graph: Graph, batch_size: int, numbers: Numbers, widths: Widths, device: Device) -> None:
        self.device = device
        self.graph, self.batch_size, self.numbers, self.widths = graph, batch_size, numbers, widths
        self.written = Written(values=[])
        self.of: dict[int, int] = {}
        self.gradients: dict[int, list[int]] = {}
        self._inner: dict[int, dict[str, int]] = {}
        self._given: list[int] = []
        self._casts: dict[tuple[int, int], int] = {}
        self._ordered: dict[int, int] = {}
        self._op, self._backward = -1, False

    def forward(self, index: int) -> None:
        op = self.graph.ops[index]
        self._op, self._backward = index, False
        names: dict[str, int] = {}
        wanted = compute_type(self.graph, op, self.numbers.autocast) if self.numbers.autocast else ""
        casts = cast_inputs(self.graph, op, self.numbers.autocast) if self.numbers.autocast else []
        for place, i in enumerate(op.inputs):
            value = self.of.get(i)
            if value is None:
                value = self.given(i)
            if i in casts:
                value = self._cast(value, DTYPE_BYTES[wanted])
            names[f"x{place}"] = value
        if family_of(op) == "convolution":
            names.update(self._channels_last(names))
        self._inner[index] = names
        name = operator_name(op)
        if self._looks(index):
            for place, i in enumerate(op.outputs):
                turn = (op.kind, op.attributes, place) if name in _TURNING else ()
                self.of[i] = names[f"y{place}"] = self._view(names["x0"], i, turn)
            return
        rule = fusion_rules().get(self._rule_name(index))
        if rule is None or (name == "dropout" and family_of(op) == "view" and dict(op.attributes).get("p") == "0.0"):
            rule = _UNKNOWN
        if name in ("flatten", "reshape", "view", "transpose", "permute"):
            rule = fusion_rules()["contiguous"]
        if name in ("cat", "stack"):
            parts = tuple(names[f"x{place}"] for place in range(len(op.inputs)))
            self.of[op.outputs[0]] = names["y0"] = self._add("cat", parts, *self._sizes(op.outputs[0]))
            return
        self._names_for(index, names)
        self._run(rule[0], names)
        for place, i in enumerate(op.outputs):
            if f"y{place}" not in names:
                names[f"y{place}"] = self._add("view", (names["y0"],), *self._sizes(i))
            self.of[i] = names[f"y{place}"]
        self.written.forward_yields += [names[u] for u in ("u3", "u4") if u in names]

    def backward(self, index: int) -> None:
        op = self.graph.ops[index]
        found = {place: self._sum(self.gradients.pop(i)) for place, i in enumerate(op.outputs) if i in self.gradients}
        wanted = [place for place, i in enumerate(op.inputs) if self.graph.tensors[i].requires_grad]
        if not found or not wanted:
            return
        self._op, self._backward = index, True
        names = dict(self._inner[index])
        names.update((f"g{place}", value) for place, value in found.items())
        name = operator_name(op)
        rule = fusion_rules().get(self._rule_name(index))
        if self._looks(index):
            made = self._viewed_back(index, names, found)
        elif name in ("flatten", "reshape", "view", "transpose", "permute"):
            made = {0: self._view(names["g0"], op.inputs[0], (name,) if name in _TURNING else ())}
        elif name in ("cat", "stack"):
            made = {place: self._view(names["g0"], op.inputs[place], (op.kind, place)) for place in wanted}
        else:
            steps = rule[1] if rule is not None else tuple(
                (f"d{place}", Made(sort="extern" if place == wanted[0] else "part", like=f"x{place}",
                 inputs=tuple(n for n in names if n[0] in "xg") if place == wanted[0] else (f"d{wanted[0]}",)))
                for place in wanted
            )
            self._names_for(index, names)
            self._run(_needed(steps, {f"d{place}" for place in wanted}), names)
            made = {place: names[f"d{place}"] for place in wanted if f"d{place}" in names}
            if family_of(op) == "attention":
                # Gradients lie in memory as what they are of.
                made = {place: self._as(value, names[f"x{place}"]) for place, value in made.items()}
        for place, value in made.items():
            i = op.inputs[place]
            own = self._own_width(i)
            if self.written.values[value].width != own and self.graph.tensors[i].dtype in FLOAT_DTYPES:
                value = self._add("point", (value,), self.written.values[value].shape, own)
            self.gradients.setdefault(i, []).append(value)

    def leave(self) -> list[int]:
        """Gradients of what was given to the unit."""
        self._op = -1
        return [self._sum(values) for i, values in self.gradients.items() if values]

    def given(self, tensor: int, *, backward: bool = False) -> int:
        shape, width = self._sizes(tensor)
        parameter = self.graph.tensors[tensor].role in ("parameter", "buffer", "constant")
        value = Value(
            op=-1, backward=backward, sort="given", inputs=(), shape=shape, width=width, ops=0, parameter=parameter
        )
        self.written.values.append(value)
        if not backward:
            self.of[tensor] = len(self.written.values) - 1
        return len(self.written.values) - 1

    def _rule_name(self, index: int) -> str:
        op = self.graph.ops[index]
        name, given = operator_name(op), dict(op.attributes)
        if name == "gelu" and given.get("approximate") == "tanh":
            return "gelu_by_tanh"
        if family_of(op) == "attention" and self.device == "cpu":
            masked = len(op.inputs) > _MASK and self.graph.tensors[op.inputs[_MASK]].requires_grad
            return "attention_in_steps" if masked or given.get("dropout_p", "0.0") != "0.0" else name
        return name

    def _own_width(self, tensor: int) -> int:
        if self.graph.tensors[tensor].role == "parameter":
            return self.numbers.value_bytes
        return self.widths.of(tensor)

    def _sizes(self, tensor: int) -> tuple[Shape, int]:
        shape = tuple(extent.at(self.batch_size) for extent in self.graph.tensors[tensor].shape)
        return shape, self.widths.of(tensor)

    def _looks(self, index: int) -> bool:
        op = self.graph.ops[index]
        if not op.inputs or not op.outputs or not is_view(self.graph, op):
            return False
        return self.widths.of(op.inputs[0]) == self.widths.of(op.outputs[0])

    def _view(self, value: int, tensor: int, turn: tuple[object, ...]) -> int:
        shape = tuple(extent.at(self.batch_size) for extent in self.graph.tensors[tensor].shape)
        seen = self.written.values[value]
        return self._add("turned" if turn else "view", (value,), shape, seen.width, turn=turn)

    def _viewed_back(self, index: int, names: dict[str, int], found: dict[int, int]) -> dict[int, int]:
        op = self.graph.ops[index]
        name, source = operator_name(op), op.inputs[0]
        shape = self._sizes(source)[0]
        first = next(iter(found.values()))
        if len(op.outputs) > 1:
            return {0: self._add("cat", tuple(found.values()), shape, self.written.values[first].width)}
        if name in ("slice", "select", "narrow"):
            if self.written.values[first].elements == self.written.values[names["x0"]].elements:
                return {0: self._view(first, source, ())}
            return {0: self._add("point", (first,), shape, self.written.values[first].width, ops=4)}
        if name.startswith(("expand", "broadcast")):
            return {0: self._reduce("to", first, shape)}
        turn = (op.kind, op.attributes, 0) if name in _TURNING else ()
        if not turn and len(shape) < len(self.written.values[first].shape) and name not in _ALONGSIDE and self._turned(first):
            return {0: self._add("copy", (first,), shape, self.written.values[first].width)}
        return {0: self._view(first, source, turn)}

    def _as(self, value: int, like: int) -> int:
        while self.written.values[like].sort in VIEWS:
            given = self.written.values[like]
            if given.turn and given.turn[0] != "chunk":
                return self._add("turned", (value,), self.written.values[value].shape, self.written.values[value].width, turn=given.turn)
            like = given.inputs[0]
        return value

    def _turned(self, value: int) -> bool:
        """Whether a value is not in the order of its elements in memory."""
        turns: list[object] = []
        chain = [value]
        while self.written.values[chain[-1]].sort in VIEWS:
            chain.append(self.written.values[chain[-1]].inputs[0])
        for index in reversed(chain):
            turn = self.written.values[index].turn
            if turn and turns and turns[-1] == turn:
                turns.pop()
            elif turn:
                turns.append(turn)
        return bool(turns)

    def _names_for(self, index: int, names: dict[str, int]) -> None:
        """Stand-ins for the shapes of outputs and of what an op keeps, which no value has yet."""
        op = self.graph.ops[index]
        kept = [i for i in op.saved if self.graph.tensors[i].role == "saved"]
        self._shapes = {f"y{place}": self._sizes(i) for place, i in enumerate(op.outputs)}
        self._shapes |= {f"s{place}": self._sizes(i) for place, i in enumerate(kept)}
        if family_of(op) == "attention":
            query, key = self._sizes(op.inputs[0]), self._sizes(op.inputs[1])
            self._shapes["scores"] = ((*query[0][:-1], key[0][-2]), query[1])

    def _run(self, steps: Steps, names: dict[str, int]) -> None:
        for name, made in steps:
            value = self._make(made, names)
            if value is not None:
                names[name] = value

    def _make(self, made: Made, names: dict[str, int]) -> int | None:
        inputs = []
        for item in made.inputs:
            value = names.get(item) if isinstance(item, str) else self._make(item, names)
            if value is not None:
                inputs.append(value)
        if not inputs and made.sort not in ("fill", "several"):
            return None
        values = self.written.values
        shape, width = _broadcast([values[i] for i in inputs])
        if made.like in names:
            shape, width = values[names[made.like]].shape, values[names[made.like]].width
        elif made.like:
            if made.like not in self._shapes:
                return None
            shape, width = self._shapes[made.like]
        width = made.num_bytes or width
        first = inputs[0] if inputs else -1
        match made.sort:
            case "to":
                like = values[inputs[1]] if len(inputs) > 1 else None
                if like is None:
                    return None
                return self._reduce("to", first, like.shape)
            case "rows":
                return self._reduce("rows", first, (*values[first].shape[:-1], 1))
            case "channels":
                first_shape = values[first].shape
                return self._reduce("channels", first, (1, first_shape[1], *(1 for _ in first_shape[2:])))
            case "groups":
                shape = shape if made.like else (values[first].shape[0], 32, *(1 for _ in values[first].shape[2:]))
                return self._reduce("groups", first, shape)
            case "pixels":
                given = values[first].shape
                return self._reduce("pixels", first, (*given[:2], *(1 for _ in given[2:])))
            case "all":
                return self._reduce("all", first, ())
            case "reduced":
                return self._reduce("reduced", first, shape, width)
            case "beside":
                rank = len(values[inputs[1]].shape)
                return self._add("view", (first,), (1, values[first].elements, *(1,) * (rank - 2)), values[first].width)
            case "view" | "scatter" | "adding":
                shape, width = values[first].shape, values[first].width
                return self._add(made.sort, tuple(inputs), shape, width)
        return self._add(made.sort, tuple(inputs), shape, width, ops=made.ops, heavy=made.heavy)

    def _reduce(self, sort: str, value: int, shape: Shape, width: int = 0) -> int:
        given = self.written.values[value]
        count = 1
        for size in shape:
            count *= size
        if count == given.elements:
            return value if given.shape == shape else self._add("view", (value,), shape, given.width)
        statistic = max(given.width, _SINGLE_BYTES) if sort in ("rows", "channels", "groups", "all") else given.width
        return self._add(sort, (value,), shape, width or statistic)

    def _channels_last(self, names: dict[str, int]) -> dict[str, int]:
        """What a convolution reads, in the order that inductor gives it: what comes from outside is copied."""
        found = {}
        for name in ("x0", "x1"):
            value = self.written.values[names[name]]
            source = self._base(names[name])
            beside = all(size == 1 for size in value.shape[2:])
            if len(value.shape) == _IMAGE_DIMS and not beside and self.written.values[source].sort == "given":
                found[name] = self._ordered.setdefault(source, -1)
                if found[name] < 0:
                    found[name] = self._ordered[source] = self._add(ORDERED, (names[name],), value.shape, value.width)
        return found

    def _base(self, value: int) -> int:
        """What a value is a view, a cast or a copy of."""
        while self.written.values[value].sort in VIEWS:
            value = self.written.values[value].inputs[0]
        return value

    def _cast(self, value: int, width: int) -> int:
        if (value, width) not in self._casts:
            given = self.written.values[value]
            self._casts[value, width] = self._add("point", (value,), given.shape, width)
        return self._casts[value, width]

    def _sum(self, values: Sequence[int]) -> int:
        total = values[0]
        for other in values[1:]:
            self._op, kept = -1, self._op
            self._backward = True
            total = self._add("point", (total, other), self.written.values[total].shape, self.written.values[total].width)
            self._op = kept
        return total

    def _add(
        self,
        sort: str,
        inputs: tuple[int, ...],
        shape: Shape,
        width: int,
        ops: int = 1,
        heavy: bool = False,
        turn: tuple[object, ...] = (),
    ) -> int:
        self.written.values.append(
            Value(
                op=self._op, backward=self._backward, sort=sort, inputs=inputs, shape=shape, width=width,
                ops=ops, heavy=heavy, turn=turn,
            )
        )
        return len(self.written.values) - 1


# Views that read in another order than memory has.
# Views that only add or leave out dims of one element.
_ALONGSIDE = frozenset({"squeeze", "unsqueeze"})
_TURNING = frozenset("""transpose permute t chunk split slice select narrow unbind split_with_sizes""".split())
_UNKNOWN = ((("y0", Made(sort="extern", inputs=("x0", "x1", "x2", "x3"), like="y0")),), ())


def _needed(steps: Steps, wanted: set[str]) -> Steps:
    """The steps that the wanted gradients need."""
    kept = []
    for name, made in reversed(steps):
        if name in wanted or not name.startswith("d"):
            if not name.startswith("d") and name not in wanted:
                continue
            kept.append((name, made))
            wanted |= _names(made)
    return tuple(reversed(kept))


def _names(made: Made) -> set[str]:
    found = {made.like} if made.like else set()
    for item in made.inputs:
        found |= {item} if isinstance(item, str) else _names(item)
    return found


def _broadcast(values: Sequence[Value]) -> tuple[Shape, int]:
    """Shape and width of what is made from some values, element by element."""
    if not values:
        return (), _SINGLE_BYTES
    rank = max(len(value.shape) for value in values)
    padded = [(1,) * (rank - len(value.shape)) + value.shape for value in values]
    return tuple(max(sizes) for sizes in zip(*padded, strict=True)), max(value.width for value in values)
