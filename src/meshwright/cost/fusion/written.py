"""Decompose a unit: the values that its ops make one after the other, forward and backward.

Autograd runs backwards in the reverse order of the ops and adds the gradients of tensors with several readers. Casts of
autocast are values like others. An operator without a rule is one kernel per pass, which makes all outputs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from meshwright.cost.autocast import cast_inputs, compute_type
from meshwright.cost.fusion.making import Maker
from meshwright.cost.fusion.rules import RuleValue, fusion_rules
from meshwright.cost.fusion.values import IMAGE_DIMS, ORDERED, FusedValue, Written
from meshwright.cost.traits import family_of, is_view, operator_name
from meshwright.spec.units import DTYPE_BYTES, FLOAT_DTYPES

if TYPE_CHECKING:
    from meshwright.cost.fusion.rules import Steps
    from meshwright.cost.fusion.values import Device, Shape, Turn
    from meshwright.cost.widths import Widths
    from meshwright.spec import Graph, Op
    from meshwright.spec.precision import Numbers

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
    """Return the decomposition of ops ``start:stop``; ``later``: their tensors that other ops read."""
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
        """Decompose the forward of an op."""
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
        """Decompose the backward of an op, if it receives a gradient and an input needs one."""
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
        """Return the gradients of the unit's inputs."""
        return [self._sum(values) for values in self.gradients.values()]

    def given(self, tensor: int, *, backward: bool = False) -> int:
        """Add a tensor, or its gradient, that comes from outside."""
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
