"""What the page receives: an answer as plain JSON, its files, and what to change in a state that does not work.

status "fits", "too large" (simulated, but memory does not suffice), "impossible" (no plan) message what is wrong and
what to change; empty if nothing is wrong query the state, every value written out: the link figures the headline
numbers, each with its unit in the name document the page document that `meshwright.report.page` draws carried the
parts that the state takes from the opened plan, in words layers names and seconds of the layers, the cuts and the
balanced cuts, for the bar that moves cuts pinned figures of the pinned state, its link, and the difference in words
"""

from __future__ import annotations

from typing import Any

from meshwright.planner.interval import StepInterval, explain_step_interval
from meshwright.planner.pages import headline_facts, simulation_document
from meshwright.planner.plans import explain_difference, summarise
from meshwright.playground.opening import describe_given
from meshwright.playground.scenario import scenario_of
from meshwright.playground.state import Controls, to_query
from meshwright.playground.workbench import StateResult
from meshwright.report import describe_scenario
from meshwright.report.page import versions
from meshwright.spec import format_bytes
from meshwright.spec.memory import ACTIVATIONS, MEMORY_GROUPS
from meshwright.spec.plan import name_stages

Row = dict[str, Any]

NEVER_FLUSHES = "The schedule is asynchronous; the step time is that of a step while the pipeline is full."


def answer_data(answer: StateResult) -> Row:
    """The answer to a state, for the page."""
    ranked = answer.ranked
    return {
        "status": "fits" if ranked.fits else "too large",
        "message": "" if ranked.fits else explain_excess(answer),
        "query": to_query(answer.state),
        "figures": answer_figures(answer),
        "carried": describe_given(answer.state, answer.given),
        "document": answer_document(answer, deflate=False),
        "layers": {
            "names": [layer.name for layer in answer.graph.layers],
            "seconds": answer.layer_s.tolist(),
            "cuts": [stage.start for stage in answer.plan.stages[1:]],
            "balanced": list(answer.balanced),
            "is_balanced": not answer.state.cuts,
        },
    }


def answer_figures(answer: StateResult) -> Row:
    """The headline numbers, of all devices and of one."""
    ranked, plan = answer.ranked, answer.plan
    tokens_per_s = ranked.tokens_per_s
    return {
        **headline_facts(ranked),
        "tokens_per_s": tokens_per_s,
        "tokens_per_device_per_s": None if tokens_per_s is None else tokens_per_s / plan.num_devices,
        "sequence_length": ranked.sequence_length,
        "num_devices": plan.num_devices,
    }


def interval_data(interval: StepInterval) -> Row:
    """The ends of the step time's interval, and their meaning."""
    return {
        "status": "interval",
        "low_s": interval.low_s,
        "high_s": interval.high_s,
        "words": explain_step_interval(interval),
    }


def impossible_data(state: Controls, message: str) -> Row:
    """The answer to a state that has no plan."""
    return {"status": "impossible", "message": message, "query": to_query(state)}


def pinned_data(answer: StateResult, pinned: StateResult) -> Row:
    """The pinned state beside the shown one."""
    return {
        "query": to_query(pinned.state),
        "words": summarise(pinned.plan),
        "figures": answer_figures(pinned),
        "difference": explain_difference(answer.ranked, pinned.ranked),
    }


def answer_document(answer: StateResult, *, deflate: bool = True) -> Row:
    """The page document of an answer: what the playground draws, and what its report contains."""
    scenario = describe_scenario(scenario_of(answer.state))
    seen, plan = answer.seen, answer.plan
    remarks = (
        plan.sharding.describe_teams(),
        NEVER_FLUSHES if plan.is_asynchronous else "",
        f"Scenario: {scenario}. The plan was made without it." if scenario else "",
    )
    return simulation_document(
        answer.ranked,
        answer.simulation.timeline,
        seen.graph,
        seen.cluster,
        seen.cost,
        remark="\n".join(filter(None, remarks)),
        provenance={"command": "meshwright show --play", "state": to_query(answer.state), "versions": versions()},
        deflate=deflate,
    )


def explain_excess(answer: StateResult) -> str:
    """Which rank needs too much memory, its largest part, and what would reduce it."""
    ranked, state = answer.ranked, answer.state
    rank = ranked.fullest_rank
    changes = []
    if ranked.memory_owner in MEMORY_GROUPS[ACTIVATIONS]:
        if state.microbatch_size > 1:
            changes.append(f"microbatches smaller than {state.microbatch_size}")
        if state.schedule == "gpipe":
            changes.append("the schedule 1f1b, which holds fewer microbatches at a time")
    if state.num_stages < len(answer.graph.layers):
        changes.append("more stages, so that each holds fewer layers")
        if state.recompute == "none":
            changes.append("blocks that are recomputed")
    if ranked.memory_owner == "optimizer states" and state.optimizer != "sgd":
        changes.append("an optimizer with less state")
    shares = answer.plan.workload.kind == "training" and any(len(stage.ranks) > 1 for stage in answer.plan.stages)
    if not state.zero and shares:
        changes.append("a stage of ZeRO, with which replicas shard states")
    if state.cuts:
        changes.append("balanced cuts")
    changes.append("devices with more memory")
    return (
        f"Does not fit: rank {rank} ({name_stages(answer.plan, rank)}) needs "
        f"{format_bytes(ranked.reserved_bytes[rank])}, {format_bytes(ranked.excess_bytes)} more than its "
        f"{format_bytes(ranked.memory_limit_bytes[rank])}; most of it are {ranked.memory_owner}. "
        f"Choose {', or '.join(changes)}."
    )
