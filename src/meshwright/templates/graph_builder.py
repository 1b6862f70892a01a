"""Build a graph for training op by op (`GraphBuilder`), equal to the graph that capture makes of the same module.

The tensors of the graph are in capture's order: inputs, parameters, buffers, then outputs of ops. A shape is a tuple of
whole numbers and `Extent`s; ``B`` is the symbolic batch size.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

from meshwright.spec import FLOAT_DTYPES, Extent, Graph, Layer, Op, Tensor
from meshwright.spec.blocks import block_signature
from meshwright.spec.graph import Role

B = Extent(0, 1)
Size = int | Extent
Shape = Sequence[Size]
_GROUPS: tuple[Role, ...] = ("input", "parameter", "buffer")


class Internal(NamedTuple):
    """A value that an op computes and saves only for its own backward, such as the statistics of a norm."""

    shape: Shape
    dtype: str = "float32"


class OwnOutput(NamedTuple):
    """The op's own output number ``place``, saved for its backward."""

    place: int = 0


Saved = int | Internal | OwnOutput


@dataclass(slots=True, kw_only=True)
class _Value:
    name: str
    shape: tuple[Extent, ...]
    dtype: str
    role: Role
    storage: int
    requires_grad: bool
    aliases: tuple[str, ...] = ()


