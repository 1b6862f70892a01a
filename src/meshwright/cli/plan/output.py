"""Output of ``meshwright plan`` for the plans found: orders, files, a page, and what it prints."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from rich.text import Text

from meshwright.cli.json_output import print_json
from meshwright.cli.output import print_tables
from meshwright.cli.pages import provenance, put_page
from meshwright.cli.plan.files import PlanFiles, no_files, write_plan_files
from meshwright.spec.units import format_bytes, format_count, format_seconds

if TYPE_CHECKING:
    from meshwright.cli.plan.request import PlanRequest
    from meshwright.cli.plan.strategy import Strategy
    from meshwright.cost import CostModel
    from meshwright.planner import Plans, Shares
    from meshwright.simulator import OwnOrder
    from meshwright.spec.graph import Graph


class PlanPlaces(NamedTuple):
    """Paths of the plan, its script and the page; None if not written."""

    files: PlanFiles
    page: Path | None


def order_best(
    plans: Plans, graph_for: Callable[[int], Graph], cost: CostModel, request: PlanRequest
) -> tuple[Plans, list[str]]:
    """The plans with the best one first, now in a found order, which is written; and remarks on it."""
    from meshwright.planner import find_order
    from meshwright.planner.search import find_front
    from meshwright.program.lowering import unlower_plan
    from meshwright.simulator import form_teams

    assert request.find_orders is not None
    best = plans.best.plan
    seen = form_teams(best, graph_for(best.microbatch_size), cost.cluster, cost)
    sought = find_order(
        seen.plan,
        seen.graph,
        seen.cluster,
        request.find_orders,
        cost=seen.cost,
        whole=request.whole_backwards,
        memory=request.memory,
    )
    price = plans.best.price and plans.best.price.at(sought.best.step_time_s)
    followed = unlower_plan(sought.best.plan, best)
    first = replace(sought.best, plan=followed, price=price, interval=plans.predict_interval(followed))
    ranked = (first, *(item for item in plans.ranked if item.plan != first.plan))
    front = find_front((first, *plans.front))
    return replace(plans, ranked=ranked[: max(len(plans.ranked), 2)], front=front), [sought.explain()]


def exchange_best(
    plans: Plans, graph_for: Callable[[int], Graph], cost: CostModel, request: PlanRequest, order: OwnOrder
) -> tuple[Plans, list[str]]:
    """The plans with the best one first, whose gradients now leave in the user's order; and remarks on it."""
    from meshwright.planner import follow_own_order

    best = plans.best
    graph = graph_for(best.plan.microbatch_size)
    found = follow_own_order(best.plan, graph, cost.cluster, order, cost=cost, memory=request.memory)
    price = best.price and best.price.at(found.step_time_s)
    first = replace(found, price=price, interval=plans.predict_interval(found.plan))
    exchange = found.plan.exchange
    said = (
        f"Gradients leave as {request.exchange} says, in {format_count(len(exchange.sequence), 'part')} of at most "
        f"{format_bytes(exchange.partition_bytes)}: a step of {format_seconds(found.step_time_s)}, in buckets "
        f"{format_seconds(best.step_time_s)}."
    )
    return replace(plans, ranked=(first, *plans.ranked[1:])), [said]


def put_plans(
    plans: Plans,
    graph_for: Callable[[int], Graph],
    cost: CostModel,
    places: PlanPlaces,
    request: PlanRequest,
    remarks: Sequence[str],
    shares: Shares | None = None,
    strategy: Strategy | str | None = None,
) -> None:
    """Write the best plan and the page, and print everything."""
    from meshwright.planner import explain_step_interval, plans_document
    from meshwright.report import describe_workload, fit_table, front_table, plans_table, shares_table, workload_row
    from meshwright.simulator import allocate_rank, explain_nodes, form_teams

    best, machine = plans.best.plan, cost.cluster
    written = write_plan_files(places.files, best, machine)
    written += [f"orders written to {request.find_orders}"] if request.find_orders is not None else []
    whole = graph_for(best.microbatch_size)
    seen = form_teams(best, whole, machine, cost)
    allocation = allocate_rank(seen.plan, seen.graph, seen.cluster, plans.best.fullest_rank)
    held = allocation.explain() if allocation else ""
    kind = machine.device_kind(plans.best.fullest_rank * best.sharding.width)
    held = "\n".join(filter(None, (request.memory.explain(kind), held)))
    teams = list(filter(None, (best.sharding.describe_teams(),)))
    if places.page is not None:
        remark = "\n".join((*teams, held, *([shares.explain()] if shares else [])))
        document = plans_document(plans, graph_for, machine, cost, remark=remark, provenance=provenance())
        written = [*written, put_page(document, places.page, request.open_browser)]
    basis = seen.cost.explain_basis(seen.graph, best.microbatch_size)
    interval = plans.interval()
    if request.as_json:
        files = {
            "file": places.files.plan,
            "script": places.files.script,
            "orders": request.find_orders,
            "page": places.page,
        }
        print_json(
            "plans",
            {
                "workload": workload_row(best, whole),
                "plans": plans.rows(),
                "ranks": plans.best.memory_rows(),
                "allocation": allocation.row() if allocation else None,
                "basis": basis,
                "step_interval_s": [interval.low_s, interval.high_s],
                "step_interval_measured": interval.measured,
                "search": plans.search_row(),
                **({"shares": shares.row()} if shares else {}),
                **({"teams": teams[0]} if teams else {}),
                **_strategy_row(strategy),
                **({"nodes": [asdict(node) for node in plans.best.nodes]} if plans.best.nodes else {}),
                **{name: str(path) if path else None for name, path in files.items()},
            },
        )
        return
    front = (front_table(plans.search_row()["front"]), "") if request.pareto else ()
    sure = (basis, explain_step_interval(interval))
    hosts = explain_nodes(plans.best.nodes)
    counts = seen.cost.count_bases(seen.graph, best.microbatch_size)
    rest_on = ", ".join(f"{count} {basis}" for basis, count in counts.most_common())
    print_tables(Text(f"{describe_workload(best, whole)}; op costs: {rest_on}"))
    print_tables(plans_table(plans.rows()), "", *front, plans.explain(best), *teams, *hosts, *remarks, *sure, "")
    if shares is not None:
        told = [shares_table(shares.row())] if shares.choices else []
        print_tables(*told, shares.explain(with_parts=False), "")
    # Names of files may hold square brackets, which rich would read as markup.
    files_of_strategy = strategy is not None and request.out is not None
    said = written or ([] if files_of_strategy else [no_files(request.model)])
    print_tables(fit_table(plans.best.memory_rows(), held), *map(Text, said))
    if strategy is not None:
        print_tables("", *([Text(strategy)] if isinstance(strategy, str) else strategy.tables()))


def _strategy_row(strategy: Strategy | str | None) -> dict[str, Any]:
    if strategy is None or isinstance(strategy, str):
        return {} if strategy is None else {"strategy": {"refusal": strategy}}
    return {"strategy": strategy.row()}
