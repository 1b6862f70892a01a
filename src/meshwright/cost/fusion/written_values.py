"""The decomposition of a compiled unit (`write_unit`): the values that its ops make in order, forward and backward.

A value is a tensor inside the unit. `Maker` makes the values of one operator by its rule in the table ``rules.toml``
(`fusion_rules`). As in autograd, the backward visits the ops in reverse order and adds the gradients of tensors with
several readers. The casts of autocast are values, too. An operator without a rule is one kernel in the forward and one
in the backward; each makes all outputs.
"""

from __future__ import annotations

import ast
import math
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING, Literal

from meshwright.cost.autocast import Widths, cast_inputs, compute_type
from meshwright.cost.traits import family_of, is_view, operator_name
from meshwright.spec import DTYPE_BYTES, FLOAT_DTYPES, Graph, Op
from meshwright.spec.codec import decode
from meshwright.spec.parsing import read_data

if TYPE_CHECKING:
    from collections.abc import Sequence

    from meshwright.spec.precision import Numbers


Shape = tuple[int, ...]
Device = Literal["cuda", "cpu"]
# The order in which a view reads memory; empty if it is the memory's own order.
Turn = tuple[object, ...]

# The sorts of values, as named in the table of rules; "given" comes from outside.
VIEWS = frozenset({"view", "turned"})
REDUCTIONS = frozenset({"rows", "channels", "groups", "pixels", "all", "to", "reduced"})
EXTERNS = frozenset({"extern", "several", "random", "part"})
# A copy in another order that autograd does not see: the copy is kept instead of the input.
ORDERED = "ordered"
# Tensors of images, which inductor keeps with channels last.
IMAGE_DIMS = 4


@dataclass(slots=True, kw_only=True, eq=False)
class FusedValue:
    """One tensor inside a compiled unit, and how it is made.

    ``op``: index of the op that makes the value, -1 for inputs and for sums of gradients; ``backward``: whether the
    op's backward makes it. ``sort``: the kind of computation, as in the rules, such as "point" or "rows". ``inputs``:
    indices of the values from which it is made. ``width``: bytes per element. ``ops``: operations per element.
    ``heavy``: costly operations, which are not repeated on CPUs. ``turn``: for a view, the order in which it reads
    memory. ``parameter``: whether it is a parameter, buffer or constant.
    """

    op: int
    backward: bool
    sort: str
    inputs: tuple[int, ...]
    shape: Shape
    width: int
    ops: int = 1
    heavy: bool = False
    turn: Turn = ()
    parameter: bool = False

    @property
    def elements(self) -> int:
        """Number of elements of the value."""
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """Number of bytes of the value."""
        return self.elements * self.width


@dataclass(slots=True, kw_only=True, eq=False)
class Written:
    """The values of a compiled unit, in an order in which each value is made from earlier ones.

    The first ``num_forward`` values are those of the forward. ``forward_yields``, ``backward_yields``: indices of the
    values that are needed after the forward and after the backward.
    """

    values: list[FusedValue] = field(default_factory=list)
    num_forward: int = 0
    forward_yields: list[int] = field(default_factory=list)
    backward_yields: list[int] = field(default_factory=list)

    def is_late(self) -> list[bool]:
        """Return, for every value, whether it depends on a gradient that is passed into the unit."""
        late: list[bool] = []
        for value in self.values:
            given = value.sort == "given" and value.backward
            late.append(given or any(late[i] for i in value.inputs))
        return late


@dataclass(frozen=True, slots=True, kw_only=True)
class FusionRule:
    """One rule of ``rules.toml``: operator ``names``, separated by spaces, and their values as assignments (text).

    An empty ``backward`` has no values.
    """

    names: str
    forward: str
    backward: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleValue:
    """One value in a rule of ``rules.toml``.

    ``inputs``: names of values, or nested values without a name. ``like``: name of the value or tensor whose shape and
    type it has, "" for none. ``ops``: operations per element. ``num_bytes``: bytes per element, 0 for those of the
    inputs. ``heavy``: costly operations, which are not repeated on CPUs.
    """

    sort: str
    inputs: tuple[str | RuleValue, ...]
    like: str = ""
    ops: int = 1
    num_bytes: int = 0
    heavy: bool = False


