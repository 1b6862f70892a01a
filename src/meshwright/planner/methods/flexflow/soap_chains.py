"""Search the SOAP space by Markov chains (`search_soap`).

Each chain has an equal part of the budget. Half of that goes to the starts (`STARTS`), one after the other, each with
its own temperature (`temperature`); the other half continues from the best strategy found. After every hundredth of its
budget, or 1,000 proposals if that is less, a chain returns to the best strategy since its start, as FlexFlow does.
Chains run in parallel on the cores of the machine and are independent of each other, with random numbers of their own.
So the same seed and number of proposals give the same result on any machine. With a time limit, the number of proposals
depends on the machine.
"""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from meshwright.planner.methods.flexflow.chain import (
    SIMULATED,
    WORSE,
    WORSE_ACCEPTED,
    Chain,
    empty_chain,
    reset,
    sample_rises,
    start,
    walk,
)
from meshwright.planner.methods.flexflow.full import shortest_tails
from meshwright.planner.methods.flexflow.soap_result import SoapResult
from meshwright.planner.methods.flexflow.temperature import adjust, calibrate
from meshwright.spec import PlanError
from meshwright.spec.units import PICOSECONDS_PER_SECOND

if TYPE_CHECKING:
    from collections.abc import Callable

    from meshwright.planner.methods.flexflow.soap_arrays import Integers
    from meshwright.planner.methods.flexflow.soap_spaces import SoapSpace


# Candidates (n,) and devices (n, P).
StrategyArrays = tuple["Integers", "Integers"]


def data_parallel(space: SoapSpace, random: np.random.Generator | None = None) -> StrategyArrays:  # noqa: ARG001
    """Return the strategy that splits every layer into the largest possible number of parts, along samples only."""
    return _by(space, lambda layer: _most(space, layer, "sample"))


def experts(space: SoapSpace, random: np.random.Generator | None = None) -> StrategyArrays:  # noqa: ARG001
    """Return the expert-designed strategy of Krizhevsky (2014).

    Layers with more bytes of parameters than of activations are split along parameters, the others along samples.
    """

    def choose(layer: int) -> int:
        alone = space.soap.candidates[layer]
        own = slice(space.soap.weight_offsets[layer], space.soap.weight_offsets[layer + 1])
        is_heavy = 2 * space.soap.weight_bytes[own].sum() > space.soap.held_bytes[alone] / 2
        return _most(space, layer, "parameter" if is_heavy else "sample")

    return _by(space, choose)


