"""The result of a search (`Plans`): ranked plans, and texts that explain why the best plan wins."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from meshwright.planner.evaluate import RankedPlan, StepInterval
from meshwright.planner.ranking import is_as_fast
from meshwright.spec import Plan, PlanError, format_bytes, format_count, format_percent, format_seconds
from meshwright.spec.html import Printer, html_table
from meshwright.spec.memory import name_part
from meshwright.spec.offload import ON_DEVICE
from meshwright.spec.plan import name_stages

# Step times that differ by less than this share are called equal: the simulator's picoseconds are below any real
# accuracy.
_EQUAL_SHARE = 1e-6
# The smallest printed difference is a tenth of a per cent.
_TOLD_SHARE = 5e-4
# Shorter times only separate events (`simulator.program_estimate`) and are not printed.
_SHORTEST_TOLD_S = 1e-9
# Plans with more stages are described by ranges instead of stage by stage.
MAX_STAGES_IN_WORDS = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Coverage:
    """The extent of a search: how many configurations it covered.

    ``num_considered`` counts all configurations that methods covered, ``num_pruned`` those of them that were ruled out
    without a simulation, ``num_simulated`` the simulated plans. ``stopped``: what ended the search early ("the
    deadline", "an interrupt"), "" if the methods ended it. ``seconds``: duration of the search.
    """

    method: str
    seed: int
    num_considered: int
    num_pruned: int
    num_simulated: int
    stopped: str = ""
    seconds: float = field(default=0.0, compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plans:
    """The result of a search.

    ``ranked`` are the plans that fit into memory, faster ones first; among equally fast plans, those with less memory
    come first (`ranking`). ``rejected`` plans were simulated and need too much memory. ``refused`` plans could not be
    simulated; each comes with the reason. ``front`` is the Pareto front: no simulated plan is better in step time,
    reserved memory and price at once (without prices: in devices times step time). ``bound_s`` is a lower bound of the
    step time of all allowed plans, by the same op costs; 0 if nothing was proven. If ``is_bound_of_rules``, the bound
    covers only plans whose ops are split by the sharding rules, not placements that a method chose itself. ``notes``
    are sentences of the search methods.
    """

    ranked: tuple[RankedPlan, ...]
    rejected: tuple[RankedPlan, ...]
    coverage: Coverage
    evaluate: Callable[[Plan], RankedPlan] = field(repr=False, compare=False)
    predict_interval: Callable[[Plan], StepInterval] = field(repr=False, compare=False)
    refused: tuple[tuple[Plan, str], ...] = ()
    front: tuple[RankedPlan, ...] = ()
    bound_s: float = 0.0
    is_bound_of_rules: bool = False
    notes: tuple[str, ...] = ()

    @property
    def best(self) -> RankedPlan:
        """The recommended plan: the one with the least memory among the plans that are as fast as the fastest."""
        return self.ranked[0]

    @property
    def gap(self) -> float | None:
        """The share by which the best plan's step exceeds the lower bound (0.1: 10 %); None without a bound."""
        return self.best.step_time_s / self.bound_s - 1 if self.bound_s > 0 else None

    def interval(self, plan: Plan | None = None) -> StepInterval:
        """Return the 80 % interval of the step time of a plan (default: the best)."""
        item = self.best if plan is None else next((item for item in self.ranked if item.plan == plan), None)
        if item is not None and item.interval is not None:
            return item.interval
        return self.predict_interval(self.best.plan if plan is None else plan)

    def rows(self) -> list[dict[str, Any]]:
        """Return one dict per ranked plan, best first.

        Keys: ``place`` (from 1), ``plan`` (in words), ``num_devices``, ``num_stages``, ``num_positions`` (length of the
        pipeline; under some schedules, each position has several stages), ``replicas`` (per stage), ``tensor``,
        ``sequence_parallel``, ``has_own_placements``, ``context``, ``expert``, ``zero``, ``shard_size`` (0: all
        replicas), ``recompute``, ``offload``, ``num_microbatches``, ``microbatch_size``, ``schedule``, ``step_time_s``,
        ``step_interval_s`` (80 %; None if not simulated), ``samples_per_s``, ``tokens_per_s`` and
        ``tokens_per_s_per_device`` (None for models without tokens), ``mfu_share``, ``peak_memory_bytes`` and
        ``reserved_memory_bytes`` (of the fullest rank), ``bubble_share``, ``estimate_s``, and the terms of the
        breakdown: ``compute_s``, ``inside_s`` (collectives inside passes), ``bubble_s``, ``communication_s``,
        ``exchange_s``, ``optimizer_s``. On request also ``latency_s``, ``makespan_s``, the keys of `PlanPrice` and
        ``price_per_million_tokens``.
        """
        return [_row(place, item) for place, item in enumerate(self.ranked, 1)]

    def search_row(self) -> dict[str, Any]:
        """Return how the plans were found, as a dict.

        Keys: those of `Coverage`; ``bound_s``, ``gap_share`` and ``bound_covers`` (None if no bound was proven);
        ``front``, each with ``plan``, ``step_time_s``, ``peak_memory_bytes``, ``reserved_memory_bytes``,
        ``device_seconds`` and, with prices, the keys of `PlanPrice`; ``notes``.
        """
        front = [
            {
                "plan": summarise(item.plan),
                "step_time_s": item.step_time_s,
                "peak_memory_bytes": max(item.peak_memory_bytes),
                "reserved_memory_bytes": max(item.reserved_bytes),
                "device_seconds": item.device_seconds,
                **(item.price.row() if item.price else {}),
            }
            for item in self.front
        ]
        covers = "plans whose ops are split by the sharding rules" if self.is_bound_of_rules else "all allowed plans"
        proven = {
            "bound_s": self.bound_s or None,
            "gap_share": self.gap,
            "bound_covers": covers if self.bound_s else None,
        }
        return {**asdict(self.coverage), **proven, "front": front, "notes": list(self.notes)}

    def explain(self, plan: Plan | None = None) -> str:
        """Return a text about a plan (default: the best): the parts of its step, its memory, and comparisons.

        The best plan is compared with the next best, other plans with the best. Then follows the extent of the search.
        Raises PlanError if the plan does not match the graph, the cluster or the workload.
        """
        item = self.best if plan is None else self._find(plan)
        lines = [explain_prediction(item)]
        if item.plan != self.best.plan:
            lines.append(self.why_not(item.plan))
        elif len(self.ranked) > 1:
            runner_up = self.ranked[1]
            told = explain_difference(runner_up, item)
            if runner_up.makespan_s is not None:
                told = f"It answers a batch in {format_seconds(runner_up.makespan_s)}."
            lines.append(f"Next best: {summarise(runner_up.plan)}. {told}")
            lines += self._equal_line()
        lines += [self._search_line(), *self.notes]
        if self.refused:
            plan, reason = self.refused[0]
            lines.append(
                f"Left out {format_count(len(self.refused), 'plan')} that cannot be used. The first: "
                f"{summarise(plan)}: {reason}"
            )
        return "\n".join(lines)

    def _equal_line(self) -> list[str]:
        """Return the sentences on the plans that are as fast as the fastest; nothing if it is the only one."""
        fastest = min(self.ranked, key=lambda item: item.aimed_s)
        count = sum(is_as_fast(item, fastest) for item in self.ranked)
        if count == 1:
            return []
        slower = self.best.aimed_s / fastest.aimed_s - 1
        beside = f" The first is {format_percent(slower)} slower than the fastest." if slower >= _TOLD_SHARE else ""
        # A plan with a found order comes first, whatever memory it needs.
        peaks = [max(item.peak_memory_bytes) for item in self.ranked[:count]]
        ordered = " They are listed by memory." if peaks == sorted(peaks) else ""
        return [
            f"The predicted times of the first {count} plans differ by less than the prediction error; measure them to "
            f"find the fastest.{ordered}{beside}"
        ]

    def why_not(self, other: Plan) -> str:
        """Return a text that compares ``other`` with the best plan: its slower terms, or the memory that it lacks.

        ``other`` is simulated unless it is among the ranked plans. Raises PlanError if it does not match the graph, the
        cluster or the workload.
        """
        item = self._find(other)
        if item.plan == self.best.plan:
            return "This is the best plan found."
        if not item.fits:
            rank = item.fullest_rank
            return (
                f"{summarise(item.plan)} does not fit: rank {rank} ({name_stages(item.plan, rank)}) needs "
                f"{format_bytes(item.reserved_bytes[rank])}, {format_bytes(item.excess_bytes)} more than its "
                f"{format_bytes(item.memory_limit_bytes[rank])}; the largest part: {name_part(item.memory_owner)}. "
                f"Without the limit its step would take {format_seconds(item.step_time_s)}, that of the best plan "
                f"{format_seconds(self.best.step_time_s)}."
            )
        return f"{summarise(item.plan)}: {explain_difference(item, self.best)}"

    def _find(self, plan: Plan) -> RankedPlan:
        known = next((item for item in self.ranked if item.plan == plan), None)
        if known is not None:
            return known
        if plan.workload != self.best.plan.workload:
            raise PlanError(
                f"The plan to compare is for {plan.workload}, but these plans are for {self.best.plan.workload}. Give "
                "a plan for the same workload."
            )
        return self.evaluate(plan)

    def _repr_html_(self) -> str:
        rows = (
            (
                place,
                summarise(item.plan),
                format_seconds(item.step_time_s),
                f"{item.samples_per_s:.4g}" if item.tokens_per_s is None else f"{item.tokens_per_s:,.0f}",
                "" if item.mfu is None else format_percent(item.mfu, 0),
                format_bytes(item.reserved_bytes[item.fullest_rank]),
                format_percent(item.bubble_fraction),
            )
            for place, item in enumerate(self.ranked, 1)
        )
        rate = "samples/s" if self.best.tokens_per_s is None else "tokens/s"
        headings = ("", "plan", "step", rate, "MFU", "reserved memory", "bubble")
        return html_table(self._summary(), headings, rows, len(self.ranked))

    def _repr_pretty_(self, printer: Printer, cycle: bool) -> None:  # noqa: ARG002 - IPython's signature
        printer.text(self._summary())

    def _summary(self) -> str:
        return f"{format_count(len(self.ranked), 'plan')} that fit; best: {summarise(self.best.plan)}"

    def _search_line(self) -> str:
        coverage = self.coverage
        pruned = f" ({_large(coverage.num_pruned)} ruled out by bounds)" if coverage.num_pruned else ""
        text = (
            f"Searched by {coverage.method}: a space of {_large(coverage.num_considered)} plans{pruned}, "
            f"{coverage.num_simulated} simulated, of which {len(self.rejected)} need too much memory."
        )
        if coverage.stopped:
            text += f" The search was ended by {coverage.stopped}; better plans may exist."
        if self.gap is not None:
            which = "plan whose ops are split by the sharding rules" if self.is_bound_of_rules else "allowed plan"
            text += (
                f" By these costs, no {which} can take less than {format_seconds(self.bound_s)}; the best one takes "
                f"{format_percent(self.gap)} more."
            )
        return text


def explain_prediction(item: RankedPlan) -> str:
    """Return a text about a plan: lines for its step, the parts of the step, memory, and latency and price if known."""
    lines = [_headline(item), _step_line(item), _memory_line(item)]
    if item.makespan_s is not None:
        lines.append(f"A batch that arrives at once is answered in {format_seconds(item.makespan_s)}.")
    if item.latency_s is not None:
        lines.append(f"Latency: {format_seconds(item.latency_s)} for a microbatch that arrives alone.")
    if item.price is not None:
        lines.append(item.price.explain())
    return "\n".join(lines)


def summarise(plan: Plan) -> str:
    """Return a description of a plan in one line; many stages are given as ranges."""
    if len(plan.stages) <= MAX_STAGES_IN_WORDS:
        return plan.describe()
    span = _span(len(stage.ranks) for stage in plan.stages)
    replicas = f"{span} replica{'' if span == '1' else 's'}"
    microbatches = format_count(plan.num_microbatches, "microbatch", "microbatches")
    stages = f"{len(plan.stages)} stages × {replicas}"
    return f"{stages}, {microbatches} of {plan.microbatch_size}, {plan.schedule}{plan.describe_extras()}"


def _large(number: float) -> str:
    """Format a whole number up to a million, then a power of ten."""
    return f"{number:,.0f}" if number < 1e6 else f"{number:.1e}"


def _span(numbers: Iterable[int]) -> str:
    distinct = sorted(set(numbers))
    return str(distinct[0]) if len(distinct) == 1 else f"{distinct[0]}–{distinct[-1]}"


def _row(place: int, item: RankedPlan) -> dict[str, Any]:
    plan, sharding, rank, tokens_per_s = item.plan, item.plan.sharding, item.fullest_rank, item.tokens_per_s
    price = {} if item.price is None else item.price.row()
    if item.price is not None and item.sequence_length:
        price["price_per_million_tokens"] = item.price.per_million_samples / item.sequence_length
    return {
        "place": place,
        "plan": summarise(plan),
        "num_devices": plan.num_devices,
        "num_stages": len(plan.stages),
        "num_positions": len({stage.ranks for stage in plan.stages}),
        "replicas": [len(stage.ranks) for stage in plan.stages],
        "tensor": sharding.tensor,
        "sequence_parallel": sharding.sequence_parallel,
        "has_own_placements": bool(sharding.placements),
        "context": sharding.context,
        "expert": sharding.expert,
        "zero": plan.exchange.zero,
        "shard_size": plan.exchange.shard_size,
        "recompute": item.recompute or ("some" if plan.recompute else "none"),
        "offload": "none" if plan.offload == ON_DEVICE else plan.offload.describe(),
        "num_microbatches": plan.num_microbatches,
        "microbatch_size": plan.microbatch_size,
        "schedule": plan.schedule,
        "step_time_s": item.step_time_s,
        "step_interval_s": None if item.interval is None else [item.interval.low_s, item.interval.high_s],
        "samples_per_s": item.samples_per_s,
        "tokens_per_s": tokens_per_s,
        "tokens_per_s_per_device": None if tokens_per_s is None else tokens_per_s / plan.num_devices,
        "mfu_share": item.mfu,
        "peak_memory_bytes": item.peak_memory_bytes[rank],
        "reserved_memory_bytes": item.reserved_bytes[rank],
        "bubble_share": item.bubble_fraction,
        "estimate_s": item.estimate_s,
        **asdict(item.breakdown),
        **({} if item.latency_s is None else {"latency_s": item.latency_s}),
        **({} if item.makespan_s is None else {"makespan_s": item.makespan_s}),
        **price,
    }


def _headline(item: RankedPlan) -> str:
    rate = f"{item.samples_per_s:.4g} samples/s"
    if item.tokens_per_s is not None:
        each = item.tokens_per_s / item.plan.num_devices
        rate = f"{item.tokens_per_s:,.0f} tokens/s, {each:,.0f} per device"
    used = f"MFU {format_percent(item.mfu, 0)}, " if item.mfu is not None else ""
    return (
        f"{summarise(item.plan)}: {format_seconds(item.step_time_s)} per step, {rate}, {used}"
        f"bubble {format_percent(item.bubble_fraction)} of all device time."
    )


def _step_line(item: RankedPlan) -> str:
    parts = ", ".join(
        f"{name} {format_seconds(seconds)} ({format_percent(seconds / item.step_time_s, 0)})"
        for name, seconds in item.breakdown.terms().items()
        if seconds >= _SHORTEST_TOLD_S
    )
    return f"Step of rank {item.busiest_rank}, the busiest: {parts}."


def _memory_line(item: RankedPlan) -> str:
    rank = item.fullest_rank
    peak, most = item.reserved_bytes[rank], max(item.reserved_bytes)
    # On unequal devices, the rank with the least headroom need not hold the most.
    how = "at most " if peak == most else ""
    beside = "" if peak == most else f", which has the least to spare (others hold up to {format_bytes(most)})"
    return (
        f"Memory: {how}{format_bytes(peak)} of the {format_bytes(item.memory_limit_bytes[rank])} that a rank may "
        f"reserve, on rank {rank}{beside}; the largest part: {name_part(item.memory_owner)}."
    )


def explain_difference(item: RankedPlan, best: RankedPlan) -> str:
    """Return a sentence on how much slower or faster ``item`` is than ``best``, with the terms that differ.

    The term that contributes most to the total difference is named as the deciding one.
    """
    lost = item.step_time_s - best.step_time_s
    if abs(lost) <= _EQUAL_SHARE * best.step_time_s:
        return f"It is as fast: {format_seconds(item.step_time_s)} per step."
    sign = 1 if lost > 0 else -1
    ours = best.breakdown.terms()
    changes = {name: seconds - ours[name] for name, seconds in item.breakdown.terms().items()}
    ordered = sorted(changes.items(), key=lambda change: -sign * change[1])
    decisive, others = ordered[0], [change for change in ordered[1:] if abs(change[1]) > abs(lost) * 0.01]
    words = "loses" if lost > 0 else "gains"
    text = (
        f"It {words} {format_seconds(abs(lost))} per step ({format_percent(abs(lost) / best.step_time_s)}): "
        f"{decisive[0]} {_signed(decisive[1])} decides"
    )
    if others:
        text += "; " + ", ".join(f"{name} {_signed(change)}" for name, change in others)
    return text + "."


def _signed(seconds: float) -> str:
    return f"{'+' if seconds >= 0 else '−'} {format_seconds(abs(seconds))}"