Steps = tuple[tuple[str, RuleValue], ...]


@cache
def fusion_rules() -> dict[str, tuple[Steps, Steps]]:
    """Return the rules of ``rules.toml`` by operator name: the values of its forward, and those of its backward.

    A rule is the decomposition of the operator that torch applies before fusion. Its values are pairs (name, value) in
    the order in which they are made.
    """
    with resources.as_file(resources.files("meshwright.cost.fusion") / "rules.toml") as path:
        rows = decode(tuple[FusionRule, ...], read_data(path)["rules"], path.name)
    return {name: (_steps(row.forward), _steps(row.backward)) for row in rows for name in row.names.split()}


def _steps(text: str) -> Steps:
    return tuple(
        (line.targets[0].id, _made(line.value))
        for line in ast.parse(text).body
        if isinstance(line, ast.Assign) and isinstance(line.targets[0], ast.Name)
    )


def _made(node: ast.expr) -> RuleValue:
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
        raise TypeError(
            f"A rule of cost/fusion/rules.toml contains {ast.unparse(node)!r}; expected a value such as point(x0, x1)."
        )
    options = {word.arg: word.value for word in node.keywords}
    like, number = options.get("like"), {key: ast.literal_eval(options[key]) for key in options if key != "like"}
    return RuleValue(
        sort=node.func.id,
        inputs=tuple(item.id if isinstance(item, ast.Name) else _made(item) for item in node.args),
        like=like.id if isinstance(like, ast.Name) else "",
        ops=number.get("ops", 1),
        num_bytes=number.get("bytes", 0),
        heavy=bool(number.get("heavy", 0)),
    )


# Sums of statistics are float32 whatever the type of their input.
_STATISTICS = frozenset({"rows", "channels", "groups", "all"})
_SINGLE_BYTES = 4
# The number of groups of channels in a group norm (its default in diffusion models).
_GROUPS = 32
# Rules use these sorts for values with the shape of their first input.
_OF_FIRST = frozenset({"scatter", "adding"})