def one_after_another(space: SoapSpace, random: np.random.Generator | None = None) -> StrategyArrays:  # noqa: ARG001
    """Return the strategy without splits: each device computes a run of whole layers of about the same time."""
    soap = space.soap
    alone = soap.candidates[:-1]
    spent = np.cumsum(soap.pass_ps[alone, soap.kind[0]].sum(axis=1))
    devices = np.zeros((len(alone), 1 << soap.shift), np.int64)
    devices[:, 0] = np.minimum(spent * len(soap.kind) // max(int(spent[-1]), 1), len(soap.kind) - 1)
    return alone.copy(), devices


def anything(space: SoapSpace, random: np.random.Generator) -> StrategyArrays:
    """Return a random strategy: a random candidate for every layer, on distinct random devices."""
    soap = space.soap
    candidates = random.integers(soap.candidates[:-1], soap.candidates[1:])
    devices = np.zeros((len(candidates), 1 << soap.shift), np.int64)
    for row in devices:
        drawn = random.permutation(len(soap.kind))[: len(row)]
        row[: len(drawn)] = drawn
    return candidates, devices


# Strategies with which chains begin: data parallelism, Krizhevsky's split, layers one after the other, and random ones.
STARTS: dict[str, Callable[[SoapSpace, np.random.Generator], StrategyArrays]] = {
    "data parallel": data_parallel,
    "experts": experts,
    "one after another": one_after_another,
    "random": anything,
}


def _by(space: SoapSpace, choose: Callable[[int], int]) -> StrategyArrays:
    num_layers, num_devices = len(space.layers), len(space.soap.kind)
    devices = np.tile(np.arange(1 << space.soap.shift) % num_devices, (num_layers, 1)).astype(np.int64)
    return np.array([choose(layer) for layer in range(num_layers)], np.int64), devices


def _most(space: SoapSpace, layer: int, kind: str) -> int:
    """Return the candidate of a layer with the most parts along one kind of dim only; if none, the unsplit layer."""
    soap = space.soap
    rows = range(soap.candidates[layer], soap.candidates[layer + 1])
    dims = [at for at, dim in enumerate(space.layers[layer].dims) if dim.kind == kind]
    along = [int(soap.degrees[row, dims].prod()) if dims else 1 for row in rows]
    best = max(count for row, count in zip(rows, along, strict=True) if count == soap.parts[row])
    return next(row for row, count in zip(rows, along, strict=True) if count == best == soap.parts[row])


# Proposals that a temperature is found from.
_WARM_UP = 128
_MOST_IN_A_ROUND = 1000
# Beta times the step where no proposal made it longer: one that does by a hundredth is accepted with 1 / e.
_PER_STEP = 100.0


@dataclass(slots=True, kw_only=True)
class _Budget:
    """What is left to one chain: proposals, or time until ``stop_at``."""

    num_proposals: int | None
    begun: float
    stop_at: float

    def share(self, chain: Chain) -> float:
        """Return the share of the budget that is spent, 0..1."""
        if self.num_proposals is not None:
            return float(chain.tally[SIMULATED]) / self.num_proposals
        return (time.monotonic() - self.begun) / max(self.stop_at - self.begun, 1e-9)

    def round_length(self, chain: Chain) -> int:
        """Return the number of proposals until the chain returns to its best strategy."""
        if self.num_proposals is None:
            return _MOST_IN_A_ROUND
        left = self.num_proposals - int(chain.tally[SIMULATED])
        return max(1, min(self.num_proposals // 100, _MOST_IN_A_ROUND, left))

    def warm_up(self, chain: Chain) -> int:
        """Return the number of proposals from which the temperature is found: 128, or 1/40 of a small budget."""
        if self.num_proposals is None:
            return _WARM_UP
        left = self.num_proposals - int(chain.tally[SIMULATED])
        return max(0, min(_WARM_UP, max(self.num_proposals // 40, 1), left))


@dataclass(slots=True)
class _Run:
    """One chain's search: the best of all its starts, and the history of it (proposals, ps)."""

    space: SoapSpace
    chain: Chain
    random: np.random.Generator
    tail_ps: Integers
    cut: bool
    step_ps: int = 0
    best: StrategyArrays | None = None
    history: list[tuple[int, int]] = field(default_factory=list)
    starts: dict[str, tuple[int, int]] = field(default_factory=dict)

    def phase(self, name: str, begin: StrategyArrays, budget: _Budget, until: float) -> None:
        """Walk from the strategy ``begin`` until the share ``until`` (0..1) of the budget is spent."""
        soap, chain, random = self.space.soap, self.chain, self.random
        start(soap, chain, *begin)
        first_ps = int(chain.step_ps[0])
        self._note()
        rises = np.empty(budget.warm_up(chain))
        beta = calibrate(rises[: sample_rises(soap, chain, random, rises)]) or _PER_STEP / first_ps
        while budget.share(chain) < until:
            before = chain.tally.copy()
            walk(soap, chain, random, self.tail_ps, budget.round_length(chain), beta, self.cut)
            counts = chain.tally - before
            if not counts[SIMULATED]:
                break
            beta = adjust(beta, int(counts[WORSE_ACCEPTED]), int(counts[WORSE]))
            self._note()
            reset(soap, chain)
        self.starts[name] = first_ps, int(chain.step_ps[1])

    def _note(self) -> None:
        if self.best is None or self.chain.step_ps[1] < self.step_ps:
            self.step_ps = int(self.chain.step_ps[1])
            self.best = self.chain.candidates.copy(), self.chain.devices.copy()
            self.history.append((int(self.chain.tally[SIMULATED]), self.step_ps))


def search_soap(
    space: SoapSpace,
    *,
    num_proposals: int | None = None,
    seconds: float | None = None,
    num_chains: int = 2,
    seed: int = 0,
    cut: bool = True,
) -> SoapResult:
    """Return the best strategy that ``num_chains`` chains find.

    The budget is either ``num_proposals`` in total or ``seconds``. ``cut``: the simulation of a proposal ends as soon
    as it is certain that the proposal is rejected; the result is the same. Raises PlanError unless exactly one budget
    is given, it is positive, and there is at least one chain.
    """
    wanted = [budget for budget in (num_proposals, seconds) if budget is not None]
    if len(wanted) != 1 or not wanted[0] > 0 or num_chains < 1:
        raise PlanError(
            f"num_proposals = {num_proposals}, seconds = {seconds} and num_chains = {num_chains} were given; expected "
            "a positive number for exactly one of num_proposals and seconds, and at least one chain."
        )
    begun, tail_ps = time.monotonic(), shortest_tails(space.soap)
    runs = [
        _Run(space, empty_chain(space.soap), np.random.default_rng(child), tail_ps, cut)
        for child in np.random.SeedSequence(seed).spawn(num_chains)
    ]
    each = None if num_proposals is None else max(num_proposals // num_chains, 1)
    names = list(STARTS)

    def search(number: int) -> _Run:
        run, budget = runs[number], _Budget(num_proposals=each, begun=begun, stop_at=begun + (seconds or 0.0))
        turned = names[number % len(names) :] + names[: number % len(names)]
        for place, name in enumerate(turned):
            if place == 0 or budget.share(run.chain) < 1.0:
                run.phase(name, STARTS[name](space, run.random), budget, 0.5 * (place + 1) / len(turned))
        if run.best is not None and budget.share(run.chain) < 1.0:
            run.phase("the best of these", run.best, budget, 1.0)
        return run

    with ThreadPoolExecutor(max_workers=min(num_chains, os.cpu_count() or 1)) as pool:
        done = list(pool.map(search, range(num_chains)))
    best = min(done, key=lambda run: run.step_ps)
    if best.best is None:
        raise PlanError("No strategy was simulated within the budget; give more num_proposals or seconds.")
    tally = np.sum([run.chain.tally for run in done], axis=0)
    return SoapResult(
        space=space,
        candidates=best.best[0],
        devices=best.best[1],
        step_s=best.step_ps / PICOSECONDS_PER_SECOND,
        history=tuple((count, ps / PICOSECONDS_PER_SECOND) for count, ps in best.history),
        starts={
            name: (first / PICOSECONDS_PER_SECOND, last / PICOSECONDS_PER_SECOND)
            for run in done
            for name, (first, last) in run.starts.items()
        },
        tally=tuple(map(int, tally)),
        seed=seed,
        wall_s=time.monotonic() - begun,
    )
