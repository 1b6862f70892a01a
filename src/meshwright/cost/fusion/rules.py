"""Decompositions of operators that torch applies before fusion: the table ``rules.toml``, read once."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from functools import cache
from importlib import resources

from meshwright.spec.codec import decode
from meshwright.spec.parsing import read_data


@dataclass(frozen=True, slots=True, kw_only=True)
class FusionRule:
    """A row of the table, as text."""

    names: str
    forward: str
    backward: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleValue:
    """One value of a rule: its sort, its inputs (names, or values without a name), and its options."""

    sort: str
    inputs: tuple[str | RuleValue, ...]
    like: str = ""
    ops: int = 1
    num_bytes: int = 0
    heavy: bool = False


Steps = tuple[tuple[str, RuleValue], ...]


@cache
def fusion_rules() -> dict[str, tuple[Steps, Steps]]:
    """Return the values of the forward and of the backward of every operator in the table, by name, in order."""
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
        raise TypeError(f"a rule of fusion has {ast.unparse(node)!r}; expected a value such as point(x0, x1)")
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
