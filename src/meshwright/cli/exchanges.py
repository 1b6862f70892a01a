"""The option ``--exchange``: `simulate` compares methods of gradient reduction, `plan` reads a policy or your order.

A part is a piece of a gradient bucket that is reduced by itself.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from meshwright.spec import Cluster, Graph, Plan, ScheduleReferenceError
from meshwright.spec.exchange import read_policy
from meshwright.spec.own_code import importable, known_parts, load_function, reported, split_reference

if TYPE_CHECKING:
    from meshwright.cost import CostModel
    from meshwright.program import ReadyPart
    from meshwright.simulator import Contention, OwnOrder

_EXPECTED = "returns the order in which parts of gradients are sent: function(parts)"
_EITHER = "orders parts of gradients, function(parts), or a class that makes a controller"

ExchangeOption = Annotated[
    list[str] | None,
    typer.Option(
        help="Also simulate another method of gradient reduction, and compare: whole, priorities, sharded, "
        "hierarchical, servers, all (each of these), or your own order of gradient parts, file.py:function. May be "
        "given several times.",
    ),
]


OwnExchangeOption = Annotated[
    str | None,
    typer.Option(
        "--exchange",
        metavar="POLICY",
        help="Let a policy decide in the run which gradients an update takes: backup:B (the first n - B of n), "
        "stopped-backup:B (which stops the late replicas), delay:S (each as it arrives; replicas are at most S steps "
        "apart), partial:P (those of the first P ready replicas), or your own controller, file.py:Class. Or send the "
        "gradients of the best plan in your own order: a function that orders their parts, file.py:function.",
    ),
]


def is_policy(reference: str) -> bool:
    """Return whether ``--exchange`` of `plan` names a policy or a class, and not a function that orders parts.

    Raises PlanError for an unknown policy.
    """
    if read_policy(reference) is not None:
        return True
    path, name = known_parts(reference)
    return inspect.isclass(load_function(path, name, expected=_EITHER, error=ScheduleReferenceError))


def load_order(reference: str) -> OwnOrder:
    """Load the function that ``reference`` names. Errors raised inside the function are reported with its line."""
    path, name = known_parts(reference)
    function = load_function(path, name, expected=_EXPECTED, error=ScheduleReferenceError)

    def order(parts: Sequence[ReadyPart]) -> list[int]:
        with importable(path.parent), reported(path, f"{reference} raised", ScheduleReferenceError):
            answer = function(parts)
            return list(answer) if isinstance(answer, Iterable) else answer

    return order


def compare_ways(
    plan: Plan,
    graph: Graph,
    machine: Cluster,
    cost: CostModel,
    asked: Sequence[str] | None,
    contention: Contention,
) -> tuple[dict[str, Any], list[Any]]:
    """Compare the methods of gradient reduction named in ``asked``, as for the option ``--exchange``.

    Return the facts for ``--json``, and renderables for the terminal. Both are empty if ``asked`` is empty or None.
    """
    from meshwright.planner import EXCHANGE_NAMES, compare_exchanges
    from meshwright.report import exchanges_table

    if not asked:
        return {}, []
    own = [(reference, load_order(reference)) for reference in asked if split_reference(reference) is not None]
    named = [name for name in asked if split_reference(name) is None]
    names = EXCHANGE_NAMES if "all" in named else tuple(dict.fromkeys(named))
    found = compare_exchanges(plan, graph, machine, names, own_orders=own, cost=cost, contention=contention)
    facts = {
        "bound_s": found.bound_s,
        "computation_s": found.computation_s,
        "communication_s": found.communication_s,
        "gain_share": found.gain,
        "best": found.best.name,
        "is_worth_it": found.is_worth_it,
        "ways": found.rows(),
    }
    return facts, ["", exchanges_table(found.rows()), found.explain()]