class Maker:
    """A collector of a unit's values: it applies the rule of an op's forward or backward and appends the values."""

    def __init__(self) -> None:
        self.values: list[FusedValue] = []
        self.op, self.backward = -1, False
        # Shapes and widths that rules name before a value exists: outputs, and what an op keeps.
        self.shapes: dict[str, tuple[Shape, int]] = {}

    def run(self, steps: Steps, names: dict[str, int]) -> None:
        """Make the values of a rule and add them to ``names`` (name to index); skip values whose inputs are missing."""
        for name, made in steps:
            value = self._make(made, names)
            if value is not None:
                names[name] = value
                if name in self.shapes and self.values[value].op == self.op:
                    self.values[value].width = self.shapes[name][1]

    def _make(self, made: RuleValue, names: dict[str, int]) -> int | None:
        found = [names.get(item) if isinstance(item, str) else self._make(item, names) for item in made.inputs]
        inputs = tuple(value for value in found if value is not None)
        if (not inputs and made.sort != "fill") or (made.like and made.like not in names.keys() | self.shapes.keys()):
            return None
        if made.sort in ("to", "beside") and len(inputs) < len(made.inputs):
            return None
        shape, width = self._sizes(made, inputs, names)
        if made.sort in REDUCTIONS:
            return self.reduce(made.sort, inputs[0], shape, width if made.sort == "reduced" else 0)
        sort = "view" if made.sort in ("beside", "spread") else made.sort
        return self.add(sort, inputs, shape, width, ops=made.ops, heavy=made.heavy)

    def _sizes(self, made: RuleValue, inputs: Sequence[int], names: dict[str, int]) -> tuple[Shape, int]:
        """Return the shape and width of a rule's value."""
        given = [self.values[i] for i in inputs]
        if made.sort == "to":
            return given[1].shape, given[0].width
        if made.sort == "beside":
            return (1, given[0].elements, *(1 for _ in given[1].shape[2:])), given[0].width
        if made.sort in _OF_FIRST:
            return given[0].shape, given[0].width
        shape, width = _broadcast(given)
        if made.sort in REDUCTIONS:
            shape = _summed_to(made.sort, given[0].shape)
        if made.like:
            like = self.values[names[made.like]] if made.like in names else None
            shape, width = (like.shape, like.width) if like is not None else self.shapes[made.like]
        elif made.sort == "view":
            shape = given[0].shape
        return shape, made.num_bytes or width

    def reduce(self, sort: str, value: int, shape: Shape, width: int = 0) -> int:
        """Return the index of ``value`` summed to a shape; if the numbers of elements are equal, of itself or a view.

        ``width``: bytes per element of the sum; 0 for those that torch uses.
        """
        given = self.values[value]
        if math.prod(shape) == given.elements:
            return value if given.shape == shape else self.add("view", (value,), shape, given.width)
        statistic = max(given.width, _SINGLE_BYTES) if sort in _STATISTICS else given.width
        return self.add(sort, (value,), shape, width or statistic)

    def add(
        self,
        sort: str,
        inputs: tuple[int, ...],
        shape: Shape,
        width: int,
        *,
        ops: int = 1,
        heavy: bool = False,
        turn: Turn = (),
    ) -> int:
        """Append a value, made by the current op (``self.op``, ``self.backward``), and return its index."""
        value = FusedValue(
            op=self.op,
            backward=self.backward,
            sort=sort,
            inputs=inputs,
            shape=shape,
            width=width,
            ops=ops,
            heavy=heavy,
            turn=turn,
        )
        self.values.append(value)
        return len(self.values) - 1

    def as_wide(self, value: int, width: int) -> int:
        """Return the index of the value with elements of ``width`` bytes: itself, or a converted copy."""
        given = self.values[value]
        return value if given.width == width else self.add("point", (value,), given.shape, width)

    def view(self, value: int, shape: Shape, turn: Turn = ()) -> int:
        """Append a view of a value and return its index; ``turn``: its order, if it differs from the memory order."""
        return self.add("turned" if turn else "view", (value,), shape, self.values[value].width, turn=turn)

    def turns_of(self, value: int) -> list[Turn]:
        """Return the changes of order (turns) of the views on which a value is based; equal neighbours cancel out."""
        chain = [value]
        while self.values[chain[-1]].sort in VIEWS:
            chain.append(self.values[chain[-1]].inputs[0])
        turns: list[Turn] = []
        for index in reversed(chain):
            turn = self.values[index].turn
            if turn and turns and turns[-1] == turn:
                turns.pop()
            elif turn:
                turns.append(turn)
        return turns

    def base(self, value: int) -> int:
        """Return the index of the value that a view, or a view of a view, is based on; for other values, itself."""
        while self.values[value].sort in VIEWS:
            value = self.values[value].inputs[0]
        return value


def _summed_to(sort: str, shape: Shape) -> Shape:
    """Return the shape after a sum of a sort."""
    beside = (1,) * (len(shape) - 2)
    match sort:
        case "rows":
            return (*shape[:-1], 1)
        case "channels":
            return (1, shape[1], *beside)
        case "groups":
            return (shape[0], min(_GROUPS, shape[1]), *beside)
        case "pixels":
            return (*shape[:2], *beside)
        case _:
            return ()


def _broadcast(values: Sequence[FusedValue]) -> tuple[Shape, int]:
    """Return the shape and width of an element-wise result of some values."""
    if not values:
        return (), _SINGLE_BYTES
    rank = max(len(value.shape) for value in values)
    padded = [(1,) * (rank - len(value.shape)) + value.shape for value in values]
    # Among floats, int64 indices do not widen the result.
    widths = [value.width for value in values]
    narrow = [width for width in widths if width <= _SINGLE_BYTES]
    return tuple(max(sizes) for sizes in zip(*padded, strict=True)), max(narrow or widths)


