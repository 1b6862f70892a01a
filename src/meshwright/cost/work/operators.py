"""Kinds of torch's operators: the table ``operators.toml``, which explains its words and names its sources."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING, Literal

from meshwright.spec.codec import decode
from meshwright.spec.parsing import read_data

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

Family = Literal["product", "convolution", "attention", "recurrent", "norm", "pointwise", "reduction", "copy", "view"]
Gradient = Literal["made", "passed", "first passed", "viewed", "joined", "filled", "none"]
Kept = Literal["first", "second", "others", "output", "made"]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkRow:
    """A row of the table: operators with the same behaviour."""

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
        """Return whether the gradient of the input at a position shares the memory of the output's."""
        if self.gradient == "viewed":
            return True
        passed = self.gradient == "passed" or (self.gradient == "first passed" and position == 0)
        return passed and input_elements == output_elements


@cache
def operators() -> dict[str, WorkRow]:
    """Return the rows by the names of their operators."""
    text = resources.files("meshwright.cost.work").joinpath("operators.toml")
    with resources.as_file(text) as path:
        rows = decode(tuple[WorkRow, ...], read_data(path)["operators"], "operators.toml")
    return {name: row for row in rows for name in row.names.split()}


def find_operator(name: str, attributes: Mapping[str, str], dtypes: Sequence[str]) -> WorkRow | None:
    """Return the row of a call's operator, or of its actual work if it is a view only in other cases.

    Such operators are dropout and conversions. ``dtypes``: those of its inputs. None if the operator is not in the
    table.
    """
    known = operators().get(name)
    if known is None or known.family != "view":
        return known
    if name == "dropout" and attributes.get("p", "0.0") != "0.0":
        return operators()["dropping"] if attributes.get("train") == "True" else known
    converted = attributes.get("dtype") or (dtypes[-1] if name == "type_as" else "")
    return operators()["converting"] if converted not in ("", dtypes[0]) else known


def name_in(kind: str) -> str:
    """Return the name in an op's kind: ``relu_`` for ``aten.relu_.default``.

    A kind without dots is returned unchanged.
    """
    parts = kind.split(".")
    return parts[1] if len(parts) > 1 else parts[0]
