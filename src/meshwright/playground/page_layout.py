"""Make the plan of a state: stages, ranks and cuts as the controls set them, or as in an opened plan.

Stages are placed by one of the planner's layouts (`planner.rank_layouts`) and assigned to ranks as the schedule
requires (`planner.adoption`). Properties that no control can express are taken from the opened plan
(`controls.AS_PLANNED`): another order of ranks, unequal shares of microbatches, a user's schedule, recomputed ranges of
ops, details of the gradient reduction. `opened_plans` does the reverse.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import cast

import numpy as np
from numpy.typing import NDArray

from meshwright.planner.methods.slicing.slicing_method import num_instructions
from meshwright.planner.rank_layouts import Layout, LayoutName
from meshwright.playground.controls import AS_PLANNED, Controls
from meshwright.spec import (
    Cluster,
    GradientExchange,
    Graph,
    Offload,
    Optimizer,
    Plan,
    PlanError,
    Recompute,
    Sharding,
    StagePlan,
    Workload,
    format_count,
    read_offload,
    read_recompute,
    with_branches,
)
from meshwright.spec.exchange import ZeroStage
from meshwright.spec.offload import ON_DEVICE
from meshwright.spec.schedules import layout_of
from meshwright.spec.sharding import UNSHARDED

# Building, simulating and drawing 60,000 instructions takes about half a second (own measurement, one Xeon core); a
# plan for 64 devices has some thousand. An opened plan may have more.
MAX_INSTRUCTIONS = 60_000
# Three steps are simulated; the clock ends after 9.2 million seconds, and transfers take time besides.
MAX_STEP_S = 500_000
_MIB = 2**20


def check_shape(state: Controls, num_layers: int, num_devices: int, given: Plan | None = None) -> tuple[int, ...]:
    """Check stages, replicas, cuts and batch of a state; return the number of replicas of each pipeline position.

    A pipeline position is one stage, or the stages that one rank computes under a schedule with several per rank.
    ``given``: the opened plan. Raises PlanError, with a remedy, if no plan has these values.
    """
    if state.num_stages > num_layers:
        raise PlanError(
            f"{state.num_stages} stages were given, but {state.model} has {format_count(num_layers, 'layer')}, and "
            f"every stage needs at least one. Choose at most {format_count(num_layers, 'stage')}."
        )
    _check_cuts(state, num_layers)
    if state.layout == AS_PLANNED and given is not None:
        replicas = tuple(len(stage.ranks) for stage in given.stages)
        if (state.num_stages, state.replicas) != (len(given.stages), briefly(replicas)):
            raise PlanError(
                f"With the layout {AS_PLANNED} (as in the opened plan), the plan has "
                f"{format_count(len(given.stages), 'stage')} with replicas {_words(briefly(replicas))}. Choose another "
                "layout to change stages or replicas, or give these numbers."
            )
        _check_batch(state, replicas)
        return replicas
    replicas = _replicas_of(state, num_devices)
    width = _width(state)
    if sum(replicas) * width > num_devices:
        size = len(replicas)
        most = num_devices // (size * width)
        remedy = format_count(most, "replica") + " per stage" if most else _fewer(state, num_devices)
        raise PlanError(
            f"{format_count(state.num_stages, 'stage')} with replicas {_words(sorted(set(replicas)))} need "
            f"{sum(replicas) * width} devices, but the cluster has {num_devices}. Choose at most {remedy}, or more "
            "devices."
        )
    if state.layout == "replica-major" and len(set(replicas)) > 1:
        raise PlanError(
            "The layout replica-major places whole pipelines side by side, so every stage has the same number of "
            f"replicas; {_words(replicas)} were given. Choose stage-major, or equal replicas."
        )
    _check_batch(state, replicas)
    return replicas


def check_duration(state: Controls, layer_s: NDArray[np.float64]) -> None:
    """Raise PlanError for a step that is too long for the simulator's clock (int64 picoseconds).

    ``layer_s``: seconds of each layer per microbatch.
    """
    count = state.global_batch / (state.microbatch_size * state.expert)
    seconds = float(layer_s.sum()) * count * max(state.slowdown, 1)
    if seconds > MAX_STEP_S:
        raise PlanError(
            f"One step would compute for {seconds:,.0f} s; the playground simulates steps of at most {MAX_STEP_S:,} s. "
            "Choose a smaller batch, or faster devices."
        )


def make_plan(
    state: Controls,
    graph: Graph,
    base: Cluster,
    cuts: Sequence[int],
    sizes: tuple[tuple[str, int], ...],
    given: Plan | None = None,
    *,
    rewritten: str = "",
) -> Plan:
    """Return the plan of a state on the cluster ``base``.

    ``cuts``: the first layer of each stage but the first. ``sizes``: the model's (name, value) sizes that the plan
    stores. ``given``: the opened plan. ``rewritten``: the kind of device for which the graph was rewritten, or "".
    Raises PlanError, with a remedy, for a state that no plan has.
    """
    replicas = check_shape(state, len(graph.layers), base.num_ranks, given)
    bounds = tuple(pairwise((0, *cuts, len(graph.layers))))
    as_given = state.layout == AS_PLANNED and given is not None
    own = given if state.schedule == AS_PLANNED else None
    schedule = state.schedule if own is None else own.schedule
    if as_given and given is not None:
        stages = tuple(
            replace(stage, start=start, stop=stop, feeds=stage.feeds if bounds == given.bounds else ())
            for stage, (start, stop) in zip(given.stages, bounds, strict=True)
        )
    else:
        name = cast("LayoutName", state.layout)
        stages = deal_out(name, layout_of(schedule), bounds, replicas)
    again = again_of(state, graph, given)
    plan = Plan(
        model=state.model,
        model_sizes=sizes,
        graph_hash=graph.content_hash,
        cluster=base.name,
        workload=workload_of(state, graph, given),
        stages=stages,
        num_microbatches=state.global_batch // (state.microbatch_size * state.expert),
        schedule=schedule,
        schedule_hash="" if own is None else own.schedule_hash,
        exchange=exchange_of(state, given).suited_to(schedule),
        sharding=sharding_of(state, given),
        recompute=again.ranges,
        keeps=again.keeps,
        offload=offload_of(state),
        rewritten=rewritten,
    )
    limit = max(MAX_INSTRUCTIONS, 0 if given is None else num_instructions(given))
    if num_instructions(plan) > limit:
        raise PlanError(
            f"{plan.num_microbatches} microbatches in {state.num_stages} stages are about {num_instructions(plan):,} "
            f"instructions per step; the playground simulates at most {limit:,}. Choose larger microbatches, or "
            "simulate such a plan with `meshwright simulate`."
        )
    if given is None:
        return plan
    if as_given and given.has_branches and bounds != given.bounds:
        plan = with_branches(plan, graph)
    return plan


def workload_of(state: Controls, graph: Graph | None = None, given: Plan | None = None) -> Workload:
    """Return the workload of a state.

    Its kind (training or inference) is that of ``graph``. Details of optimizer and loader come from ``given``, the
    opened plan, if the state keeps them.
    """
    optimizer = Optimizer.named(state.optimizer)
    if given is not None and given.workload.optimizer.option == state.optimizer:
        optimizer = given.workload.optimizer
    return Workload(
        kind="training" if graph is None else graph.mode,
        global_batch=state.global_batch,
        precision=state.precision,
        optimizer=optimizer,
        loader=given.workload.loader if given is not None and state.rest == AS_PLANNED else None,
    )


def exchange_of(state: Controls, given: Plan | None = None) -> GradientExchange:
    """Return the gradient reduction of a state; details without a control are those of the opened plan, ``given``."""
    way = given.exchange if given is not None and state.rest == AS_PLANNED else GradientExchange()
    return replace(
        way,
        bucket_bytes=max(1, round(state.bucket_mib * _MIB)),
        overlap=state.overlap,
        zero=cast("ZeroStage", state.zero),
        shard_size=way.shard_size if state.zero else 0,
    )


def sharding_of(state: Controls, given: Plan | None = None) -> Sharding:
    """Return the sharding of a state; details without a control are those of the opened plan, ``given``."""
    return replace(
        given.sharding if given is not None and state.rest == AS_PLANNED else UNSHARDED,
        tensor=state.tensor,
        context=state.context,
        expert=state.expert,
        sequence_parallel=state.sequence_parallel,
    )


def again_of(state: Controls, graph: Graph, given: Plan | None = None) -> Recompute:
    """Return the recompute of a state. Raises PlanError for a value that the graph's layers do not support."""
    if state.recompute == AS_PLANNED and given is not None:
        return Recompute(given.recompute, given.keeps)
    return Recompute() if state.recompute == "none" else _read_recompute(graph, state.recompute)


