"""``meshwright plan --rewrite``: is the step shorter if the graph is rewritten first?"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from meshwright.planner import Plans
    from meshwright.spec import Cluster, Graph


def plan_rewritten(
    plans: Plans,
    graph_for: Callable[[int], Graph],
    search: Callable[[Callable[[int], Graph], Sequence[int]], Plans],
    graphs: Callable[..., Callable[[int], Graph]],
    machine: Cluster,
) -> tuple[Plans, Callable[[int], Graph], list[str]]:
    """The better plans of both graphs, their graph, and what came of it, for people.

    ``graphs`` gives the graph by microbatch size, with ``target`` that of the rewritten model.
    """
    from meshwright.rewrite.planned import Target
    from meshwright.spec.units import format_seconds

    kind = machine.device_kind(0)
    size = plans.best.plan.microbatch_size
    rewritten = graphs(target=Target(machine, kind))
    before_s = plans.best.step_time_s
    if rewritten(size).content_hash == graph_for(size).content_hash:
        return plans, graph_for, [f"No rule leads to a cheaper graph on {kind.name}."]
    others = search(rewritten, [size])
    after_s = others.best.step_time_s
    times = f"{format_seconds(after_s)} instead of {format_seconds(before_s)}"
    if after_s >= before_s:
        told = f"Rewritten for {kind.name}, the step would take {times}"
        return plans, graph_for, [f"{told}; the graph stays as it is."]
    told = f"The graph is rewritten for {kind.name}: the step takes {times}."
    return mark_rewritten(others, kind.name), rewritten, [told]


def mark_rewritten(plans: Plans, kind: str) -> Plans:
    """The plans of a graph that was rewritten for a kind of device, saying so."""
    ranked = tuple(replace(item, plan=replace(item.plan, rewritten=kind)) for item in plans.ranked)
    return replace(plans, ranked=ranked)
