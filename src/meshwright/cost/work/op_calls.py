"""Calls of operators, parsed from keys of the measurement table (`OpCall`), and properties of operators (`WorkRow`).

Inputs, attributes and needed gradients are read from the key. The properties of operators are read from the table
``operators.toml``, which explains its columns and names its sources.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib import resources
from typing import TYPE_CHECKING, Literal

from meshwright.spec import DTYPE_BYTES, Graph, Op, op_key
from meshwright.spec.codec import decode
from meshwright.spec.parsing import read_data

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


Family = Literal["product", "convolution", "attention", "recurrent", "norm", "pointwise", "reduction", "copy", "view"]
Gradient = Literal["made", "passed", "first passed", "viewed", "joined", "filled", "none"]
Kept = Literal["first", "second", "others", "output", "made"]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkRow:
    """A row of the table ``operators.toml``: operators that read, write, save and differentiate in the same way.

    ``names``: the operators, separated by spaces. The table explains the other columns.
    """

    family: Family
    names: str
    output: str = "like"
    gradient: Gradient = "made"
    keeps: tuple[Kept, ...] = ()
    makes: Literal["", "first", "output", "index"] = ""
    between: Literal["", "first"] = ""
    together: bool = False
    wants: Literal["all", "first"] = "all"
    reads: Literal["all", "none", "rows"] = "all"

    def passes_on(self, position: int, input_elements: float, output_elements: float) -> bool:
        """Return whether the gradient of the input at a position shares the memory of the output's gradient."""
        if self.gradient == "viewed":
            return True
        passed = self.gradient == "passed" or (self.gradient == "first passed" and position == 0)
        return passed and input_elements == output_elements


@cache
def operators() -> dict[str, WorkRow]:
    """Return the rows of ``operators.toml`` by operator name."""
    text = resources.files("meshwright.cost.work").joinpath("operators.toml")
    with resources.as_file(text) as path:
        rows = decode(tuple[WorkRow, ...], read_data(path)["operators"], "operators.toml")
    return {name: row for row in rows for name in row.names.split()}


def find_operator(name: str, attributes: Mapping[str, str], dtypes: Sequence[str]) -> WorkRow | None:
    """Return the row of ``operators.toml`` for a call of an operator; None if the table lacks the operator.

    Dropout and conversions are views for some arguments; if a call is not a view, the row of its actual work is
    returned. ``dtypes``: data types of the call's inputs.
    """
    known = operators().get(name)
    if known is None or known.family != "view":
        return known
    if name == "dropout" and attributes.get("p", "0.0") != "0.0":
        return operators()["dropping"] if attributes.get("train") == "True" else known
    converted = attributes.get("dtype") or (dtypes[-1] if name == "type_as" else "")
    return operators()["converting"] if converted not in ("", dtypes[0]) else known


