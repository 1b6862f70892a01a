"""Find the state that shows a plan. Every plan has one, from which `page_layout.make_plan` makes the same plan again.

Properties that a control can express become its value. All others are `AS_PLANNED`, and `describe_given` lists them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

from meshwright.planner.rank_layouts import LayoutName
from meshwright.playground.controls import AS_PLANNED, OFFLOAD_NAMES, Controls
from meshwright.playground.page_layout import briefly, deal_out, offload_of
from meshwright.spec import (
    GradientExchange,
    Graph,
    Plan,
    Recompute,
    encode_document,
    format_count,
    format_seconds,
    recompute_choices,
)
from meshwright.spec.codec import dump_json
from meshwright.spec.own_code import source_hash
from meshwright.spec.schedules import layout_of
from meshwright.spec.sharding import UNSHARDED

_MIB = 2**20


def state_of_plan(plan: Plan, state: Controls, graph: Graph | None = None) -> Controls:
    """Return the state that shows a plan on the cluster and under the scenario of ``state``.

    If the result's `Controls.needs_plan` is True, the workbench must have opened the plan (`Workbench.open_plan`).
    ``graph``: the plan's graph, with which the plan's recompute gets the name that the control shows; without it, any
    recompute becomes `AS_PLANNED`.
    """
    layout, num_chunks, replicas = _layout_of(plan)
    again = Recompute(plan.recompute, plan.keeps)
    choices = recompute_choices(graph) if graph is not None and plan.recompute else {"none": Recompute()}
    word = next((name for name, found in choices.items() if found == again), AS_PLANNED)
    shown = replace(
        state,
        model=plan.model,
        given="",
        global_batch=plan.workload.global_batch,
        microbatch_size=plan.microbatch_size,
        num_stages=len(plan.stages),
        replicas=briefly(replicas),
        layout=layout,
        num_chunks=num_chunks or state.num_chunks,
        cuts=tuple(stage.start for stage in plan.stages[1:]),
        schedule=AS_PLANNED if plan.has_own_schedule else plan.schedule,
        zero=plan.exchange.zero,
        tensor=plan.sharding.tensor,
        context=plan.sharding.context,
        expert=plan.sharding.expert,
        sequence_parallel=plan.sharding.sequence_parallel,
        recompute=word,
        offload=next(name for name in OFFLOAD_NAMES if offload_of(replace(state, offload=name)) == plan.offload),
        rest=AS_PLANNED if _rest_of(plan) else "none",
        overlap=plan.exchange.overlap,
        bucket_mib=plan.exchange.bucket_bytes / _MIB,
        precision=plan.workload.precision,
        optimizer=plan.workload.optimizer.option,
    )
    return replace(shown, given=plan_key(plan)) if shown.needs_plan else shown


def describe_given(state: Controls, given: Plan | None) -> str:
    """Return a sentence that lists the properties that a state takes from the opened plan; "" if it takes nothing."""
    if given is None or not state.needs_plan:
        return ""
    parts = {
        "the ranks of its stages": state.layout == AS_PLANNED,
        f"the schedule {given.schedule}": state.schedule == AS_PLANNED,
        f"{format_count(len(given.recompute), 'part')} recomputed": state.recompute == AS_PLANNED,
    }
    words = [word for word, is_left in parts.items() if is_left]
    words += _rest_of(given) if state.rest == AS_PLANNED else []
    return f"As in the plan that was opened: {'; '.join(words)}."


def plan_key(plan: Plan) -> str:
    """Return a hash of a plan's content (16 hexadecimal digits), which identifies it in links."""
    return source_hash(dump_json(encode_document(plan)).encode())


def _rest_of(plan: Plan) -> list[str]:
    """Properties of a plan that no control can express, in words."""
    exchange, sharding, loader = plan.exchange, plan.sharding, plan.workload.loader
    default, words = GradientExchange(), []
    own = replace(exchange, bucket_bytes=default.bucket_bytes, overlap=default.overlap, zero=0, shard_size=0)
    if own != default:
        words.append(f"gradients reduced with {_shorten(own.describe_changes())}")
    if exchange.shard_size:
        words.append(f"states sharded in groups of {exchange.shard_size} replicas")
    if sharding.placements:
        words.append(format_count(len(sharding.placements), "placement") + " of ops")
    if sharding.regather:
        words.append("tensors that are split over tokens gathered again in the backward pass")
    if sharding.context_method != UNSHARDED.context_method:
        words.append(f"context by {sharding.context_method}")
    if loader is not None:
        words.append(f"a loader of {format_seconds(loader.seconds_per_sample)} per sample")
    return words


def _shorten(text: str, limit: int = 200) -> str:
    return text if len(text) <= limit else text[:limit] + "…"


def _layout_of(plan: Plan) -> tuple[str, int, tuple[int, ...]]:
    """The layout that a plan's stages are in, stages per rank (0 if it does not matter), replicas of its positions."""
    deal, count = layout_of(plan.schedule), len(plan.stages)
    positions = list(dict.fromkeys(stage.ranks for stage in plan.stages))
    size = count if deal in ("single", "bidirectional") else len(positions)
    replicas = tuple(len(stage.ranks) for stage in plan.stages)
    of_position = (1,) * count if deal == "bidirectional" else replicas[:size]
    fits = {"in turn": count % size == 0, "v": count == 2 * size, "bidirectional": count % 2 == 0}
    is_even = len(set(of_position)) == 1
    if fits.get(deal, True) and (deal == "single" or is_even):
        for name in get_args(LayoutName):
            if name == "replica-major" and not is_even:
                continue
            if deal_out(name, deal, plan.bounds, of_position) == plan.stages:
                return name, count // size if deal == "in turn" else 0, of_position
    return AS_PLANNED, 0, replicas