# The input of attention that holds its mask.
_MASK = 3
# Views that read in another order than memory has; parts of a tensor; views that add or drop dims of one element.
_TURNING = frozenset(["transpose", "permute", "t", "chunk", "split", "slice", "select", "narrow", "unbind"])
_PARTS = frozenset(["slice", "select", "narrow"])
_ALONGSIDE = frozenset(["squeeze", "unsqueeze"])
_JOINING = frozenset(["cat", "stack"])
# Operators that copy if they cannot return a view.
_RESHAPING = frozenset(["flatten", "reshape", "view", "transpose", "permute"])
# The number of operations per element for writing a part into zeros.
_PUT_OPS = 4


def write_unit(
    graph: Graph,
    start: int,
    stop: int,
    batch_size: int,
    numbers: Numbers,
    widths: Widths,
    later: frozenset[int],
    device: Device = "cuda",
) -> Written:
    """Return the values of the ops ``start:stop``, compiled together for a device.

    ``later``: ids of tensors made by these ops that ops after ``stop`` or the graph's outputs need.
    """
    writer = _Writer(graph, batch_size, numbers, widths, device)
    for op in range(start, stop):
        writer.forward(op)
    num_forward = len(writer.values)
    left = [i for op in graph.ops[start:stop] for i in op.outputs if i in later]
    changed = [op for op in graph.ops[start:stop] if op.is_in_place and graph.tensors[op.inputs[0]].role == "buffer"]
    yields = [writer.of[i] for i in (*left, *(op.outputs[0] for op in changed))]
    backward_yields: list[int] = []
    if graph.mode == "training":
        for i in left:
            if graph.tensors[i].requires_grad:
                writer.gradients[i] = [writer.given(i, backward=True)]
        for op in reversed(range(start, stop)):
            writer.run_backward(op)
        backward_yields = writer.leave()
    return Written(
        values=writer.values,
        num_forward=num_forward,
        forward_yields=[*yields, *writer.updated],
        backward_yields=backward_yields,
    )


