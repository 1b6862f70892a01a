"""Serving: policies beside each other, and the speed of the simulator.

regimes     answers in time of every policy on regimes that stand in a file; regret is what a policy lacks of the best
            other one, for the same requests
drawn       the same for six regimes that a seed draws, for each seed that ever was the last one
troubled    regret where batches jitter or devices are slow, which no regime has
hiccups     answers in time under overload where single batches are late, and how many refusals are (hiccups.py)
refusing    how many are served, and how many refused late, under overload, by the share of the work by which is refused
goodput     the highest rate with 99 % in time, of every policy, in the cases of our earlier experiment
simulator   CPU time per request; two pools on two cores

Regret is scored twice: after five seconds that do not count, in which our own policy learns what it begins each regime
without (others measure rates then, and Nexus makes its first plans), and from the first request on. The best other
policy is often symphony or eager; both are also among the settings that our own policy chooses from.
"""

from __future__ import annotations

import itertools
import sys
import threading
import time
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from harness import Row, make_row, publish_sections
from hiccups import run_with_hiccups
from serving_live import STRONG

from meshwright.serving import (
    POLICY_NAMES,
    bound_scale,
    compare_policies,
    draw_arrivals,
    find_goodput,
    load_policy,
    simulate_deployment,
)
from meshwright.serving.policies.deferred import Deferred
from meshwright.spec import Deployment, Gamma, Latency, Poisson, ServedModel, Straggler
from meshwright.spec.units import Seconds

REGIMES = Path(__file__).parent / "splits" / "serving_regimes.toml"
# The last one is new whenever our own policy has changed since the one before it was run; none is left out afterwards.
DRAWN_SEEDS, NUM_DRAWN = (20261123, 20261125, 20261127, 20261129, 20261201, 20261203, 20261205), 6
OWN = "adaptive"
# As long as our own policy may learn before requests count; it is scored without, too.
WARM_UP_S = 5.0
# Newer systems first (Nexus is of 2019, Clockwork of 2020, Symphony of 2023); no one paper claims the whole order.
ORDER = ("symphony", "clockwork", "nexus")
# `deferred` is Symphony's with other settings.
POLICIES = tuple(name for name in POLICY_NAMES if name != "deferred")


def make_deployment(regime: dict[str, Any]) -> Deployment:
    """The deployment of a regime, its rates multiplied so that the load is as the regime says."""
    weights = np.arange(1, regime["models"] + 1) ** -regime.get("zipf", 0.0)

    def models(total: float) -> tuple[ServedModel, ...]:
        rates = weights / weights.sum() * total
        return tuple(
            ServedModel(
                name=f"model {place}",
                slo=Seconds(regime["slo_ms"] / 1e3),
                latency=Latency(alpha=Seconds(regime["alpha_ms"] / 1e3), beta=Seconds(regime["beta_ms"] / 1e3)),
                arrivals=Poisson(rate=rate) if regime["shape"] == 1 else Gamma(rate=rate, shape=regime["shape"]),
            )
            for place, rate in enumerate(rates.tolist())
        )

    # The bound of one total is sought by its own fixed point: what it allows must be what is asked.
    low, high = 0.0, 1e7
    for _ in range(60):
        middle = (low + high) / 2
        scale = bound_scale(models(middle), [m.arrivals.rate for m in models(middle)], regime["devices"])
        low, high = (middle, high) if scale >= 1 else (low, middle)
    return Deployment(models=models(low * regime["load"]), devices=regime["devices"])


def draw_regimes(seed: int, count: int) -> list[dict[str, Any]]:
    """Regimes from the whole space, logarithmically even."""
    rng = np.random.default_rng(seed)

    def between(low: float, high: float) -> float:
        return float(np.exp(rng.uniform(np.log(low), np.log(high))))

    drawn = []
    for place in range(count):
        alpha, beta = between(0.1, 5.0), between(2.0, 12.0)
        regime = {
            "alpha_ms": alpha,
            "beta_ms": beta,
            "slo_ms": (alpha + beta) * between(2.5, 8.0),
            "devices": round(between(1, 64)),
            "models": round(between(1, 40)),
            "zipf": float(rng.uniform(0, 1.2)),
            "shape": between(0.1, 1.0),
            "load": float(rng.uniform(0.6, 1.5)),
        }
        name = (
            f"drawn {place + 1}: {alpha:.2f} b + {beta:.1f} ms, SLO {regime['slo_ms']:.0f} ms, {regime['devices']} "
            f"devices, {regime['models']} models, shape {regime['shape']:.2f}, load {regime['load']:.2f}"
        )
        drawn.append({**regime, "name": name})
    return drawn


