"""Find the best order for a plan's own stages, compare it with every named schedule, and simulate it.

    stage_times    what the simulator charges for each stage              (simulator.stage_times)
    limits         a rank's memory less what it holds besides microbatches, by the simulated named schedules
    find_orders    the shortest order under the model of `program.found`
    simulate       that order and every named schedule of this layout; the fastest that fits is the result

So in the simulator, the result is never slower than the plan's own schedule or a named one that takes these stages and
fits. The model of the search has no queues on links, so its order may be slower there; then the plan follows the
fastest named schedule by name (the runtime bounds gradients in flight for named schedules only, so a file would need
more memory), and the file still contains its order. An order for stages on parallel branches depends on the branches,
so its plan states which stages feed which.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from meshwright.cost import CostModel
from meshwright.cost.memory import MemoryLimit
from meshwright.cost.without import without_devices
from meshwright.planner.evaluate import RankedPlan, evaluate_plan
from meshwright.planner.layouts import memory_limit
from meshwright.program import (
    SCHEDULE_LAYOUTS,
    SCHEDULES,
    FoundOrders,
    Order,
    compute_orders,
    find_orders,
    with_schedule,
    write_orders,
)
from meshwright.simulator import Contention, stage_times
from meshwright.spec import Cluster, Graph, Opcode, Plan, PlanError, format_seconds, with_branches, write_text
from meshwright.spec.plan import ScheduleName

# How often limits are tightened if the simulator reports more memory than they allow.
_MAX_ATTEMPTS = 4
_RELEASING = (Opcode.BACKWARD, Opcode.BACKWARD_WEIGHT)


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundPlan:
    """The plan under the fastest order, simulated, and the text of the file with that order.

    ``model`` is the result of the order search, None if no order fits. ``named`` are the simulated plans under the
    named schedules for these stages and under the plan's own, fastest first; ``name`` is the one whose order was
    chosen, "" for a new order.
    """

    best: RankedPlan
    text: str
    model: FoundOrders | None
    named: tuple[RankedPlan, ...]
    name: str

    def explain(self) -> str:
        """Return one or two lines for printing."""
        fitting = [item for item in self.named if item.fits]
        step = f"{format_seconds(self.best.step_time_s)} per step"
        if self.name:
            words = f"No order was found that is faster than {self.name}, which the plan follows: {step}."
        elif fitting:
            share = 1 - self.best.step_time_s / fitting[0].step_time_s
            words = f"An order was found: {step}, {100 * share:.1f} % less than {fitting[0].plan.schedule} takes."
        else:
            which = "fits" if self.named else "takes these stages"
            words = f"An order was found: {step}. No named schedule {which}."
        if self.model is None:
            return words
        length_ps = self.model.named_ps.get(self.name) if self.name else self.model.length_ps
        if length_ps is None or not self.model.bound_ps:
            return words
        gap = length_ps / self.model.bound_ps - 1
        return f"{words}\nBy stage times alone it is at most {100 * gap:.1f} % longer than the shortest one."


def find_order(
    plan: Plan,
    graph: Graph,
    cluster: Cluster,
    path: Path,
    *,
    cost: CostModel | None = None,
    whole: bool = False,
    memory: MemoryLimit | None = None,
    contention: Contention = "queued",
) -> FoundPlan:
    """Find the fastest order of a plan's stages, write it to ``path`` (.csv) and let the plan follow it.

    If nothing faster is found, the plan follows a named schedule, or its own, by name.

    ``whole`` allows only whole backwards, as the runtime executes them and as plans with activations in host memory
    need them. ``memory`` limits what the plan may use of a device. Raises PlanError if no order fits, the plan is
    asynchronous, does not match the graph or the cluster, or is not for training.
    """
    cost = cost or CostModel(cluster=cluster, precision=plan.workload.precision)
    whole = whole or plan.offload.activations == "host"

    def evaluate(item: Plan) -> RankedPlan:
        return evaluate_plan(item, graph, cluster, cost, memory=memory, contention=contention)

    if plan.is_asynchronous:
        raise PlanError(
            f"The plan follows {plan.schedule}, which is asynchronous and trains differently; orders are found for "
            "synchronous steps only. Give --schedule 1f1b, or another synchronous schedule."
        )
    branched = with_branches(plan, graph)
    times = stage_times(branched, graph, without_devices(cost, plan.idle))
    named = sorted(_named(plan, evaluate, whole=whole), key=lambda item: item.step_time_s)
    best, model = next((item for item in named if item.fits), None), None
    text = "" if best is None else write_orders(best.plan, compute_orders(best.plan)).text
    kept = np.asarray(times.kept_bytes, np.int64)
    memory = memory or MemoryLimit()
    limits = _limits(kept, named, [memory_limit(cluster, rank, memory) for rank in range(plan.num_ranks)])
    with tempfile.TemporaryDirectory() as folder:
        for attempt in range(_MAX_ATTEMPTS):
            try:
                found = find_orders(branched, replace(times, limit_bytes=limits), whole=whole)
            except PlanError:
                break
            orders = tuple(Order(rank=rank, columns=columns) for rank, columns in enumerate(found.columns))
            written = write_orders(branched, orders).text
            item = evaluate(with_schedule(branched, str(write_text(written, Path(folder) / f"{attempt}.csv"))))
            if item.fits:
                model = found
                if best is None or item.step_time_s < best.step_time_s:
                    best, text = item, written
                break
            excess = np.array(item.reserved_bytes) - np.array(item.memory_limit_bytes)
            limits = np.where(excess > 0, np.maximum(_held(kept, orders) - excess, 0), limits)
    if best is None:
        raise PlanError(
            f"No order of these stages fits: {plan.describe()}. Choose smaller microbatches or more stages."
        )
    name = best.plan.schedule if best in named else ""
    write_text(text, path)
    if not name:
        best = replace(best, plan=with_schedule(branched, str(path)))
    return FoundPlan(best=best, text=text, model=model, named=tuple(named), name=name)


def _named(plan: Plan, evaluate: Callable[[Plan], RankedPlan], *, whole: bool) -> Iterator[RankedPlan]:
    """Evaluate the plan under every named schedule that takes its stages as they are, and under its own.

    With ``whole``, only schedules with whole backwards; of stages alone on a rank, only schedules made for such
    layouts.
    """
    others = [with_schedule(plan, name) for name in SCHEDULES if not whole or _is_made_for(name, plan)]
    for other in dict.fromkeys([*others, plan]):
        try:
            orders = compute_orders(other)
        except PlanError:
            continue
        if not whole or not any((order.columns.opcode == Opcode.BACKWARD_INPUT).any() for order in orders):
            yield evaluate(other)


def _is_made_for(name: ScheduleName, plan: Plan) -> bool:
    """Return whether a schedule has its own order for this layout, rather than that of another schedule."""
    return plan.has_virtual_stages or SCHEDULE_LAYOUTS[name] == "single"


def _limits(kept: NDArray[np.int64], named: Sequence[RankedPlan], limits: Sequence[int]) -> NDArray[np.int64]:
    """Return the bytes of microbatches that each rank may hold: its memory less the most that it holds besides."""
    besides = [np.array(item.peak_memory_bytes) - _held(kept, compute_orders(item.plan)) for item in named]
    most = np.max(besides, axis=0, initial=0) if besides else 0
    return np.maximum(np.array(limits, np.int64) - most, 0)


def _held(kept: NDArray[np.int64], orders: Sequence[Order]) -> NDArray[np.int64]:
    """Return the most bytes of microbatches that each rank holds at once, shape (ranks,)."""
    most = []
    for order in orders:
        opcode, stage = order.columns.opcode, order.columns.stage
        change = kept[stage] * ((opcode == Opcode.FORWARD).astype(np.int64) - np.isin(opcode, _RELEASING))
        most.append(int(np.cumsum(change).max(initial=0)))
    return np.array(most, np.int64)
