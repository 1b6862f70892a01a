"""Exact assignment of stages to unequal devices: which devices get which layers, in which order.

The model. Layers 0..L-1 in order; devices in classes of equal ones (`groups`). A stage holds layers i:j on a group g of
devices, of which device d computes m_d of the M microbatches, so many that all are done soonest (`shares`). With

    t_d = seconds of forward and backward of one microbatch on device d,  t = min t_d
    x = what enters the stage per microbatch and returns, over the slowest link between its group and the one before
    e, o = exchange of gradients in the group, optimizer on its slowest device              as in `slicing`

a mapping costs, as a slicing does,

    f · sum over stages (t + x)  +  max over stages (max_d m_d max(t_d, x) - f max(t, x) + e + o)

with f = 1 in training, f = 0 in inference. A device fits if what `slicing` adds up for m_d microbatches is within its
own memory; with 1F1B min(m_d, 1 + ceil(b m_d / M)) of them are in flight, b the devices of the stages behind.

The method. `slicing` keeps devices in one order and asks how many each stage takes; here the state are the layers and
the devices that are left of each class, and the devices of the stage before as far as they say over which link its
values come. All orders of the devices are gone through, for every threshold on the second term (`thresholds`). With
counts n_k of K classes there are Π (n_k + 1) states instead of Π n_k! orders.

Sources: Zheng et al., "Alpa" (OSDI 2022), section 5.2 (enumeration of the bottleneck); Park et al., "HetPipe" (ATC
2020), section 7 (partition by the memory and speed of each device); Strati et al., "Sailor" (SOSP 2025), section 4
(counts of devices left as states).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np

from meshwright.planner.methods.unequal.stage_table import (
    MappingProblem,
    MappingTables,
    StageTable,
    bottleneck_of,
    estimate_stages,
    fill_tables,
)
from meshwright.planner.thresholds import minimise_over_thresholds
from meshwright.spec import PlanError

# Entries of the tables of one threshold: 16 bytes each, and at most so many stages are tried for each.
MAX_ENTRIES = 4_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Mapping:
    """Stages of layers ``bounds[s]`` on groups ``groups[s]`` of the problem; seconds and their two terms."""

    bounds: tuple[tuple[int, int], ...]
    groups: tuple[int, ...]
    seconds: float
    sum_s: float
    bottleneck_s: float


def solve_mapping(problem: MappingProblem, *, cutoff_s: float = np.inf) -> Mapping | None:
    """The cheapest mapping that fits and uses every device; None if there is none, or none below ``cutoff_s``.

    Exact up to rounding, and the same for the same input. Raises PlanError for more states than `MAX_ENTRIES` allows.
    """
    tables = make_tables(problem)
    stages = estimate_stages(problem)

    def solve(theta: float) -> tuple[Mapping | None, float]:
        above = fill_tables(problem, stages, theta, tables)
        return _read_mapping(problem, stages, tables), above

    return minimise_over_thresholds(solve, cutoff_s)


def num_entries(num_layers: int, sizes: Sequence[int], num_sets: int) -> int:
    """Entries of the tables of a problem."""
    return int(np.prod(np.asarray(sizes, np.float64) + 1)) * (num_layers + 1) * num_sets


def make_tables(problem: MappingProblem) -> MappingTables:
    """Room for a problem, and which state follows which. Raises PlanError for too many states."""
    num_sets = len(problem.link_of)
    if num_entries(problem.num_layers, problem.sizes.tolist(), num_sets) > MAX_ENTRIES:
        raise PlanError(
            f"{problem.sizes.tolist()} devices of {len(problem.sizes)} classes were given for {problem.num_layers} "
            f"layers; the exact mapping keeps up to {MAX_ENTRIES:,} sums. Merge classes, or layers."
        )
    states = np.array(list(product(*(range(size + 1) for size in problem.sizes.tolist()))), np.int64)
    strides = np.cumprod([1, *(problem.sizes[::-1] + 1)])[-2::-1]
    after = states[:, None, :] - problem.counts[None, :, :]
    following = np.where((after >= 0).all(axis=2), after @ strides, -1)
    shape = (len(states), problem.num_layers + 1, num_sets)
    return MappingTables(
        sums=np.empty(shape),
        stops=np.zeros(shape, np.int32),
        takes=np.zeros(shape, np.int32),
        following=following,
        left=states.sum(axis=1),
    )


def _read_mapping(problem: MappingProblem, stages: StageTable, tables: MappingTables) -> Mapping | None:
    """The mapping of least sum that filled tables hold; None if there is none."""
    state, layer, before = len(tables.left) - 1, 0, 0
    sum_s = float(tables.sums[state, layer, before])
    if not np.isfinite(sum_s):
        return None
    bounds, groups, bottleneck_s = [], [], 0.0
    while layer < problem.num_layers:
        stop, group = int(tables.stops[state, layer, before]), int(tables.takes[state, layer, before])
        own = int(problem.set_of[group])
        transfer = float(problem.transfer_s[problem.link_of[before, own], layer])
        bottleneck_s = max(bottleneck_s, bottleneck_of(problem, stages, group, layer, stop, transfer))
        bounds.append((layer, stop))
        groups.append(group)
        state, layer, before = int(tables.following[state, group]), stop, own
    return Mapping(
        bounds=tuple(bounds),
        groups=tuple(groups),
        seconds=sum_s + bottleneck_s,
        sum_s=sum_s,
        bottleneck_s=bottleneck_s,
    )