def compare(regimes: list[dict[str, Any]], quick: bool) -> list[Row]:
    return [
        row
        for warm_up_s, told in ((WARM_UP_S, f"after {WARM_UP_S:.0f} s"), (0.0, "from the first request on"))
        for row in compare_after(warm_up_s, told, regimes, quick)
    ]


def compare_after(warm_up_s: float, told: str, regimes: list[dict[str, Any]], quick: bool) -> list[Row]:
    rows, regrets, shares = [], [], []
    for regime in regimes:
        deployment = make_deployment(regime)
        sums = dict.fromkeys(POLICIES, 0.0)
        for seed in range(1 if quick else 2):
            found, _ = compare_policies(
                deployment,
                {name: load_policy(name) for name in POLICIES},
                5.0 if quick else 20.0,
                seed=seed,
                warm_up_s=warm_up_s,
            )
            for name, result in found.items():
                sums[name] += result.in_time_share / (1 if quick else 2)
        others = {name: value for name, value in sums.items() if name != OWN}
        best = max(others, key=others.__getitem__)
        regret = 1 - sums[OWN] / others[best]
        regrets.append(regret)
        shares.append(sums)
        each = ", ".join(f"{name} {100 * value:.1f}" for name, value in sums.items())
        print(f"{told}, {regime['name']}: {each}; regret {100 * regret:.2f} %", flush=True)
        name = f"{told}, {regime['name']}: in time, %; best other: {best}"
        rows.append(make_row(name, 100 * sums[OWN], "%", baseline=100 * others[best]))
    return [
        *rows,
        make_row(f"{told}: mean regret, %", 100 * float(np.mean(np.maximum(regrets, 0))), "%", target=1.0),
        make_row(f"{told}: worst regret, %", 100 * max(*regrets, 0.0), "%", target=3.0),
        *order_rows(told, shares),
    ]


def order_rows(told: str, shares: list[dict[str, float]]) -> list[Row]:
    """In how many regimes the order holds, whole and by pairs; the target is that it fails in none."""
    rows = []
    for names in (ORDER, *itertools.combinations(ORDER, 2)):
        fails = sum(any(each[a] < each[b] for a, b in itertools.pairwise(names)) for each in shares)
        rows.append(make_row(f"{told}: regimes of {len(shares)} without {' >= '.join(names)}", fails, "", target=0.0))
    return rows


def regimes(quick: bool) -> list[Row]:
    fixed = tomllib.loads(REGIMES.read_text())["regimes"]
    return compare(fixed[::4] if quick else fixed, quick)


def drawn(quick: bool) -> list[Row]:
    rows = []
    for seed in DRAWN_SEEDS[::-1]:
        print(f"seed {seed}:", flush=True)
        found = compare(draw_regimes(seed + quick, 2 if quick else NUM_DRAWN), quick)
        rows += [replace(row, name=f"seed {seed}, {row.name}") for row in found]
    return rows


def _strong(rate: float, jitter: float) -> Deployment:
    """The two devices that `serving_live` overloads, for which batches are all that helps."""
    (one,) = STRONG.models
    return replace(STRONG, models=(replace(one, arrivals=Poisson(rate=rate)),), devices=2, jitter=jitter)


def _middling(rate: float, jitter: float = 0.0, slow: dict[int, float] | None = None) -> Deployment:
    """Four devices, some of them slower by a factor than they are taken to be."""
    latency = Latency(alpha=Seconds(0.001), beta=Seconds(0.01), largest=64)
    one = ServedModel(name="middling", slo=Seconds(0.1), latency=latency, arrivals=Poisson(rate=rate))
    troubles = tuple(Straggler(device=device, factor=factor) for device, factor in (slow or {}).items())
    return Deployment(models=(one,), devices=4, jitter=jitter, troubles=troubles)


