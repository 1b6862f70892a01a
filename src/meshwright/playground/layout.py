"""From a state to a Plan, and back: stages, ranks and cuts as the controls say.

A plan of the playground places its stages by one of the planner's layouts (`planner.placement`); every plan that
`meshwright plan` finds is of this kind, so that `state_of_plan` gives it back exactly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import cast, get_args

import numpy as np
from numpy.typing import NDArray

from meshwright.planner.layouts import Layout, LayoutName
from meshwright.planner.methods.slicing.method import num_instructions
from meshwright.playground.state import State
from meshwright.spec import Cluster, GradientExchange, Graph, Optimizer, Plan, PlanError, PlaygroundError
from meshwright.spec.plan import BASIC_SCHEDULES, ScheduleName
from meshwright.spec.units import format_count
from meshwright.spec.workload import Workload

# Building, simulating and drawing 60,000 instructions takes about half a second (own measurement, one Xeon core);
# a plan for 64 devices has some thousand.
MAX_INSTRUCTIONS = 60_000
# Three steps are simulated; the clock ends after 9.2 million seconds, and transfers take time beside computations.
MAX_STEP_S = 500_000
_MIB = 2**20


def check_shape(state: State, num_layers: int, num_devices: int) -> tuple[int, ...]:
    """Replicas of each stage; raises PlanError, saying what to change, if stages, replicas or cuts are impossible."""
    if state.num_stages > num_layers:
        raise PlanError(
            f"{state.num_stages} stages were asked for, but {state.model} has {format_count(num_layers, 'layer')}, and "
            f"every stage needs at least one. Choose at most {format_count(num_layers, 'stage')}."
        )
    if not state.replicas:
        count = min(num_devices // state.num_stages, max(1, state.global_batch // state.microbatch_size))
        replicas = (max(1, count),) * state.num_stages
    elif len(state.replicas) == 1:
        replicas = state.replicas * state.num_stages
    elif len(state.replicas) == state.num_stages:
        replicas = state.replicas
    else:
        raise PlanError(
            f"Replicas for {len(state.replicas)} stages were given, but there are "
            f"{format_count(state.num_stages, 'stage')}. Give one number for all of them, or one for each."
        )
    if sum(replicas) > num_devices:
        most = num_devices // state.num_stages
        remedy = format_count(most, "replica") + " per stage" if most else format_count(num_devices, "stage")
        raise PlanError(
            f"{format_count(state.num_stages, 'stage')} with replicas {_words(sorted(set(replicas)))} need "
            f"{sum(replicas)} devices, but the cluster has {num_devices}. Choose at most {remedy}, or more devices."
        )
    if state.layout == "replica-major" and len(set(replicas)) > 1:
        raise PlanError(
            "The layout replica-major places whole pipelines side by side, so every stage has the same number of "
            f"replicas; {_words(replicas)} were given. Choose stage-major, or equal replicas."
        )
    _check_cuts(state, num_layers)
    _check_batch(state, replicas)
    return replicas


def check_duration(state: State, layer_s: NDArray[np.float64]) -> None:
    """Raise PlanError for a step that the simulator's clock (int64 picoseconds) was not made for."""
    seconds = float(layer_s.sum()) * state.global_batch / state.microbatch_size * max(state.slowdown, 1)
    if seconds > MAX_STEP_S:
        raise PlanError(
            f"One step would compute for {seconds:,.0f} s; the playground answers up to {MAX_STEP_S:,} s. "
            "Choose a smaller batch, or faster devices."
        )


def make_plan(
    state: State, graph: Graph, base: Cluster, cuts: Sequence[int], sizes: tuple[tuple[str, int], ...]
) -> Plan:
    """The plan of a state with these cuts. Raises PlanError where it cannot be."""
    replicas = check_shape(state, len(graph.layers), base.num_ranks)
    layout = Layout(name=state.layout, num_ranks=sum(replicas), num_stages=state.num_stages)
    plan = Plan(
        model=state.model,
        model_sizes=sizes,
        graph_hash=graph.content_hash,
        cluster=base.name,
        workload=workload_of(state),
        stages=layout.stages(tuple(pairwise((0, *cuts, len(graph.layers)))), replicas),
        num_microbatches=state.global_batch // state.microbatch_size,
        schedule=cast("ScheduleName", state.schedule),
        exchange=exchange_of(state),
    )
    if num_instructions(plan) > MAX_INSTRUCTIONS:
        raise PlanError(
            f"{plan.num_microbatches} microbatches in {state.num_stages} stages are about {num_instructions(plan):,} "
            f"instructions per step; the playground answers up to {MAX_INSTRUCTIONS:,}. Choose larger microbatches, "
            "or simulate such a plan with `meshwright simulate`."
        )
    return plan


