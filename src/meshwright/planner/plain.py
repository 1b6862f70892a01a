"""The value that a plan has for each choice of a search, and the values of the plain plan.

The plain plan has one stage on all devices, splits no op, shards no state, recomputes nothing and keeps everything on
its devices, one sample per microbatch under 1F1B; or comes as close to this as the choices allow.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any, NamedTuple

from meshwright.planner.choices import Choices
from meshwright.planner.evaluate import RankedPlan
from meshwright.planner.methods.grid import Configuration
from meshwright.planner.methods.grid.sheet import variants_of
from meshwright.planner.problem import Problem
from meshwright.spec import Offload, format_count
from meshwright.spec.offload import ON_DEVICE


class Values(NamedTuple):
    """A plan's value for each choice."""

    devices: int
    tensor: int
    sequence: bool
    context: int
    expert: int
    zero: int
    shard_size: int
    recompute: str
    offload: Offload
    schedule: tuple[str, int]
    stages: int
    microbatch_size: int


NAMES = (
    "devices",
    "tensor parallelism",
    "sequence parallelism",
    "context parallelism",
    "expert parallelism",
    "ZeRO",
    "shard size",
    "recompute",
    "offload",
    "schedule",
    "pipeline stages",
    "microbatch size",
)


def plain_values(problem: Problem) -> Values:
    """Return the value of each choice in the plain plan: nothing split, sharded, recomputed or offloaded."""
    chosen, variants = problem.choices, variants_of(problem)
    return Values(
        devices=max(chosen.num_devices or (problem.cluster.num_ranks,)),
        tensor=min(item.tensor for item in chosen.shardings),
        sequence=min(item.sequence_parallel for item in chosen.shardings),
        context=min(item.context for item in chosen.shardings),
        expert=min(item.expert for item in chosen.shardings),
        zero=min(chosen.zero),
        shard_size=min(chosen.shard_sizes),
        recompute="none" if "none" in chosen.recompute else chosen.recompute[0],
        offload=ON_DEVICE if ON_DEVICE in chosen.offload else chosen.offload[0],
        schedule=("1f1b", 1) if ("1f1b", 1) in variants else variants[0],
        stages=min(chosen.num_stages, default=1),
        microbatch_size=min(problem.microbatch_sizes(problem.workload)),
    )


def open_choices(problem: Problem) -> list[bool]:
    """Which choices have more than one value, in the order of `Values`."""
    chosen = problem.choices
    counts = (
        max(len(set(chosen.num_devices)), len(chosen.idle)),
        len({item.tensor for item in chosen.shardings}),
        len({item.sequence_parallel for item in chosen.shardings}),
        len({item.context for item in chosen.shardings}),
        len({item.expert for item in chosen.shardings}),
        len(set(chosen.zero)),
        len(set(chosen.shard_sizes)),
        len(set(chosen.recompute)),
        len(set(chosen.offload)),
        len(variants_of(problem)),
        len(set(chosen.num_stages)) or problem.cluster.num_ranks,
        len(problem.microbatch_sizes(problem.workload)),
    )
    return [count > 1 for count in counts]


def restricted(chosen: Choices, free: Collection[int], plain: Values) -> Choices:
    """Return the choices with all fixed at their plain values except the free ones."""
    fixed = {name: value for place, (name, value) in enumerate(plain._asdict().items()) if place not in free}
    axes = {"tensor": "tensor", "sequence": "sequence_parallel", "context": "context", "expert": "expert"}
    kept = [
        item
        for item in chosen.shardings
        if all(getattr(item, field) == fixed[name] for name, field in axes.items() if name in fixed)
    ]
    changes: dict[str, Any] = {"shardings": tuple(kept)}
    for name, field in (
        ("devices", "num_devices"),
        ("zero", "zero"),
        ("shard_size", "shard_sizes"),
        ("recompute", "recompute"),
        ("offload", "offload"),
        ("stages", "num_stages"),
        ("microbatch_size", "microbatch_sizes"),
    ):
        if name in fixed:
            changes[field] = (fixed[name],)
    if "devices" in fixed:
        changes["idle"] = chosen.idle[:1]
    if fixed.get("zero") == 0:
        changes["shard_sizes"] = (0,)
    if "schedule" in fixed:
        schedule, chunks = fixed["schedule"]
        changes["schedules"] = (schedule,)
        changes["num_chunks"] = (chunks,) if chunks > 1 else chosen.num_chunks
    return replace(chosen, **changes)


def values_of(configuration: Configuration, offload: Offload) -> Values:
    """Return the values of the plans of a configuration with this offload."""
    sharding = configuration.sharding
    return Values(
        devices=configuration.num_ranks * sharding.width,
        tensor=sharding.tensor,
        sequence=sharding.sequence_parallel,
        context=sharding.context,
        expert=sharding.expert,
        zero=configuration.zero,
        shard_size=configuration.shard_size,
        recompute=configuration.recompute,
        offload=offload,
        schedule=(configuration.schedule, configuration.chunks),
        stages=configuration.positions,
        microbatch_size=configuration.microbatch_size,
    )


def values_of_plan(item: RankedPlan) -> Values:
    """Return the values of a simulated plan, uniform or not."""
    plan, sharding = item.plan, item.plan.sharding
    positions = len({stage.ranks for stage in plan.stages})
    return Values(
        devices=plan.num_devices,
        tensor=sharding.tensor,
        sequence=sharding.sequence_parallel,
        context=sharding.context,
        expert=sharding.expert,
        zero=plan.exchange.zero,
        shard_size=plan.exchange.shard_size,
        recompute=item.recompute or ("some" if plan.recompute else "none"),
        offload=plan.offload,
        schedule=(plan.schedule, len(plan.stages) // positions),
        stages=positions,
        microbatch_size=plan.microbatch_size,
    )


def differing(plain: Values, values: Values) -> list[int]:
    """Return the places of the choices in which a plan is not plain. Without ZeRO, the shard size is ignored."""
    says = values if values.zero else values._replace(shard_size=plain.shard_size)
    return [place for place in range(len(values)) if says[place] != plain[place]]


def words_of(place: int, values: Values) -> str:
    """Return the value of one choice in words."""
    value = values[place]
    if isinstance(value, Offload):
        return "none" if value == ON_DEVICE else value.describe()
    if isinstance(value, tuple):
        name, chunks = value
        return name if chunks == 1 else f"{name}, {format_count(chunks, 'stage')} each"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if NAMES[place] == "shard size" and not value:
        return "all"
    return str(value)