def troubled(quick: bool) -> list[Row]:
    cases = {
        f"{name}, {rate}/s, jitter {jitter:.0%}": make(rate, jitter)
        for name, make, rates in (("strong", _strong, (1400, 1900)), ("middling", _middling, (3500,)))
        for rate in rates
        for jitter in (0.0, 0.02, 0.05, 0.1)
    }
    for told, slow in (("all twice as slow", dict.fromkeys(range(4), 2.0)), ("one three times as slow", {0: 3.0})):
        cases |= {f"middling, {rate}/s, {told}": _middling(rate, slow=slow) for rate in (1500, 2500, 4000)}
    rows = []
    for name, deployment in cases.items():
        regrets = []
        for seed in range(2 if quick else 6):
            policies = {each: load_policy(each) for each in (OWN, "symphony", "eager")}
            found, _ = compare_policies(deployment, policies, 30.0, seed=seed, warm_up_s=WARM_UP_S)
            best = max(result.in_time_share for each, result in found.items() if each != OWN)
            regrets.append(100 * (1 - found[OWN].in_time_share / best))
        print(f"{name}: regret {', '.join(f'{each:.2f}' for each in regrets)} %", flush=True)
        rows.append(make_row(f"{name}: mean regret, %", float(np.mean(regrets)), "%", spread=float(np.ptp(regrets))))
    return rows


def hiccups(quick: bool) -> list[Row]:
    """As `refusing`; more than one late refusal of a hundred is seen in a server's p99."""
    seconds, seeds = (40.0, 1) if quick else (200.0, 4)
    server = replace(_strong(4500, 0.0), delay=Seconds(0.0003), slack=Seconds(0.0017), guard=Seconds(0.0012))
    rows = []
    for share in (0.0, 0.001, 0.002, 0.004):
        found = {
            policy: np.array(
                [
                    run_with_hiccups(replace(server, policy=policy), 4500.0, seconds, share, seed)
                    for seed in range(seeds)
                ]
            )
            for policy in (OWN, "symphony")
        }
        (own, best), late = (float(each[:, 0].mean()) for each in found.values()), 100 * found[OWN][:, 1]
        told = f"{share:.1%} of the batches 20 to 80 ms late"
        print(f"{told}: {own:.0f}/s, symphony {best:.0f}; refused late: {late.round(2)} %", flush=True)
        rows.append(make_row(f"{told}: in time, beside symphony", own, "/s", baseline=best, ratio=best / own))
        worst = float(late.max())
        rows.append(make_row(f"{told}: refused later than 5 ms, worst of {seeds}, %", worst, "%", target=1.0))
    return rows


def refusing(quick: bool) -> list[Row]:
    """At three times what two devices can do, with a server's delays; see `adaptive.CANDIDATES`."""
    seconds = 10.0 if quick else 60.0
    server = replace(_strong(4500, 0.005), delay=Seconds(0.0003), slack=Seconds(0.002), guard=Seconds(0.0005))
    rows = []
    for admit in (0, 95, 98, 100):
        found = simulate_deployment(server, Deferred(50, 100, admit), seconds, warm_up_s=seconds / 4)
        (one,) = found.models
        late = sum(count for reason, count in one.dropped.items() if reason != "crowded") / one.num_requests
        told = f"refusing by {admit} % of the work" if admit else "no early refusal"
        rows.append(make_row(f"{told}: in time, %", 100 * found.in_time_share, "%"))
        rows.append(make_row(f"{told}: refused later than at once, %", 100 * late, "%"))
    return rows


CASES = {
    "ResNet-50, 8 devices": (1.053, 5.072, 25, 8, 1, 1.0),
    "ResNet-50, 8 devices, bursts": (1.053, 5.072, 25, 8, 1, 0.1),
    "ResNet-50, 8 models, 64 devices": (1.053, 5.072, 25, 64, 8, 1.0),
    "weak batching, 8 devices": (5.0, 2.5, 50, 8, 1, 1.0),
    "strong batching, 8 devices": (0.1, 10.0, 25, 8, 1, 1.0),
    "strong batching, 32 models, 32 devices": (0.1, 10.0, 40, 32, 32, 1.0),
}