def workload_of(state: State) -> Workload:
    """What is to be trained."""
    return Workload(
        global_batch=state.global_batch, precision=state.precision, optimizer=Optimizer.named(state.optimizer)
    )


def exchange_of(state: State) -> GradientExchange:
    """How gradients are summed."""
    return GradientExchange(bucket_bytes=max(1, round(state.bucket_mib * _MIB)), overlap=state.overlap)


def state_of_plan(plan: Plan, state: State) -> State:
    """The state that shows a plan on the cluster and in the scenario of ``state``.

    Raises PlaygroundError for a plan that the controls cannot say: for inference, or with ranks in no layout.
    """
    replicas = tuple(len(stage.ranks) for stage in plan.stages)
    if plan.workload.kind != "training":
        raise PlaygroundError(
            f"The plan is for {plan.workload.kind}; the playground shows plans for training. Use "
            "`meshwright simulate` for this plan."
        )
    if plan.schedule not in BASIC_SCHEDULES:
        raise PlaygroundError(
            f"The plan follows the schedule {plan.schedule!r}; the playground knows {', '.join(BASIC_SCHEDULES)}. Use "
            "`meshwright simulate` for this plan."
        )
    if plan.has_shares:
        raise PlaygroundError(
            "The plan gives replicas shares of the microbatches, which the controls of the playground do not say. Use "
            "`meshwright simulate` for this plan."
        )
    if unsaid := _unsaid(plan):
        raise PlaygroundError(
            f"The plan {unsaid}, which the controls of the playground do not say. Use `meshwright simulate` for this "
            "plan."
        )
    return replace(
        state,
        model=plan.model,
        global_batch=plan.workload.global_batch,
        microbatch_size=plan.microbatch_size,
        num_stages=len(plan.stages),
        replicas=replicas[:1] if len(set(replicas)) == 1 else replicas,
        layout=_layout_of(plan, replicas),
        cuts=tuple(stage.start for stage in plan.stages[1:]),
        schedule=plan.schedule,
        overlap=plan.exchange.overlap,
        bucket_mib=plan.exchange.bucket_bytes / _MIB,
        precision=plan.workload.precision,
        optimizer=plan.workload.optimizer.option,
    )


def _unsaid(plan: Plan) -> str:
    """What a plan does that no control stands for, in words; nothing of most."""
    if not plan.sharding.is_whole:
        return f"splits ops over devices ({plan.sharding.describe()})"
    if plan.recompute:
        return "computes parts of the model again"
    if plan.workload.loader is not None:
        return "waits for a loader of samples"
    if not plan.exchange.is_plain:
        return f"exchanges gradients in another way than by sums of buckets ({plan.exchange.describe_changes()})"
    return plan.only_simulated


def _layout_of(plan: Plan, replicas: tuple[int, ...]) -> LayoutName:
    for name in get_args(LayoutName):
        if name == "replica-major" and len(set(replicas)) > 1:
            continue
        layout = Layout(name=name, num_ranks=plan.num_ranks, num_stages=len(replicas))
        if layout.stages(plan.bounds, replicas) == plan.stages:
            return cast("LayoutName", name)
    raise PlaygroundError(
        "The plan places its stages on ranks in an order that is none of "
        f"{', '.join(get_args(LayoutName))}, so the controls cannot say it. Use `meshwright simulate` for this plan."
    )


def _check_cuts(state: State, num_layers: int) -> None:
    cuts = state.cuts
    if not cuts:
        return
    rising = all(low < high for low, high in pairwise((0, *cuts, num_layers)))
    if len(cuts) != state.num_stages - 1 or not rising:
        raise PlanError(
            f"The cuts {_words(cuts)} were given for {state.num_stages} stages of {num_layers} layers; expected "
            f"{state.num_stages - 1} rising numbers between 1 and {num_layers - 1}. Choose balanced cuts."
        )


def _check_batch(state: State, replicas: Sequence[int]) -> None:
    if state.global_batch % state.microbatch_size:
        sizes = [
            size
            for size in range(1, min(state.microbatch_size, state.global_batch + 1))
            if state.global_batch % size == 0
        ]
        raise PlanError(
            f"A global batch of {state.global_batch} samples does not divide into microbatches of "
            f"{state.microbatch_size}. Choose microbatches of {max(sizes)}, or another batch."
        )
    count = state.global_batch // state.microbatch_size
    if max(replicas) > count:
        work = format_count(count, "microbatch", "microbatches")
        raise PlanError(
            f"A stage has {max(replicas)} replicas, but a step has {work}, so some would have nothing to do. "
            f"Choose at most {format_count(count, 'replica')}, smaller microbatches or a larger batch."
        )


def _words(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers)) if len(numbers) <= 12 else ", ".join(map(str, numbers[:12])) + ", …"