def offload_of(state: Controls) -> Offload:
    """Return the offload of a state."""
    return ON_DEVICE if state.offload == "none" else read_offload((state.offload,))


def deal_out(
    name: LayoutName, deal: str, bounds: Sequence[tuple[int, int]], replicas: Sequence[int]
) -> tuple[StagePlan, ...]:
    """Return the stages of a plan, with ranks.

    ``name``: the planner's layout, which places the ranks of each pipeline position. ``deal``: how the schedule assigns
    stages to positions (`spec.schedules.layout_of`: "single", "in turn", "v" or "bidirectional"). ``bounds``: (first
    layer, end) of each stage. ``replicas``: per position.
    """
    size, count = len(replicas), len(bounds)
    layout = Layout(name=name, num_ranks=sum(replicas), num_stages=size)
    if deal == "single":
        return layout.stages(bounds, replicas)
    places = accumulate((0, *replicas[:-1]))
    ranks = [layout.ranks(before, take) for take, before in zip(replicas, places, strict=True)]
    match deal:
        case "in turn":
            dealt = [ranks[index % size] for index in range(count)]
        case "v":
            dealt = [ranks[min(index, count - 1 - index)] for index in range(count)]
        case _:
            dealt = [(ranks[index][0], ranks[size - 1 - index][0]) for index in range(count)]
    return tuple(StagePlan(start=start, stop=stop, ranks=own) for (start, stop), own in zip(bounds, dealt, strict=True))


