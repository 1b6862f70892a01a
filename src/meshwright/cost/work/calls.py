"""One call of an operator, parsed from its key in the measurement table: inputs, attributes, needed gradients."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from meshwright.cost.work.operators import name_in, operators
from meshwright.spec.measurements import op_key
from meshwright.spec.units import DTYPE_BYTES

if TYPE_CHECKING:
    from meshwright.cost.work.operators import Family
    from meshwright.spec import Graph, Op

# The first input that is a parameter when the operator is used as a layer.
_FIRST_PARAMETER: dict[Family, int] = {"product": 1, "convolution": 1, "norm": 1, "recurrent": 3}
# Products of two values that the model computes.
_NO_PARAMETERS = frozenset({"bmm", "baddbmm", "matmul", "outer"})
_KEY = re.compile(r"(?P<kind>[^(]+)\((?P<tensors>[^;|]*)(?P<attributes>(?:;[^|]*)?)\|(?P<grads>[01]*)\)", re.DOTALL)
_FLOAT_IN_KEY = re.compile(r"(?<=[:=])(?:float64|float32|float16|bfloat16)\b")


@dataclass(frozen=True, slots=True, kw_only=True)
class OpCall:
    """The parts of a key; properties of a missing input are 0."""

    operator: str
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    attributes: dict[str, str]
    grads: tuple[bool, ...]

    def elements(self, position: int) -> int:
        """Return the elements of an input."""
        return math.prod(self.shapes[position]) if position < len(self.shapes) else 0

    def num_bytes(self, position: int) -> int:
        """Return the bytes of an input."""
        return self.elements(position) * DTYPE_BYTES[self.dtypes[position]] if position < len(self.shapes) else 0

    def numbers(self, name: str, count: int, default: int) -> list[int]:
        """Return an attribute such as ``[2, 2]``; a single number is repeated."""
        found = self.listed(name) or [default]
        return (found * count)[:count] if len(found) < count else found[:count]

    def listed(self, name: str) -> list[int]:
        """Return all integers of an attribute."""
        return [int(text) for text in re.findall(r"-?\d+", self.attributes.get(name, ""))]

    def wanted(self) -> list[int]:
        """Return the inputs that need a gradient."""
        return [place for place, flag in enumerate(self.grads) if flag]


def key_in(dtype: str, graph: Graph, op: Op, batch_size: int) -> str:
    """Return the op's key with all floating values in ``dtype``."""
    return _FLOAT_IN_KEY.sub(dtype, op_key(graph, op, batch_size))


@lru_cache(maxsize=65536)
def read_call(key: str) -> OpCall | None:
    """Return the parts of a key; None if it is not a key. Raises ValueError for unreadable sizes."""
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
    """Return the common part of keys of one op at different batch sizes: all except first sizes of non-parameters."""
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
    """Return the inputs that are parameters when the operator is used as a layer."""
    operator = operators().get(call.operator)
    if call.operator == "embedding":
        return range(1)
    if operator is None or call.operator in _NO_PARAMETERS:
        return range(0)
    return range(_FIRST_PARAMETER.get(operator.family, len(call.shapes)), len(call.shapes))
