"""Jitter: random factors on the times of instructions, drawn by what an instruction is, not by order of evaluation.

    factor of an instruction = exp(spread · z) · (straggler factor, with its probability)

z is standard normal. Both are hashes of (seed, effect, rank, step) and, for a draw per instruction, (opcode, stage,
microbatch, bytes): so they do not depend on the order of evaluation, on the number of steps or on the schedule, and two
schedules are compared under the same luck. A send has the factor of its sender, a gradient sum that of its lowest
rank, because all members take the same time. Receives take no time themselves. The hash is SplitMix64's finaliser
(Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators, OOPSLA 2014); normal numbers are Box and Muller's.
"""

from __future__ import annotations

from dataclasses import replace
from functools import reduce

import numpy as np
from numpy.typing import NDArray

from meshwright.simulator.matching import rank_of_streams
from meshwright.simulator.network import Network, collectives, durations, routes, with_durations
from meshwright.simulator.simulate import instruction_columns
from meshwright.simulator.unroll import Unrolled
from meshwright.spec import Cluster, Program, ScenarioError, to_seconds
from meshwright.spec.instructions import COMPUTATIONS, STASHING, UPDATES
from meshwright.spec.scenario import Jitter, Scenario
from meshwright.spec.units import MOST_PICOSECONDS, PICOSECONDS_PER_SECOND

Floats = NDArray[np.float64]
_COMPUTED = np.array([*COMPUTATIONS, *UPDATES, *STASHING])


def has_jitter(scenario: Scenario) -> bool:
    """Whether the scenario makes the time of a step random."""
    return any(
        effect.spread or (effect.straggler_probability and effect.straggler_factor != 1)
        for effect in scenario.effects_of(Jitter)
    )


def with_jitter(
    program: Program, unrolled: Unrolled, scenario: Scenario, cluster: Cluster, seed: int, width: int = 1
) -> Unrolled:
    """Return the unrolled program with the random durations of a seed.

    Rank r is device r of the cluster, or a tensor-parallel group of ``width`` devices (`spec.teams`), which is as slow
    as its slowest device. Raises ScenarioError for a time that the simulation cannot represent.
    """
    network = unrolled.network
    members = (jitter_factors(program, unrolled, scenario, cluster, seed, (width, place)) for place in range(width))
    factor = reduce(np.maximum, members)
    _share_in_collectives(network, factor)
    usual_ps = durations(network)
    drawn_ps = np.rint(usual_ps * factor)
    if drawn_ps.max(initial=0) > MOST_PICOSECONDS:
        raise ScenarioError(
            f"jitter: an instruction takes {drawn_ps.max() / PICOSECONDS_PER_SECOND:.3g} s, more than a simulation can "
            f"hold ({to_seconds(MOST_PICOSECONDS):.0f} s). Give a smaller spread or straggler_factor."
        )
    duration_ps = drawn_ps.astype(np.int64)
    # A link is held for at least 1 ps.
    np.maximum(duration_ps, (usual_ps > 0) & (routes(network) >= 0), out=duration_ps)
    scale = (duration_ps / np.maximum(usual_ps, 1))[network.mark_instruction]
    shift_ps = np.rint(network.mark_shift_ps * scale).astype(np.int64)
    return replace(unrolled, network=with_durations(network, duration_ps, shift_ps))


def jitter_factors(
    program: Program,
    unrolled: Unrolled,
    scenario: Scenario,
    cluster: Cluster,
    seed: int,
    member: tuple[int, int] = (1, 0),
) -> Floats:
    """Return the factor of each instruction, shape (n,), before members of a collective are made equal.

    ``member``: the number of devices of a tensor-parallel group, and the index of one of them.
    """
    columns = instruction_columns(program, unrolled)
    rank = rank_of_streams(program)[columns["track"]] * member[0] + member[1]
    computed = np.isin(columns["opcode"], _COMPUTED)
    factor = np.ones(len(rank))
    for place, effect in enumerate(scenario.effects):
        if not isinstance(effect, Jitter):
            continue
        with scenario.naming(place, "devices"):
            chosen = np.isin(rank, effect.devices.select(cluster, (scenario.seed or 0, place)))
        if effect.of != "all":
            chosen &= computed == (effect.of == "computations")
        which = np.flatnonzero(chosen)
        keys = [rank[which], columns["step"][which]]
        if effect.per == "instruction":
            keys += [columns[name][which] for name in ("opcode", "stage", "microbatch", "num_bytes")]
        factor[which] *= draw_factors(effect, (seed, place), keys)
    return factor


def draw_factors(effect: Jitter, seed: tuple[int, ...], keys: list[NDArray[np.integer]]) -> Floats:
    """Return a factor for each row of the keys, shape (n,); equal rows have equal factors."""
    state = np.full(len(keys[0]), 0x9E3779B97F4A7C15, np.uint64)
    for key in (*(np.full(len(keys[0]), part) for part in seed), *keys):
        state = _mix(state ^ _mix(key.astype(np.int64).view(np.uint64)))
    first, second, third = (_uniform(_mix(state + np.uint64(salt))) for salt in (1, 2, 3))
    factor = np.exp(effect.spread * np.sqrt(-2 * np.log(first)) * np.cos(2 * np.pi * second))
    straggles: Floats = np.where(third < effect.straggler_probability, effect.straggler_factor, 1.0)
    drawn: Floats = factor * straggles
    return drawn


def _mix(state: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Apply SplitMix64: one step of its sequence, and its finaliser."""
    state = state + np.uint64(0x9E3779B97F4A7C15)
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: NDArray[np.uint64] = state ^ (state >> np.uint64(31))
    return mixed


def _uniform(state: NDArray[np.uint64]) -> Floats:
    """Map to floats strictly between 0 and 1."""
    uniform: Floats = ((state >> np.uint64(12)).astype(np.float64) + 0.5) / 2.0**52
    return uniform


def _share_in_collectives(network: Network, factor: Floats) -> None:
    """Give all members of a collective the factor of the lowest rank, in place."""
    number = collectives(network)
    members = np.flatnonzero(number >= 0)
    # Instructions are numbered stream by stream, so the first is that of the lowest rank.
    _, first, inverse = np.unique(number[members], return_index=True, return_inverse=True)
    factor[members] = factor[members[first]][inverse]
