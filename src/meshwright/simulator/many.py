"""Simulate many plans of one graph and cluster on all cores; each result equals that of `simulate_plan`.

Most of the time for a plan is spent in Python (building and estimating its program), which runs on one core per
process. So plans are distributed to forks of this process: they already have graph, costs and compiled loops, receive
the index of a plan and send its result back. The first plan is simulated in this process, to load everything and to
measure whether forking pays for the rest: forks and their results cost about 50 ms. If processes cannot fork (Windows;
macOS, whose libraries do not support it), or if other threads run, which might hold a lock during the fork, all plans
are simulated one after the other.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any, NamedTuple, TypeVar

from meshwright.cost import CostModel
from meshwright.simulator.engine import Contention, check_contention
from meshwright.simulator.plan_simulation import simulate_plan
from meshwright.simulator.simulation import Simulation
from meshwright.spec import Cluster, Graph, MeshwrightError, Plan, ProgramError

T = TypeVar("T")

# Seconds of work that pay for forks (own measurement, 2 cores: 40 to 60 ms for two processes and their end).
WORTH_FORKING_S = 0.3


class _Job(NamedTuple):
    """The arguments shared by all plans."""

    plans: Sequence[Plan]
    graph: Graph
    cluster: Cluster
    cost: CostModel
    num_steps: int
    contention: Contention

    def run(self, place: int) -> Simulation | MeshwrightError:
        """Return the result for one of the plans, or the error that prevented it."""
        try:
            return simulate_plan(
                self.plans[place],
                self.graph,
                self.cluster,
                cost=self.cost,
                num_steps=self.num_steps,
                contention=self.contention,
            )
        except MeshwrightError as error:
            return error


def simulate_plans(
    plans: Sequence[Plan],
    graph: Graph,
    cluster: Cluster,
    *,
    cost: CostModel | None = None,
    num_steps: int = 1,
    contention: Contention = "queued",
    num_processes: int | None = None,
) -> tuple[Simulation | MeshwrightError, ...]:
    """Simulate plans with the arguments of `simulate_plan`; return one result per plan, in their order.

    If a plan cannot be simulated, its result is the error; the other plans are simulated. ``num_processes`` is the
    largest number of processes at once, by default one per core if that pays. Raises ProgramError if ``num_processes``
    is below 1, for an unknown contention, and if a process is killed, for example for lack of memory.
    """
    check_contention(contention)
    cost = cost or CostModel(cluster=cluster, precision=plans[0].workload.precision if plans else "float32")
    job = _Job(plans, graph, cluster, cost, num_steps, contention)
    return tuple(run_places(job.run, len(plans), num_processes))


def run_places(run: Callable[[int], T], count: int, num_processes: int | None = None) -> list[T]:
    """Return ``[run(0), ..., run(count - 1)]``, in several processes if that pays. Raises as `simulate_plans`.

    Ctrl-C also ends these processes.
    """
    if num_processes is not None and num_processes < 1:
        raise ProgramError(f"num_processes is {num_processes}; expected 1 or more.")
    start = time.perf_counter()
    results = [run(place) for place in range(min(1, count))]
    rest = range(len(results), count)
    seconds = (time.perf_counter() - start) * len(rest)
    processes = _usable_processes() if num_processes is None and seconds > WORTH_FORKING_S else num_processes or 1
    if min(processes, len(rest)) > 1:
        return [*results, *_fork(run, rest, min(processes, len(rest)))]
    return [*results, *(run(place) for place in rest)]


def _usable_processes() -> int:
    """Return one per core that this process may use, if it may fork, else 1."""
    # Where cores are counted per process (Linux), forking is safe as well.
    if hasattr(os, "sched_getaffinity") and threading.active_count() == 1:
        return len(os.sched_getaffinity(0))
    return 1


_running: list[Callable[[int], Any]] = []


def _begin(run: Callable[[int], Any]) -> None:
    # Ctrl-C reaches all processes of a terminal; the parent ends the others.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _running.append(run)


def _run(place: int) -> Any:
    return _running[0](place)


def _fork(run: Callable[[int], T], places: range, count: int) -> list[T]:
    context = multiprocessing.get_context("fork")
    # Garbage collection writes to every object, and a fork copies every page that is written to.
    gc.freeze()
    try:
        with ProcessPoolExecutor(count, mp_context=context, initializer=_begin, initargs=(run,)) as pool:
            try:
                return list(pool.map(_run, places))
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise
    except BrokenProcessPool:
        raise ProgramError(
            f"One of {count} processes that simulated {len(places)} plans was killed, probably for lack of memory. "
            "Simulate with num_processes=1."
        ) from None
    finally:
        gc.unfreeze()