@dataclass(slots=True)
class GraphBuilder:
    """A graph under construction; methods take and return values (tensors) by their numbers."""

    _values: list[_Value] = field(default_factory=list)
    _ops: list[Op] = field(default_factory=list)
    _layers: list[tuple[str, int]] = field(default_factory=list)
    _names: Counter[str] = field(default_factory=Counter)
    _replicable: set[int] = field(default_factory=set)
    _module: str = ""

    def input(self, name: str, *shape: Size, dtype: str = "int64") -> int:
        """Add an input of the model, or a target of its loss; return its number."""
        return self._add(name, shape, dtype, "input")

    def parameter(self, name: str, *shape: Size) -> int:
        """Add a trainable float32 parameter of the current module; return its number."""
        return self._add(self._path(name), shape, "float32", "parameter", requires_grad=True)

    def buffer(self, name: str, *shape: Size, dtype: str = "float32") -> int:
        """Add a buffer of the current module; return its number."""
        return self._add(self._path(name), shape, dtype, "buffer")

    def tie(self, parameter: int, name: str) -> int:
        """Add another name, in the current module, of a parameter (tied weights); return the parameter's number."""
        self._values[parameter].aliases += (self._path(name),)
        return parameter

    def layer(self, name: str) -> None:
        """Begin a layer; all ops that are added from now on belong to it."""
        self._layers.append((name, len(self._ops)))

    @contextmanager
    def within(self, module: str) -> Iterator[None]:
        """Context in which added parameters, buffers and ops belong to submodule ``module`` of the current module."""
        outer, self._module = self._module, self._path(module)
        try:
            yield
        finally:
            self._module = outer

    def shape(self, value: int) -> tuple[Extent, ...]:
        """Return the shape of a value."""
        return self._values[value].shape

    def width(self, value: int) -> int:
        """Return the size of the last dim of a value."""
        return self._values[value].shape[-1].fixed

    def requires_grad(self, value: int) -> bool:
        """Return whether a value gets a gradient in training."""
        return self._values[value].requires_grad

    def op(
        self,
        kind: str,
        inputs: Sequence[int],
        *shapes: Shape,
        dtypes: Sequence[str] = (),
        attributes: Mapping[str, object] | None = None,
        saved: Sequence[Saved] = (),
        view: bool = False,
        flops: Extent | None = None,
        backward_flops: Extent | None = None,
        random: bool = False,
        detached: bool = False,
    ) -> tuple[int, ...]:
        """Add an op with one output per shape; return the numbers of the outputs.

        ``kind``: its name in torch, such as "aten.mul.Tensor". ``dtypes``: those of the outputs, by default that of the
        first input. ``saved``: what its backward reads. ``view``: outputs share the memory of the first input.
        ``random``: it draws random numbers. ``detached``: it has no backward, even if its inputs have gradients.
        """
        values = self._values
        name = kind.split(".")[1]
        name = f"{name}_{self._names[name]}"
        self._names[kind.split(".")[1]] += 1
        wants = not detached and any(values[i].requires_grad for i in inputs)
        replicable = not random and self._replicable.issuperset(inputs)
        outputs = []
        for index, shape in enumerate(shapes):
            dtype = dtypes[index] if dtypes else values[inputs[0]].dtype
            number = self._add(
                name if len(shapes) == 1 else f"{name}:{index}",
                shape,
                dtype,
                "activation",
                storage=values[inputs[0]].storage if view else None,
                requires_grad=wants and dtype in FLOAT_DTYPES,
            )
            outputs.append(number)
        if replicable:
            self._replicable.update(outputs)
        self._ops.append(
            Op(
                name=name,
                kind=kind,
                inputs=tuple(inputs),
                outputs=tuple(outputs),
                attributes=tuple((key, str(value)) for key, value in (attributes or {}).items()),
                flops=flops or Extent(),
                backward_flops=backward_flops or Extent(),
                saved=self._keep(name, saved, outputs),
                random=random,
                replicable=replicable,
                module=self._module,
            )
        )
        return tuple(outputs)

    def finish(self, name: str, loss: int) -> Graph:
        """Return the finished graph, whose only output is the value ``loss``."""
        order = sorted(range(len(self._values)), key=self._group)
        place = {old: new for new, old in enumerate(order)}
        tensors = tuple(
            Tensor(
                name=value.name,
                shape=value.shape,
                dtype=value.dtype,
                role=value.role,
                storage=place[value.storage],
                requires_grad=value.requires_grad,
                aliases=value.aliases,
            )
            for value in (self._values[old] for old in order)
        )
        ops = tuple(_renumbered(op, place) for op in self._ops)
        stops = [start for _, start in self._layers[1:]] + [len(ops)]
        return Graph(
            name=name,
            tensors=tensors,
            ops=ops,
            layers=tuple(
                Layer(name=layer, start=start, stop=stop, block=block_signature(ops, tensors, start, stop))
                for (layer, start), stop in zip(self._layers, stops, strict=True)
            ),
            inputs=tuple(i for i, tensor in enumerate(tensors) if tensor.role == "input"),
            outputs=(place[loss],),
            has_loss=True,
        )

    def _group(self, number: int) -> int:
        role = self._values[number].role
        return _GROUPS.index(role) if role in _GROUPS else len(_GROUPS)

    def _path(self, name: str) -> str:
        return f"{self._module}.{name}" if self._module else name

    def _add(
        self,
        name: str,
        shape: Shape,
        dtype: str,
        role: Role,
        *,
        storage: int | None = None,
        requires_grad: bool = False,
    ) -> int:
        number = len(self._values)
        self._values.append(
            _Value(
                name=name,
                shape=tuple(size if isinstance(size, Extent) else Extent(size) for size in shape),
                dtype=dtype,
                role=role,
                storage=number if storage is None else storage,
                requires_grad=requires_grad,
            )
        )
        return number

    def _keep(self, name: str, saved: Sequence[Saved], outputs: Sequence[int]) -> tuple[int, ...]:
        kept, count = [], 0
        for item in saved:
            if isinstance(item, Internal):
                kept.append(self._add(f"{name}.saved{count}", item.shape, item.dtype, "saved"))
                count += 1
            else:
                kept.append(outputs[item.place] if isinstance(item, OwnOutput) else item)
        return tuple(kept)


def _renumbered(op: Op, place: Mapping[int, int]) -> Op:
    return Op(
        name=op.name,
        kind=op.kind,
        inputs=tuple(place[i] for i in op.inputs),
        outputs=tuple(place[i] for i in op.outputs),
        attributes=op.attributes,
        flops=op.flops,
        backward_flops=op.backward_flops,
        saved=tuple(place[i] for i in op.saved),
        random=op.random,
        replicable=op.replicable,
        module=op.module,
    )


def times(*sizes: Size) -> Extent:
    """Return the product of sizes; at most one of them may depend on the batch size."""
    found = Extent(1)
    for size in sizes:
        other = size if isinstance(size, Extent) else Extent(size)
        assert not (found.per_sample and other.per_sample), "a size is affine in the batch"
        found = Extent(found.fixed * other.fixed, found.fixed * other.per_sample + found.per_sample * other.fixed)
    return found