def _replicas_of(state: Controls, num_devices: int) -> tuple[int, ...]:
    """Replicas of each position, as the controls set them. Raises PlanError for impossible numbers."""
    deal, count = layout_of(state.schedule), state.num_stages
    size = count
    if deal != "single":
        chunks = {"in turn": state.num_chunks, "v": 2}.get(deal, 1)
        size = count // chunks
        divisor = 2 if deal == "bidirectional" else chunks
        if count % divisor:
            raise PlanError(
                f"The schedule {state.schedule} needs a number of stages that is a multiple of {divisor}; {count} were "
                f"given. Choose {format_count(max(count // divisor, 1) * divisor, 'stage')}, or another schedule."
            )
    if not state.replicas and deal == "bidirectional":
        return (1,) * size
    if not state.replicas:
        microbatches = state.global_batch // (state.microbatch_size * state.expert)
        return (max(1, min(num_devices // (size * _width(state)), max(1, microbatches))),) * size
    if len(state.replicas) == 1:
        replicas = state.replicas * size
    elif len(state.replicas) == size:
        replicas = state.replicas
    else:
        raise PlanError(
            f"Replicas for {len(state.replicas)} stages were given, but there are "
            f"{format_count(size, 'stage')}. Give one number for all of them, or one for each."
        )
    if deal != "single" and len(set(replicas)) > 1:
        raise PlanError(
            f"The schedule {state.schedule} needs the same number of replicas of every stage; {_words(replicas)} were "
            f"given. "
            "Give one number for all of them."
        )
    if deal == "bidirectional" and set(replicas) != {1}:
        raise PlanError(
            f"The schedule {state.schedule} runs one pipeline in both directions, so that each stage exists twice; "
            f"{replicas[0]} replicas were given. Give 1."
        )
    return replicas


@lru_cache(maxsize=32)
def _read_recompute(graph: Graph, text: str) -> Recompute:
    return read_recompute(graph, text)


def _width(state: Controls) -> int:
    return state.tensor * state.context * state.expert


def _fewer(state: Controls, num_devices: int) -> str:
    width = _width(state)
    if width > num_devices:
        return f"{format_count(num_devices, 'device')} for tensor times context times expert"
    return format_count(num_devices // width * (state.num_stages // len(_positions(state))), "stage")


def _positions(state: Controls) -> range:
    chunks = {"in turn": state.num_chunks, "v": 2}.get(layout_of(state.schedule), 1)
    return range(max(1, state.num_stages // chunks))


def briefly(replicas: tuple[int, ...]) -> tuple[int, ...]:
    """Return the numbers of replicas of all stages as the control shows them: one number if all are equal."""
    return replicas[:1] if len(set(replicas)) == 1 else replicas


def _check_cuts(state: Controls, num_layers: int) -> None:
    cuts = state.cuts
    if not cuts:
        return
    rising = all(low < high for low, high in pairwise((0, *cuts, num_layers)))
    if len(cuts) != state.num_stages - 1 or not rising:
        raise PlanError(
            f"The cuts {_words(cuts)} were given for {state.num_stages} stages of {num_layers} layers; expected "
            f"{state.num_stages - 1} rising numbers between 1 and {num_layers - 1}. Choose balanced cuts."
        )


def _check_batch(state: Controls, replicas: Sequence[int]) -> None:
    batch, rest = divmod(state.global_batch, state.expert)
    if rest:
        raise PlanError(
            f"A global batch of {state.global_batch} samples does not divide among {state.expert} expert ranks, each "
            "of which computes its own samples. Choose another batch, or another size of the expert axis."
        )
    if batch % state.microbatch_size:
        sizes = [size for size in range(1, min(state.microbatch_size, batch + 1)) if batch % size == 0]
        raise PlanError(
            f"A batch of {batch} samples does not divide into microbatches of {state.microbatch_size}. Choose "
            f"microbatches of {max(sizes)}, or another batch."
        )
    count = batch // state.microbatch_size
    if max(replicas) > count:
        work = format_count(count, "microbatch", "microbatches")
        raise PlanError(
            f"A stage has {max(replicas)} replicas, but a step has {work}, so some replicas would have nothing to "
            f"compute. Choose at most {format_count(count, 'replica')}, smaller microbatches or a larger batch."
        )


def _words(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers)) if len(numbers) <= 12 else ", ".join(map(str, numbers[:12])) + ", …"