def name_in(kind: str) -> str:
    """Return the operator name in an op's kind: ``relu_`` for ``aten.relu_.default``.

    A kind without dots is returned unchanged.
    """
    parts = kind.split(".")
    return parts[1] if len(parts) > 1 else parts[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Amount:
    """The work of one pass of an op: FLOPs, bytes and kernels.

    ``num_calls`` also counts views, which cost a call of the host but launch no kernel.
    """

    flops: float = 0.0
    num_bytes: float = 0.0
    num_kernels: int = 0
    num_views: int = 0

    @property
    def num_calls(self) -> int:
        """Number of calls of the host: kernels plus views."""
        return self.num_kernels + self.num_views


# The first input that is a parameter when the operator is used as a layer.
_FIRST_PARAMETER: dict[Family, int] = {"product": 1, "convolution": 1, "norm": 1, "recurrent": 3}
# Products of two values that the model computes.
_NO_PARAMETERS = frozenset({"bmm", "baddbmm", "matmul", "outer"})
_KEY = re.compile(r"(?P<kind>[^(]+)\((?P<tensors>[^;|]*)(?P<attributes>(?:;[^|]*)?)\|(?P<grads>[01]*)\)", re.DOTALL)
_FLOAT_IN_KEY = re.compile(r"(?<=[:=])(?:float64|float32|float16|bfloat16)\b")


@dataclass(frozen=True, slots=True, kw_only=True)
class OpCall:
    """A call of an operator, as described by its key in the measurement table.

    ``shapes``, ``dtypes``: of the inputs. ``attributes``: other arguments as text. ``grads``: whether each input needs
    a gradient.
    """

    operator: str
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    attributes: dict[str, str]
    grads: tuple[bool, ...]

    def elements(self, position: int) -> int:
        """Return the number of elements of the input at a position; 0 if the input is missing."""
        return math.prod(self.shapes[position]) if position < len(self.shapes) else 0

    def num_bytes(self, position: int) -> int:
        """Return the bytes of the input at a position; 0 if the input is missing."""
        return self.elements(position) * DTYPE_BYTES[self.dtypes[position]] if position < len(self.shapes) else 0

    def numbers(self, name: str, count: int, default: int) -> list[int]:
        """Return ``count`` integers of an attribute such as ``[2, 2]``; a single number is repeated.

        ``default``: the number for a missing attribute.
        """
        found = self.listed(name) or [default]
        return (found * count)[:count] if len(found) < count else found[:count]

    def listed(self, name: str) -> list[int]:
        """Return all integers of an attribute; [] if it is missing."""
        return [int(text) for text in re.findall(r"-?\d+", self.attributes.get(name, ""))]

    def wanted(self) -> list[int]:
        """Return the positions of the inputs that need a gradient."""
        return [place for place, flag in enumerate(self.grads) if flag]


def key_in(dtype: str, graph: Graph, op: Op, batch_size: int) -> str:
    """Return the key under which measurements of an op are stored (`op_key`), with ``dtype`` for every float type."""
    return _FLOAT_IN_KEY.sub(dtype, op_key(graph, op, batch_size))


@lru_cache(maxsize=65536)
def read_call(key: str) -> OpCall | None:
    """Return the call that a key describes; None if the text is not a key. Raises ValueError for unreadable sizes."""
    match = _KEY.fullmatch(key)
    if match is None:
        return None
    tensors = [text.partition(":") for text in match["tensors"].split(",") if text]
    if any(dtype not in DTYPE_BYTES for _, _, dtype in tensors):
        return None
    attributes = (text.partition("=") for text in match["attributes"].split(";") if text)
    return OpCall(
        operator=name_in(match["kind"]),
        shapes=tuple(tuple(int(size) for size in sizes.split("x") if size) for sizes, _, _ in tensors),
        dtypes=tuple(dtype for _, _, dtype in tensors),
        attributes={name: value for name, _, value in attributes},
        grads=tuple(flag == "1" for flag in match["grads"]),
    )


@lru_cache(maxsize=65536)
def relatives(key: str) -> str:
    """Return a text that is equal for the keys of one op at all batch sizes.

    It has all parts of the key except the first sizes of inputs that are not parameters.
    """
    call = read_call(key)
    if call is None:
        return key
    operator = operators().get(call.operator)
    held = parameter_places(call)
    cut = 2 if operator is not None and operator.family == "recurrent" else 1  # its states are (layers, batch, width)
    kept = [shape if i in held else shape[cut:] for i, shape in enumerate(call.shapes)]
    attributes = dict(call.attributes)
    if "size" in attributes:
        attributes["size"] = str(attributes["size"].count(","))  # which of its numbers is the batch, no key says
    return f"{call.operator}({kept};{sorted(attributes.items())}|{call.grads})"


def parameter_places(call: OpCall) -> range:
    """Return the positions of the inputs that are parameters when the operator is used as a layer."""
    operator = operators().get(call.operator)
    if call.operator == "embedding":
        return range(1)
    if operator is None or call.operator in _NO_PARAMETERS:
        return range(0)
    return range(_FIRST_PARAMETER.get(operator.family, len(call.shapes)), len(call.shapes))
