"""Assemble the arrays of a slicing problem: one microbatch size, one layout of ranks, one schedule (`make_problem`)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from meshwright.cost import CostModel
from meshwright.cost.memory import backend_of
from meshwright.planner.methods.slicing.dynamic_program import SlicingProblem
from meshwright.planner.rank_layouts import Places
from meshwright.planner.stage_tables import StageBytesTable, Tables
from meshwright.spec import GradientExchange, Offload, Workload
from meshwright.spec.offload import ON_DEVICE

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]


def make_problem(
    tables: Tables,
    places: Places,
    *,
    in_flight: Integers,
    beside: NDArray[np.float64],
    exchange: GradientExchange,
    workload: Workload,
    cost: CostModel,
    offload: Offload = ON_DEVICE,
) -> SlicingProblem:
    """Return the arrays of one slicing problem.

    ``tables``: seconds and bytes of all stages. ``places``: ranks and links under the layout. ``in_flight`` (D, D + 1):
    microbatches in flight under the schedule (`assume_in_flight`). ``beside`` (L, L + 1): bytes of each stage that only
    simulations revealed.
    """
    on_device = offload.optimizer == "device"
    states = tables.bytes.states if on_device else np.zeros_like(tables.bytes.states)
    parameters, gradients, most = tables.bytes.parameters, tables.bytes.exchange, tables.bytes.most
    if offload.parameters == "host":
        # Parameters and gradients are on the device during passes only, so stages get a lower bound.
        most = np.maximum(most - gradients[..., None], 0.0)
        parameters, gradients = np.zeros_like(parameters), np.zeros_like(gradients)
    has_masters = on_device and workload.numbers.master_bytes > 0
    shared, alone = _shared_bytes(parameters, states, exchange.zero, has_masters=has_masters)
    mixed = [[tables.seconds[name] for name in names] for names in places.kind_sets]
    return SlicingProblem(
        num_microbatches=tables.num_microbatches,
        num_fills=1 if workload.kind == "training" else 0,
        in_flight=in_flight,
        overlap=exchange.overlap,
        bucket_bytes=float(exchange.bucket_bytes),
        seconds=np.stack([np.maximum.reduce([kind.total for kind in kinds]) for kinds in mixed]),
        backward_s=np.stack([np.minimum.reduce([kind.backward for kind in kinds]) for kinds in mixed]),
        optimizer_s=np.stack([np.maximum.reduce([kind.optimizer for kind in kinds]) for kinds in mixed]),
        zero=exchange.zero,
        shard_size=exchange.shard_size,
        passes_wait=all(backend_of(kind) == "cpu" for kind in cost.cluster.device_kinds),
        pass_bytes=_pass_bytes(tables.bytes, exchange.zero),
        static_bytes=tables.bytes.static - (tables.bytes.states - states) - (tables.bytes.parameters - parameters),
        shared_bytes=shared,
        alone_bytes=alone,
        flight_bytes=tables.bytes.flight,
        leaving_bytes=tables.bytes.leaving,
        input_bytes=tables.bytes.inputs,
        beside_bytes=beside,
        most_bytes=np.ascontiguousarray(most),  # numba compiles for each layout in memory
        exchange_bytes=gradients,
        transfer_s=np.ascontiguousarray([_transfer_seconds(tables.bytes, pair, cost) for pair in places.links]),
        kind_of=places.kind_of,
        link_of=places.link_of,
        memory_limit=places.memory_limit,
        latency_s=places.latency_s,
        bucket_s=places.bucket_s,
        shared_s=places.shared_s,
    )


def _pass_bytes(stages: StageBytesTable, zero: int) -> Floats:
    """Return the gradient bytes whose all-reduce takes as long as a microbatch's gathers and scatters (half each)."""
    gathers = max(zero - 1, 0)
    return (gathers * stages.parameters + stages.exchange * (gathers > 0)) / 2


def _shared_bytes(parameters: Floats, states: Floats, zero: int, *, has_masters: bool) -> tuple[Floats, Floats]:
    """Return the static bytes that replicas shard, and those that exist only without other replicas.

    States are sharded; with ZeRO 3 also parameters, whose part is that of the master weights, if there are any.
    """
    nothing = np.zeros_like(states)
    if zero == 0:
        return nothing, nothing
    if zero < 3:
        return states, nothing
    return (states, parameters) if has_masters else (states + parameters, nothing)


def assume_in_flight(schedule: str, num_microbatches: int, num_ranks: int, kind: str) -> Integers:
    """Return the microbatches in flight on a rank of a stage, shape (D, D + 1), entry [ranks before it, replicas].

    All microbatches of the rank for GPipe, fewer for 1F1B and other schedules; one in inference, where a microbatch is
    held only while it is computed.
    """
    behind, take = np.meshgrid(np.arange(num_ranks), np.maximum(np.arange(num_ranks + 1), 1), indexing="ij")
    rounds = -(-num_microbatches // take)
    if kind == "inference":
        rounds = np.minimum(rounds, 1)
    elif schedule != "gpipe":
        rounds = np.minimum(rounds, -(-(num_ranks - behind) // take))
    counts: Integers = rounds.astype(np.int64)
    return counts


def _transfer_seconds(stages: StageBytesTable, pair: tuple[int, int], cost: CostModel) -> list[float]:
    """Return seconds per microbatch to send values over each boundary and their gradients back; 0 before layer 0.

    A pair of one rank with itself means no link, and takes no time.
    """
    if pair[0] == pair[1]:
        return [0.0] * len(stages.crossing_forward)
    seconds = [0.0]
    for forward, backward in zip(stages.crossing_forward[1:], stages.crossing_backward[1:], strict=True):
        sizes = [num_bytes for num_bytes in (forward, backward) if num_bytes]
        seconds.append(sum(cost.collective_seconds("send", pair, num_bytes) for num_bytes in sizes))
    return seconds
