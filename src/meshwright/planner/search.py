"""Search for plans: slice exactly, simulate the most promising, rank by simulated step time.

search_plans  →  candidates (exact slicing per microbatch size, schedule, layout)
              →  choose  (best estimates first, half of the places for shapes not seen yet)
              →  evaluate (simulate; memory decided there; what does not fit makes room for the next best)
              →  Plans   (ranked; explain, why_not)
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import product

from meshwright.cost import CostModel
from meshwright.planner.adoption import DEFAULT_CHUNKS, adopt_schedule
from meshwright.planner.candidates import Candidate, CandidateSearch, Space
from meshwright.planner.diagnosis import raise_infeasible, require_possible
from meshwright.planner.evaluate import RankedPlan, evaluate_plan
from meshwright.planner.plans import Plans
from meshwright.program import OwnSchedule, name_schedule
from meshwright.spec import (
    Cluster,
    DeadlockError,
    EventSink,
    GradientExchange,
    Graph,
    MeshwrightError,
    NullSink,
    Offload,
    Plan,
    PlanError,
    ScheduleError,
    Workload,
    with_branches,
)
from meshwright.spec.exchange import WAVES
from meshwright.spec.offload import ON_DEVICE, check_offload
from meshwright.spec.own_code import order_file
from meshwright.spec.plan import BASIC_SCHEDULES, SCHEDULE_NAMES

# Microbatch sizes that are tried when none are given: each prices the whole graph anew (0.1 to 0.3 s at 6,000 ops).
MAX_MICROBATCH_SIZES = 12
# Instructions that are simulated in all, the first plan apart: building and simulating 100,000 takes about a second
# (own measurement, one Xeon core), and a plan for a large cluster has some hundred thousand.
MAX_INSTRUCTIONS = 600_000
# Plans that an own schedule may fail on before the search gives up on finding ones that it orders.
MAX_REFUSED = 64
# The best plans may have a layout that another schedule refuses, such as unlike replicas: so many are given to it.
LEAST_ADOPTED = 8


def search_plans(
    graph_for: Callable[[int], Graph],
    cluster: Cluster,
    workload: Workload,
    *,
    cost: CostModel | None = None,
    model: str = "",
    model_sizes: tuple[tuple[str, int], ...] = (),
    num_ranks: int | None = None,
    num_stages: int | None = None,
    max_plans: int = 8,
    microbatch_sizes: Sequence[int] | None = None,
    schedules: Sequence[str | OwnSchedule] = BASIC_SCHEDULES,
    num_chunks: int = DEFAULT_CHUNKS,
    memory_limit_bytes: int | None = None,
    exchange: GradientExchange | None = None,
    offload: Offload = ON_DEVICE,
    events: EventSink | None = None,
) -> Plans:
    """The best plans for a model on a cluster, fastest predicted step first.

    ``graph_for`` gives the graph for a microbatch size (the same one if its sizes are symbolic). Every plan uses
    exactly ``num_ranks`` ranks (default: the whole cluster) and, if given, ``num_stages`` stages.
    ``microbatch_sizes`` default to divisors of the global batch; ``memory_limit_bytes`` replaces every device's
    memory. ``schedules`` are names, references ``path/to/file.py:function`` of your own, such functions themselves, or
    files of orders (``path/to/orders.csv``); plans that an own schedule cannot order are left out. Slicings are
    searched for gpipe, 1f1b and your functions; others take the plans found for these (for 1f1b, if none of them is
    asked for), with layers dealt out anew and ``num_chunks`` stages on a rank where they need that (`adopt_schedule`).
    ``offload`` says what all plans keep away from devices.
    At most ``max_plans`` plans are returned, fewer if their simulation would take long. ``model``, ``model_sizes`` and
    the cluster's name are noted in the plans. The same input gives the same plans in the same order.

    Raises PlanError for an argument out of range, NoFeasiblePlanError if nothing fits; its message names the
    constraint that binds and what would make a plan possible. Raises ScheduleReferenceError for what is no schedule,
    ScheduleError or DeadlockError if own schedules order none of the plans that were tried.
    """
    events = events or NullSink()
    if max_plans < 1:
        raise PlanError(f"At most {max_plans} plans were asked for; ask for at least 1.")
    named = dict(name_schedule(schedule) for schedule in schedules)
    exchange = _checked(exchange or GradientExchange(), named)
    adopted = [name for name in named if _is_adopted(name)]
    searched = {name: content_hash for name, content_hash in named.items() if name not in adopted}
    space = Space(
        graph_for=graph_for,
        cluster=cluster,
        workload=workload,
        cost=cost or CostModel(cluster=cluster, precision=workload.precision),
        model=model,
        model_sizes=model_sizes,
        num_ranks=cluster.num_ranks if num_ranks is None else num_ranks,
        microbatch_sizes=_microbatch_sizes(workload, microbatch_sizes),
        schedules=tuple(searched) or (("1f1b",) if adopted else ()),
        schedule_hashes=searched,
        num_stages=num_stages,
        memory_limit_bytes=memory_limit_bytes,
        exchange=exchange.suited_to(""),
        offload=offload,
    )
    require_possible(space)
    check_offload(offload, cluster, space.num_ranks)
    search = CandidateSearch(space, events)
    candidates = search.run()

    def evaluate(plan: Plan, estimate_s: float | None = None) -> RankedPlan:
        graph = graph_for(plan.microbatch_size)
        return evaluate_plan(
            _branched(plan, graph),
            graph,
            cluster,
            space.cost,
            memory_limit_bytes=memory_limit_bytes,
            estimate_s=estimate_s,
        )

    fitting: list[RankedPlan] = []
    rejected: list[RankedPlan] = []
    refused: list[tuple[Plan, MeshwrightError]] = []
    instructions = 0
    tried: dict[Plan, RankedPlan] = {}
    wanted = max(max_plans, LEAST_ADOPTED) if adopted else max_plans
    todo: Iterator[Candidate] = choose(candidates, wanted)
    for candidate in _with_next_best(todo, tried, search):
        if len(fitting) == wanted or (fitting and len(rejected) > wanted) or len(refused) == MAX_REFUSED:
            break
        if fitting and instructions + num_instructions(candidate.plan) > MAX_INSTRUCTIONS:
            continue
        instructions += num_instructions(candidate.plan)
        events.progress("simulate plans", len(fitting), wanted)
        # The closed form knows the named schedules only.
        own = candidate.plan.has_own_schedule
        try:
            item = evaluate(candidate.plan, None if own else candidate.estimate_s)
        except (ScheduleError, DeadlockError) as error:
            if not own:
                raise
            refused.append((candidate.plan, error))
            continue
        tried[candidate.plan] = item
        (fitting if item.fits else rejected).append(item)
    events.progress("simulate plans", wanted, wanted)
    if refused and not fitting and not rejected:
        raise refused[0][1]
    if not fitting:
        raise_infeasible(space, rejected, evaluate, lambda relaxed: _has_plan(relaxed, evaluate))
    if adopted:
        others = _adopt(fitting, adopted, exchange, graph_for, space.cost, num_chunks, refused, evaluate)
        rejected += [item for item in others if not item.fits]
        fitting = [*(fitting if searched else ()), *(item for item in others if item.fits)]
        if not fitting:
            raise _nothing_adopted(adopted, rejected, refused)
    return Plans(
        ranked=tuple(sorted(fitting, key=lambda item: item.step_time_s)[:max_plans]),
        rejected=tuple(rejected),
        refused=tuple((plan, str(error)) for plan, error in refused),
        coverage=search.coverage,
        evaluate=evaluate,
    )


def _checked(exchange: GradientExchange, schedules: Collection[str]) -> GradientExchange:
    if exchange.staleness and WAVES not in schedules:
        raise PlanError(
            f"A staleness of {exchange.staleness} waves was given for {' and '.join(schedules)}; only {WAVES} has "
            "waves. Leave it out, or ask for that schedule too."
        )
    return exchange


def _branched(plan: Plan, graph: Graph) -> Plan:
    """The plan with its branches written down, where that can only help.

    Where stages have several replicas, a longer chain keeps more under way, and ranks that take turns wait less.
    """
    has_replicas = any(len(stage.ranks) > 1 for stage in plan.stages)
    return plan if has_replicas or plan.graph_hash != graph.content_hash else with_branches(plan, graph)


def _adopt(
    items: Iterable[RankedPlan],
    schedules: Sequence[str],
    exchange: GradientExchange,
    graph_for: Callable[[int], Graph],
    cost: CostModel,
    num_chunks: int,
    refused: list[tuple[Plan, MeshwrightError]],
    evaluate: Callable[[Plan], RankedPlan],
) -> list[RankedPlan]:
    """The plans under each of the schedules, simulated; those that cannot follow it are noted in ``refused``."""
    found: dict[Plan, RankedPlan] = {}
    for item, schedule in product(items, schedules):
        plan = item.plan
        try:
            plan = adopt_schedule(plan, schedule, graph_for(plan.microbatch_size), cost, num_chunks=num_chunks)
            plan = replace(plan, exchange=exchange.suited_to(schedule))
            if plan not in found:
                found[plan] = evaluate(plan)
        except (PlanError, ScheduleError, DeadlockError) as error:
            refused.append((plan, error))
    return list(found.values())


def _is_adopted(schedule: str) -> bool:
    """Whether plans are found for other schedules first: layouts of several stages on a rank, files of orders."""
    return order_file(schedule) is not None or (schedule in SCHEDULE_NAMES and schedule not in BASIC_SCHEDULES)


def _nothing_adopted(
    schedules: Sequence[str], rejected: Sequence[RankedPlan], refused: Sequence[tuple[Plan, MeshwrightError]]
) -> MeshwrightError:
    if refused and not rejected and not isinstance(refused[0][1], PlanError):
        return refused[0][1]
    reasons = [str(error) for _, error in refused[:1]]
    reasons += [f"{item.plan.describe()} needs too much memory." for item in rejected[-1:]]
    return PlanError(f"No plan that was found can follow {' or '.join(schedules)}. {' '.join(reasons)}")


def _with_next_best(
    candidates: Iterable[Candidate], tried: Mapping[Plan, RankedPlan], search: CandidateSearch
) -> Iterator[Candidate]:
    """The candidates that were not ``tried`` yet; after one that does not fit, the next best of its problem."""
    for first in candidates:
        candidate: Candidate | None = first
        while candidate is not None:
            if candidate.plan not in tried:
                yield candidate
            item = tried.get(candidate.plan)
            # Where devices have room and hosts have none, another slicing of the layers helps little.
            if item is None or item.excess_bytes <= 0:
                break
            candidate = search.next_best(candidate, item.peak_memory_bytes)


def _has_plan(space: Space, evaluate: Callable[[Plan], RankedPlan]) -> bool:
    """Whether any plan of a space fits."""
    search = CandidateSearch(space, NullSink())
    tried: dict[Plan, RankedPlan] = {}
    for candidate in _with_next_best(search.run(), tried, search):
        with suppress(ScheduleError, DeadlockError):
            tried[candidate.plan] = evaluate(candidate.plan)
            if tried[candidate.plan].fits:
                return True
    return False


def choose(candidates: Sequence[Candidate], max_plans: int) -> Iterator[Candidate]:
    """The order in which candidates (cheapest first) are simulated: the first half of the places goes to the cheapest.

    The second half goes to the cheapest of every shape (replicas per stage) not taken yet, then to the rest.
    """
    first = list(candidates[: (max_plans + 1) // 2])
    yield from first
    taken = {candidate.shape for candidate in first}
    later: list[Candidate] = []
    for candidate in candidates[len(first) :]:
        if candidate.shape in taken:
            later.append(candidate)
        else:
            taken.add(candidate.shape)
            yield candidate
    yield from later


def num_instructions(plan: Plan) -> int:
    """About how many instructions a step has: forwards, backwards, and four transfers between neighbouring stages."""
    return plan.num_microbatches * (6 * len(plan.stages) - 4)


def _microbatch_sizes(workload: Workload, given: Sequence[int] | None) -> tuple[int, ...]:
    """Sizes to try, ascending. Raises PlanError for one that does not divide the batch."""
    batch = workload.global_batch
    if given is not None:
        wrong = [size for size in given if size < 1 or batch % size]
        if wrong or not given:
            raise PlanError(
                f"A global batch of {batch} samples does not divide into microbatches of {wrong or 'no size'}. "
                f"Choose sizes that divide {batch}: {', '.join(map(str, _divisors(batch)[:12]))}."
            )
        return tuple(sorted(set(given)))
    divisors = _divisors(batch)
    if len(divisors) <= MAX_MICROBATCH_SIZES:
        return tuple(divisors)
    # Evenly spread over the scale of sizes: the divisor nearest to each step of a geometric ladder.
    steps = [batch ** (k / (MAX_MICROBATCH_SIZES - 1)) for k in range(MAX_MICROBATCH_SIZES)]
    return tuple(sorted({min(divisors, key=lambda size: (abs(size / step - 1), size)) for step in steps}))


def _divisors(number: int) -> list[int]:
    small = [k for k in range(1, int(number**0.5) + 1) if number % k == 0]
    return sorted({*small, *(number // k for k in small)})
