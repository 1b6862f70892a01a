"""Traced blocks in an exported graph, and the proof that repeating one of them is right.

A region is what stands between the marks of one traced block. The two traced blocks of a group are equal if they run
the same operators on the same local numbering of values, with the same attributes inside the block and the same ones
outside. A block that reads a value from outside, beside its arguments and sizes, or whose buffers are written
elsewhere, is not repeated.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from meshwright.capture.repeats import ENTER, LEAVE, NotRepeatableError
from meshwright.capture.trace import args_of, target_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

aten = torch.ops.aten
# Larger constants made in a block are not compared by value.
_COMPARED_ELEMENTS = 64


@dataclass(frozen=True, slots=True)
class Region:
    """The nodes of one traced block, between its marks."""

    name: str
    inputs: list[fx.Node]
    outputs: list[fx.Node]
    nodes: list[fx.Node]


def find_regions(
    nodes: list[fx.Node], pairs: Sequence[tuple[str, str]], attribute: Callable[[fx.Node], tuple[str, str]]
) -> dict[str, Region]:
    """Traced blocks by name, given the two names that each repeated group traced.

    Raises NotRepeatableError unless the two are equal and can be written out again.
    """
    regions: dict[str, Region] = {}
    start: dict[str, int] = {}
    for position, node in enumerate(nodes):
        if node.target is ENTER:
            start[args_of(node)[1]] = position
        elif node.target is LEAVE:
            outputs, name = args_of(node)
            inside = [item for item in nodes[start[name] + 1 : position] if item.op == "call_function"]
            regions[name] = Region(name, list(args_of(nodes[start[name]])[0]), list(outputs), inside)
    for first, template in pairs:
        if _signature(regions[first], attribute) != _signature(regions[template], attribute):
            raise NotRepeatableError(template)
        _check_writes(nodes, regions[template], attribute)
    return regions


def _signature(region: Region, attribute: Callable[[fx.Node], tuple[str, str]]) -> list[Any]:
    """Operators with local numbering of values: equal for blocks that compute the same.

    Raises NotRepeatableError if the block reads a value from outside.
    """
    numbers: dict[fx.Node, Any] = {}
    for i, node in enumerate(region.inputs):
        numbers.setdefault(node, ("input", i))

    def describe(node: fx.Node) -> Any:
        if node in numbers:
            return numbers[node]
        if node.op == "get_attr":
            kind, name = attribute(node)
            if kind == "state":
                inside = name.startswith(region.name + ".")
                return kind, name[len(region.name) :] if inside else ("outside", name)
            held = held_by(node.graph.owning_module, target_of(node))
            return kind, _subgraph_text(held) if kind == "branch" else _constant_text(held)
        if isinstance(node.meta.get("val"), torch.Tensor) or node.op == "placeholder":
            raise NotRepeatableError(f"{region.name} reads {node.name} from outside")
        return "size", str(node.meta.get("val"))

    signature: list[Any] = []
    # A later block may use sizes that an earlier one computed. Sizes are compared by value, where they are read.
    for i, node in enumerate(node for node in region.nodes if not isinstance(node.meta.get("val"), torch.SymInt)):
        signature.append(
            (str(node.target), str(fx.node.map_arg((node.args, node.kwargs), lambda item: _Text(describe(item)))))
        )
        numbers[node] = ("node", i)
    signature.append([describe(node) for node in region.outputs])
    return signature


class _Text(str):
    """A description standing in for a node (fx maps nodes to anything)."""

    __slots__ = ()

    def __new__(cls, value: Any) -> _Text:
        return super().__new__(cls, repr(value))


def _subgraph_text(branch: fx.GraphModule) -> str:
    return re.sub(r"#.*", "", branch.code)


def _constant_text(held: Any) -> Any:
    real = getattr(held, "constant", None) if hasattr(held, "fake_mode") else held
    if not isinstance(real, torch.Tensor) or real.numel() > _COMPARED_ELEMENTS:
        return id(held)
    return str(real.dtype), tuple(real.shape), tuple(real.flatten().tolist())


def _check_writes(nodes: list[fx.Node], region: Region, attribute: Callable[[fx.Node], tuple[str, str]]) -> None:
    """A re-bound buffer of the template is written outside the block, at the graph's end: it cannot be repeated."""
    inside = set(region.nodes)
    for node in nodes:
        if node.target is aten.copy_.default and node not in inside and args_of(node)[0].op == "get_attr":
            kind, name = attribute(args_of(node)[0])
            if kind == "state" and name.startswith(region.name + "."):
                raise NotRepeatableError(name)


def held_by(module: Any, target: str) -> Any:
    """What a dotted name of a module stands for."""
    for part in target.split("."):
        module = getattr(module, part)
    return module
