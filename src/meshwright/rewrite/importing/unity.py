"""Read Unity's rules: linear, concat, split, ReLU, add, mul and its four parallel operators.

The file (flexflow/FlexFlow, ``substitutions/graph_subst_3_v2.json``) does not define its operators. The following
reading makes nearly all of its equalities true. Tensors have three dims: replicas, rows, features.

* `replicate`, `partition`, `combine` and `reduce` as in `operators.parallel`: replicas are adjacent, shards are summed;
* a linear layer's weight is (replicas, out features, in features). The layer reads only replica 0 of input and weight,
  as if all replicas were copies. Where they are not copies (a concat of different tensors along dim 0), the other
  replicas are ignored.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from meshwright.rewrite.calculus import Arithmetic, Indexed
from meshwright.rewrite.expressions import Call, Expression, Formula, names_of
from meshwright.rewrite.importing.records import Record, term
from meshwright.rewrite.operators import operator
from meshwright.rewrite.rules import Rule
from meshwright.spec import RewriteError

_MOST_BYTES = 64 * 2**20
_DIMS = 3
_RELU = 2
_PARALLEL = {"OP_PARTITION": "partition", "OP_COMBINE": "combine", "OP_REPLICATE": "replicate", "OP_REDUCE": "reduce"}
_PLAIN = {"OP_EW_ADD": "add", "OP_EW_MUL": "mul", "OP_RELU": "relu"}


@operator
def linear_of_copies(a: Arithmetic, x: Indexed, weight: Indexed) -> Indexed:
    """Return Unity's linear layer, which reads only replica 0 of both operands.

    x: (replicas, rows, in); weight: (replicas, out, in); result: (1, rows, out).
    """
    a.same(x.rank, _DIMS, "dims of a linear layer's input")
    a.same(weight.rank, _DIMS, "dims of a linear layer's weight")
    a.same(x.shape[2], weight.shape[2], "inner sizes of a linear layer")
    return Indexed(
        (1, x.shape[1], weight.shape[1]),
        lambda _, m, n: a.total(x.shape[2], lambda k: x[(0, m, k)] * weight[(0, n, k)]),
    )


def read_unity(path: str | Path) -> list[Rule]:
    """Return the rules of Unity's JSON file. Raises RewriteError if it is not a rule file of Unity or is damaged."""
    place = Path(path)
    if place.stat().st_size > _MOST_BYTES:
        raise RewriteError(
            f"{place} has {place.stat().st_size:,} bytes; expected a rule file of at most {_MOST_BYTES:,} bytes."
        )
    try:
        entries = json.loads(place.read_text())["rule"]
        return [_rule(entry, index, place.name) for index, entry in enumerate(entries)]
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError) as error:
        raise RewriteError(
            f"{place} is not a rule file of Unity, or is damaged ({type(error).__name__}: {error}); expected a JSON "
            "file like Unity's graph_subst_3_v2.json."
        ) from error


def _rule(entry: dict[str, Any], index: int, source: str) -> Rule:
    sides = [[_record(item) for item in entry[key]] for key in ("srcOp", "dstOp")]
    left, right = [], []
    for mapped in entry["mappedOutput"]:
        left.append(term(sides[0], mapped["srcOpId"], mapped["srcTsId"], _build))
        right.append(term(sides[1], mapped["dstOpId"], mapped["dstTsId"], _build))
    names = {name for side in (*left, *right) for name in names_of(side)}
    return Rule(
        name=f"unity-{index}",
        left=tuple(left),
        right=tuple(right),
        ranks=tuple(sorted((name, _DIMS) for name in names)),
        source=f"{source}, rule {index}",
    )


def _record(item: dict[str, Any]) -> Record:
    operands = tuple((int(tensor["opId"]), int(tensor["tsId"])) for tensor in item["input"])
    return Record(item["type"], operands, {entry["key"]: int(entry["value"]) for entry in item["para"]})


def _build(record: Record, operands: list[Expression], output: int, place: int) -> Expression:
    values = record.parameters
    if record.kind in _PARALLEL:
        axis, degree = values["PM_PARALLEL_DIM"], values["PM_PARALLEL_DEGREE"]
        return Call(_PARALLEL[record.kind], tuple(operands), (("axis", axis), ("degree", degree)))
    if record.kind in _PLAIN:
        return Call(_PLAIN[record.kind], tuple(operands))
    if record.kind == "OP_CONCAT":
        return Call("concat", tuple(operands), (("axis", values["PM_AXIS"]),))
    if record.kind == "OP_LINEAR":
        made = Call("linear_of_copies", tuple(operands))
        return Call("relu", (made,)) if values.get("PM_ACTI") == _RELU else made
    if record.kind == "OP_SPLIT" and output in (0, 1):
        cut, end = Formula("", (f"cut{place}",)), Formula("", (f"end{place}",))
        bounds = (("start", cut), ("stop", end)) if output else (("start", 0), ("stop", cut))
        return Call("slice", tuple(operands), (("axis", values["PM_AXIS"]), *bounds))
    raise ValueError(f"the operator {record.kind!r} is not supported")
