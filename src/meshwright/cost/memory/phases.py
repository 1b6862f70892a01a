"""Memory that a forward, a backward and the optimizer step of a stage add, at their peaks and afterwards.

Every allocation of a stage is followed for two microbatches (`walk`). For each computation, two sums by part are
recorded:

    most     bytes in use at the computation's peak, minus the bytes in use at its start
    after    bytes in use at its end, minus the bytes in use at its start; over a step they add up to 0

The first backward of a step differs from later ones, because gradients accumulate over the microbatches: the first one
makes the gradients, and copies those that are reduced into buckets; later ones add to them. Not included are inputs
(present during the whole step), received values (present until the backward is done), and the end of sent gradients.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from meshwright.cost.memory.walk import StageWalk
from meshwright.cost.optimizers import OptimizerLoop
from meshwright.spec.memory import GRADIENTS, INPUTS, MEMORY_PARTS, RECEIVED, SENT, WORKSPACE

if TYPE_CHECKING:
    from collections.abc import Mapping, Set

    from meshwright.cost.memory.kept import Backend
    from meshwright.cost.memory.ledger import MemoryEvents
    from meshwright.cost.memory.shared_units import SharedUnits
    from meshwright.spec import Graph, StageSlice, Workload

_ELSEWHERE = [RECEIVED, INPUTS]


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """The memory that one computation adds at its peak (``most``) and leaves at its end (``after``).

    Both are bytes by part, in the order of `MEMORY_PARTS`; ``after`` is negative for freed memory.
    """

    most: tuple[int, ...]
    after: tuple[int, ...]

    @property
    def most_bytes(self) -> int:
        """Bytes that the computation adds at its peak, over all parts."""
        return sum(self.most)

    @property
    def after_bytes(self) -> int:
        """Bytes that the computation adds at its end, over all parts; negative if it frees memory."""
        return sum(self.after)


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePhases:
    """The memory that each computation of a stage adds.

    ``first``: the first backward of a step; ``later``: any later backward.
    """

    forward: Phase
    first: Phase
    later: Phase
    optimizer: Phase


def trace_phases(
    graph: Graph,
    stage: StageSlice,
    workload: Workload,
    batch_size: int,
    *,
    device: Backend,
    loop: OptimizerLoop,
    bucketed: Set[int],
    shared: SharedUnits | None = None,
    activations_away: bool = False,
) -> StagePhases:
    """Return the memory that each computation of a stage adds, for microbatches of ``batch_size`` samples.

    The arguments are those of `trace_stage`, which raises the same errors.
    """
    walk = StageWalk(graph, stage, workload, batch_size, device, loop, bucketed, shared, activations_away)
    ends = [0]

    def end() -> None:
        ends.append(walk.ledger.num_events)

    # A step of two microbatches, one after the other.
    for _ in range(2):
        walk.forward(0)
        end()
        if walk.trains:
            walk.backward(0)
        end()
    if walk.trains:
        walk.optimize(first=False)
    end()
    returned = sum(channel.backward_bytes(graph, batch_size, workload.float_bytes) for channel in stage.incoming)
    forward, first, _, later, optimizer = _phases(walk.ledger.events(), ends)
    return StagePhases(
        forward=forward, first=_with_sent(first, returned), later=_with_sent(later, returned), optimizer=optimizer
    )


def count_phases(kept: Mapping[int, int], gradient_bytes: int, sent_bytes: int, workspace_bytes: int) -> StagePhases:
    """Return the phases of a graph that contains its own backward, from sums instead of single allocations.

    ``kept``: bytes that a microbatch keeps, by part. ``workspace_bytes``: a workspace in each forward and backward.
    ``sent_bytes``: gradients sent to earlier stages. All gradients exist from the start of the first backward.
    """

    def phase(after: Mapping[int, int], extra: Mapping[int, int]) -> Phase:
        parts = range(len(MEMORY_PARTS))
        return Phase(
            most=tuple(max(after.get(part, 0), 0) + extra.get(part, 0) for part in parts),
            after=tuple(after.get(part, 0) for part in parts),
        )

    freed = {part: -num_bytes for part, num_bytes in kept.items()} | {SENT: sent_bytes - kept.get(SENT, 0)}
    work = {WORKSPACE: workspace_bytes, SENT: min(sent_bytes, kept.get(SENT, 0))}
    return StagePhases(
        forward=phase(kept, {WORKSPACE: workspace_bytes}),
        first=phase(freed | {GRADIENTS: gradient_bytes}, work),
        later=phase(freed, work),
        optimizer=phase({GRADIENTS: -gradient_bytes}, {}),
    )


def _phases(events: MemoryEvents, ends: list[int]) -> list[Phase]:
    """Return the phase between each two ends."""
    changes = np.zeros((len(events.part), len(MEMORY_PARTS)), np.int64)
    changes[np.arange(len(events.part)), events.part] = events.num_bytes
    changes[:, _ELSEWHERE] = 0
    phases = []
    for start, stop in pairwise(ends):
        levels = np.vstack([np.zeros((1, len(MEMORY_PARTS)), np.int64), changes[start:stop].cumsum(axis=0)])
        most = levels[int(levels.sum(axis=1).argmax())]
        phases.append(Phase(most=tuple(most.tolist()), after=tuple(levels[-1].tolist())))
    return phases


def _with_sent(backward: Phase, sent_bytes: int) -> Phase:
    """Return the backward with sent gradients until they have left; the walk drops them at the backward's end."""
    after = list(backward.after)
    after[SENT] += sent_bytes
    most = backward.most if backward.most_bytes >= sum(after) else tuple(after)
    return Phase(most=most, after=tuple(after))