class _Writer(Maker):
    """The decomposition in progress.

    ``of``: the value of each tensor; ``gradients``: of each tensor so far; ``updated``: buffers that ops write.
    """

    def __init__(self, graph: Graph, batch_size: int, numbers: Numbers, widths: Widths, device: Device) -> None:
        super().__init__()
        self.graph, self.batch_size, self.numbers, self.widths = graph, batch_size, numbers, widths
        self.device = device
        self.of: dict[int, int] = {}
        self.gradients: dict[int, list[int]] = {}
        self.updated: list[int] = []
        self._inner: dict[int, dict[str, int]] = {}
        self._copies: dict[tuple[str, int], int] = {}

    def forward(self, index: int) -> None:
        """Append the values of an op's forward."""
        op = self.graph.ops[index]
        self.op, self.backward = index, False
        names = self._inner[index] = self._inputs(op)
        name = operator_name(op)
        if self._looks(op):
            for place, i in enumerate(op.outputs):
                names[f"y{place}"] = self.view(names["x0"], self._sizes_of(i)[0], self._turn(op, place))
        elif name in _JOINING:
            parts = tuple(names[f"x{place}"] for place in range(len(op.inputs)))
            names["y0"] = self.add("cat", parts, *self._sizes_of(op.outputs[0]))
        else:
            self._name_shapes(op)
            rules, rule = fusion_rules(), self._rule_name(op)
            alone = (("y0", RuleValue(sort="extern", inputs=tuple(names), like="y0")),)
            self.run(rules[rule][0] if rule in rules else alone, names)
        for place, i in enumerate(op.outputs):
            if f"y{place}" not in names:
                names[f"y{place}"] = self.add("view", (names["y0"],), *self._sizes_of(i))
            self.of[i] = names[f"y{place}"]
        self.updated += [names[name] for name in ("u3", "u4") if name in names]

    def run_backward(self, index: int) -> None:
        """Append the values of an op's backward, if an output has a gradient and an input needs one."""
        op = self.graph.ops[index]
        found = {place: self._sum(self.gradients.pop(i)) for place, i in enumerate(op.outputs) if i in self.gradients}
        wanted = [place for place, i in enumerate(op.inputs) if self.graph.tensors[i].requires_grad]
        if not found or not wanted:
            return
        self.op, self.backward = index, True
        names = {**self._inner[index], **{f"g{place}": value for place, value in found.items()}}
        name = operator_name(op)
        if self._looks(op):
            made = {0: self._view_backward(op, names, found)}
        elif name in _JOINING:
            made = {
                place: self.view(names["g0"], self._sizes_of(op.inputs[place])[0], (name, place)) for place in wanted
            }
        elif name in _RESHAPING:
            made = {0: self.view(names["g0"], self._sizes_of(op.inputs[0])[0], (name,) if name in _TURNING else ())}
        else:
            made = self._by_rule(op, names, wanted)
        for place, value in made.items():
            i = op.inputs[place]
            floating = self.graph.tensors[i].dtype in FLOAT_DTYPES
            own = self.as_wide(value, self._gradient_width(i)) if floating else value
            self.gradients.setdefault(i, []).append(own)

    def leave(self) -> list[int]:
        """Return the indices of the gradients of the unit's inputs."""
        return [self._sum(values) for values in self.gradients.values()]

    def given(self, tensor: int, *, backward: bool = False) -> int:
        """Append a tensor, or its gradient, that is passed into the unit, and return its index."""
        shape, width = self._sizes_of(tensor)
        held = self.graph.tensors[tensor].role in ("parameter", "buffer", "constant")
        self.values.append(
            FusedValue(
                op=-1, backward=backward, sort="given", inputs=(), shape=shape, width=width, ops=0, parameter=held
            )
        )
        return len(self.values) - 1

    def _inputs(self, op: Op) -> dict[str, int]:
        """Return the inputs of an op, in the types and orders in which it reads them."""
        lower = self.numbers.autocast
        casts = cast_inputs(self.graph, op, lower) if lower else []
        names = {}
        for place, i in enumerate(op.inputs):
            if i not in self.of:
                self.of[i] = self.given(i)
            value = self.of[i]
            if i in casts:
                value = self._copied("cast", value, DTYPE_BYTES[compute_type(self.graph, op, lower)])
            if family_of(op) == "convolution" and self._in_another_order(value):
                value = self._copied(ORDERED, value, self.values[value].width)
            names[f"x{place}"] = value
        return names

    def _in_another_order(self, value: int) -> bool:
        """Return whether a convolution's input comes from outside, with its channels not last."""
        shape, source = self.values[value].shape, self.values[self.base(value)]
        return len(shape) == IMAGE_DIMS and any(size > 1 for size in shape[2:]) and source.sort == "given"

    def _copied(self, sort: str, value: int, width: int) -> int:
        """Return a copy of an op's input, which all readers of this kind share."""
        key = (sort, value)
        if key not in self._copies:
            made = "point" if sort == "cast" else sort
            self._copies[key] = self.add(made, (value,), self.values[value].shape, width)
        return self._copies[key]

    def _rule_name(self, op: Op) -> str:
        name, given = operator_name(op), dict(op.attributes)
        if name in _RESHAPING:
            return "contiguous"
        if name == "gelu" and given.get("approximate") == "tanh":
            return "gelu_by_tanh"
        if family_of(op) == "attention" and self.device == "cpu":
            masked = len(op.inputs) > _MASK and self.graph.tensors[op.inputs[_MASK]].requires_grad
            dropped = given.get("dropout_p", "0.0") != "0.0"
            return "attention_in_steps" if masked or dropped else "attention_on_processors"
        return name

    def _by_rule(self, op: Op, names: dict[str, int], wanted: list[int]) -> dict[int, int]:
        """Return the gradients of an op's inputs by place."""
        rules, rule = fusion_rules(), self._rule_name(op)
        if rule in rules:
            steps = _needed(rules[rule][1], {f"d{place}" for place in wanted})
        else:
            read = tuple(name for name in names if name[0] in "xg")
            parts = [(f"d{place}", RuleValue(sort="part", inputs=("e",), like=f"x{place}")) for place in wanted]
            steps = (("e", RuleValue(sort="several", inputs=read)), *parts)
        self._name_shapes(op)
        self.run(steps, names)
        made = {place: names[f"d{place}"] for place in wanted if f"d{place}" in names}
        if family_of(op) == "attention":
            # Gradients have the memory order of their tensors.
            for place, value in made.items():
                turns = [turn for turn in self.turns_of(names[f"x{place}"]) if turn[0] != "chunk"]
                made[place] = self.view(value, self.values[value].shape, turns[-1]) if turns else value
        return made

    def _view_backward(self, op: Op, names: dict[str, int], found: dict[int, int]) -> int:
        """Return the gradient of a view's input."""
        name, shape = operator_name(op), self._sizes_of(op.inputs[0])[0]
        first = next(iter(found.values()))
        value = self.values[first]
        if len(op.outputs) > 1:
            return self.add("cat", tuple(found.values()), shape, value.width)
        if name in _PARTS and value.elements < self.values[names["x0"]].elements:
            return self.add("point", (first,), shape, value.width, ops=_PUT_OPS)
        if name.startswith(("expand", "broadcast")):
            return self.reduce("to", first, shape)
        turn = () if name in _PARTS else self._turn(op, 0)
        merges = not turn and len(shape) < len(value.shape) and name not in _ALONGSIDE
        if merges and self.turns_of(first):
            return self.add("copy", (first,), shape, value.width)
        return self.view(first, shape, turn)

    def _turn(self, op: Op, place: int) -> Turn:
        name = operator_name(op)
        return (name, op.attributes, place) if name in _TURNING else ()

    def _looks(self, op: Op) -> bool:
        """Return whether an op makes a view with the type of its input."""
        if not op.inputs or not op.outputs or not is_view(self.graph, op):
            return False
        return self.widths.of(op.inputs[0]) == self.widths.of(op.outputs[0])

    def _gradient_width(self, tensor: int) -> int:
        """Return the bytes of an element of a gradient; a parameter's gradient is widened after the unit."""
        is_parameter = self.graph.tensors[tensor].role == "parameter"
        return self.numbers.value_bytes if is_parameter else self.widths.of(tensor)

    def _sizes_of(self, tensor: int) -> tuple[Shape, int]:
        shape = tuple(extent.at(self.batch_size) for extent in self.graph.tensors[tensor].shape)
        return shape, self.widths.of(tensor)

    def _name_shapes(self, op: Op) -> None:
        kept = [i for i in op.saved if self.graph.tensors[i].role == "saved"]
        self.shapes = {f"y{place}": self._sizes_of(i) for place, i in enumerate(op.outputs)}
        self.shapes |= {f"s{place}": self._sizes_of(i) for place, i in enumerate(kept)}
        if family_of(op) == "attention":
            query, key = self._sizes_of(op.inputs[0]), self._sizes_of(op.inputs[1])
            self.shapes["scores"] = ((*query[0][:-1], key[0][-2]), query[1])

    def _sum(self, values: list[int]) -> int:
        """Return the sum of gradients, which belongs to no op."""
        op, self.op, self.backward = self.op, -1, True
        total = values[0]
        for other in values[1:]:
            total = self.add("point", (total, other), self.values[total].shape, self.values[total].width)
        self.op = op
        return total


def _needed(steps: Steps, wanted: set[str]) -> Steps:
    """Return the steps that the wanted gradients need."""
    kept = []
    for name, made in reversed(steps):
        if name in wanted:
            kept.append((name, made))
            wanted |= _names(made)
    return tuple(reversed(kept))


def _names(made: RuleValue) -> set[str]:
    found = {made.like} if made.like else set()
    for item in made.inputs:
        found |= {item} if isinstance(item, str) else _names(item)
    return found