def goodput(quick: bool) -> list[Row]:
    rows = []
    for name, (alpha, beta, slo, devices, models, shape) in CASES.items():
        facts = {
            "alpha_ms": alpha,
            "beta_ms": beta,
            "slo_ms": slo,
            "devices": devices,
            "models": models,
            "shape": shape,
        }
        deployment = make_deployment({**facts, "load": 1.0})
        bound = sum(model.arrivals.rate for model in deployment.models)
        for policy in POLICIES:
            scale, _ = find_goodput(deployment, load_policy(policy), 5.0 if quick else 15.0, warm_up_s=3.0)
            rows.append(make_row(f"{name}: {policy}", scale * bound, "/s", baseline=bound, ratio=scale))
            print(rows[-1].name, f"{scale * bound:.0f} of {bound:.0f}", flush=True)
    return rows


SIZES = {
    "1 model, 8 devices": (1, 8),
    "100 models, 1,000 devices": (100, 1000),
    "500 models, 4,000 devices": (500, 4000),
}


def simulator(quick: bool) -> list[Row]:
    rows = []
    for name, (models, devices) in SIZES.items():
        facts = {"alpha_ms": 1.053, "beta_ms": 5.072, "slo_ms": 25, "devices": devices, "models": models, "shape": 1.0}
        deployment = make_deployment({**facts, "load": 0.9})
        total = sum(model.arrivals.rate for model in deployment.models)
        seconds = (1e6 if quick else 1e7) / total if devices == 4000 else 1e6 / total
        for policy in ("symphony", "eager", OWN):
            simulate_deployment(deployment, load_policy(policy), 1e4 / total)
            times = []
            for seed in range(2 if quick else 5):
                start = time.process_time()
                draw_arrivals(deployment.models, seconds, seed=seed)
                drawn = time.process_time()
                result = simulate_deployment(deployment, load_policy(policy), seconds, seed=seed)
                times.append((time.process_time() - drawn, drawn - start))
            whole, drawing = np.median(times, axis=0)
            # A rate is met from below: the target, five million requests per second, bounds its inverse.
            each = 1e6 * (whole - drawing) / result.num_requests
            label = f"{name}, {policy}: CPU µs per request, with histograms, less the drawing of requests"
            rows.append(make_row(label, each, "µs", target=0.2))
            if devices == 4000 and policy == "symphony":
                told = f"{name}: CPU s for {result.num_requests:,} requests, drawing them included"
                rows.append(make_row(told, whole, "s", target=3.0))
    return [*rows, _two_cores(quick)]


def _two_cores(quick: bool) -> Row:
    """Two pools on two threads (compiled loops hold no lock), beside both on one."""
    facts = {"alpha_ms": 1.053, "beta_ms": 5.072, "slo_ms": 25, "devices": 64, "models": 16, "shape": 1.0}
    deployment = make_deployment({**facts, "load": 0.9})

    def work(seed: int) -> None:
        simulate_deployment(deployment, load_policy("symphony"), 10.0 if quick else 40.0, seed=seed)

    def together() -> float:
        threads = [threading.Thread(target=work, args=(seed,)) for seed in (1, 2)]
        start = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return time.perf_counter() - start

    def alone() -> float:
        start = time.perf_counter()
        work(1)
        work(2)
        return time.perf_counter() - start

    work(0)
    pairs = np.array([(together(), alone()) for _ in range(3 if quick else 9)])
    ratios = np.sort(pairs[:, 0] / pairs[:, 1])
    spread = float((ratios[-1] - ratios[0]) / 2 / np.median(ratios))
    return make_row(
        "two pools on two cores over one after the other",
        float(np.median(pairs[:, 0])),
        "s",
        baseline=float(np.median(pairs[:, 1])),
        ratio=float(np.median(ratios)),
        spread=spread,
        target=0.7,
    )


SECTIONS = {
    "regimes": regimes,
    "drawn": drawn,
    "troubled": troubled,
    "hiccups": hiccups,
    "refusing": refusing,
    "goodput": goodput,
    "simulator": simulator,
}


if __name__ == "__main__":
    sys.exit(publish_sections("serving", __doc__, SECTIONS))
