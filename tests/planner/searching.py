"""Searches in one call: options by name, put where they belong (`Problem`, `Choices`, `Limits`)."""

from dataclasses import fields

from meshwright import planner
from meshwright.cost import CostModel
from meshwright.planner import DEFAULT_METHOD, Choices, Limits, Problem, within_budget
from meshwright.spec import GradientExchange
from meshwright.spec.scenario import Scenario

_CHOICES = {item.name for item in fields(Choices)}
_LIMITS = {item.name for item in fields(Limits)}


def problem_with(graph_for, cluster, workload, *, max_price_per_hour=None, **options):
    """The problem; a choice of one number may be given alone, ZeRO is that of the exchange unless it is chosen."""
    given = {name: value for name, value in options.items() if value is not None}
    choices = {name: given.pop(name) for name in list(given) if name in _CHOICES}
    if max_price_per_hour is not None:
        counts = choices.get("num_devices", ())
        counts = (counts,) if isinstance(counts, int) else counts
        prices = given.get("prices", Scenario())
        choices["num_devices"] = within_budget(counts, cluster, prices, max_price_per_hour)
    choices.setdefault("zero", (given.get("exchange", GradientExchange()).zero,))
    made = {name: (value,) if isinstance(value, int) else tuple(value) for name, value in choices.items()}
    cost = given.pop("cost", None) or CostModel(cluster=cluster, precision=workload.precision)
    return Problem(graph_for=graph_for, cluster=cluster, workload=workload, cost=cost, choices=Choices(**made), **given)


def search_plans(graph_for, cluster, workload, *, method=DEFAULT_METHOD, **options):
    """What `planner.search_plans` finds."""
    limits = Limits(**{name: options.pop(name) for name in list(options) if name in _LIMITS})
    return planner.search_plans(problem_with(graph_for, cluster, workload, **options), method, limits)


def solve(problem, method=DEFAULT_METHOD, **limits):
    """The same for a problem that is there."""
    return planner.search_plans(problem, method, Limits(**limits))
