"""PipeDream's planner: objective and CPU time beside what PipeDream's own optimizer prints, and its plans simulated.

Rows "slowest stage" round to the digits that are printed. CPU time is that of reading the profile, finding the states
and solving, in this process with compiled code loaded, best of several; beside it, that of the original without the
0.15 s that it takes to start (wall time on two levels). A target is a twentieth of it, or 20 ms.

nasnetamobile has too many states for any dynamic program over them; what is found along orders of its layers stands
beside a lower bound, the work of one device shared by all.

"step" is that of the best plan of the method under 1F1B, simulated, over the best of exact slicing.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from harness import Row, make_row

from meshwright.planner import Choices, Problem, search_plans
from meshwright.planner.methods.pipedream import (
    Level,
    PipeDreamOptions,
    PipedreamPlan,
    count_states,
    load_profile,
    plan_profile,
)
from meshwright.spec import Workload, load_cluster, load_shipped_graph

ROOT = Path(__file__).resolve().parents[2]
INSTANCES = json.loads((ROOT / "benchmarks" / "splits" / "planner_pipedream.json").read_text())
PROFILES = ROOT / "tests" / "planner" / "methods" / "profiles"
LEAST_TARGET_S, SHARE = 0.020, 1 / 20


def rows(quick: bool) -> list[Row]:
    """All rows; ``quick`` times fewer runs, and leaves searches out."""
    repeats = 3 if quick else 11
    found = [row for instance in INSTANCES["ratio_1"] for row in _printed_rows(instance, repeats)]
    found += _nasnet_rows(repeats)
    if not quick:
        found += [_search_row(instance) for instance in INSTANCES["searches"]]
    return found


def _plan(instance: dict, ratio: float | None = 1.0) -> PipedreamPlan:
    levels = [Level(num_machines=machines, bandwidth_bytes_per_s=rate) for machines, rate in instance["levels"]]
    return plan_profile(_load(instance), levels, PipeDreamOptions(compression_ratio=ratio))


def _load(instance: dict):
    return load_profile(PROFILES / f"{instance['profile']}.graph.txt.gz")


def _name(instance: dict) -> str:
    return f"{instance['profile']} on {' x '.join(str(machines) for machines, _ in instance['levels'])}"


def _printed_rows(instance: dict, repeats: int) -> list[Row]:
    plan, seconds = _timed(lambda: _plan(instance), repeats)
    printed = instance["seconds"]
    original_s = instance.get("cpu_s", instance.get("wall_s")) - INSTANCES["start_up_s"]
    as_printed = round(plan.bottleneck_s, 4)
    return [
        make_row(
            f"{_name(instance)}: slowest stage",
            as_printed,
            "s",
            baseline=printed,
            ratio=as_printed / printed,
            target=1.0,
        ),
        make_row(
            f"{_name(instance)}: CPU",
            float(seconds.min()),
            "s",
            baseline=original_s,
            spread=_spread(seconds),
            target=max(LEAST_TARGET_S, SHARE * original_s),
        ),
    ]


def _nasnet_rows(repeats: int) -> list[Row]:
    instances = INSTANCES["too_many_states"]
    profile = _load(instances[0])
    number, seconds = _timed(lambda: count_states(profile), 1)
    found = [make_row(f"{instances[0]['profile']}: states, at most", float(number), "")]
    found.append(make_row(f"{instances[0]['profile']}: CPU to count them", float(seconds.min()), "s"))
    for instance in instances:
        for ratio, name in ((1.0, "slowest stage"), (None, "slowest stage, free transfers")):
            plan, seconds = _timed(lambda instance=instance, ratio=ratio: _plan(instance, ratio), min(repeats, 3))
            found.append(
                make_row(
                    f"{_name(instance)}: {name} along {plan.num_states} states, over the bound",
                    plan.bottleneck_s,
                    "s",
                    baseline=plan.bound_s,
                    ratio=plan.bottleneck_s / plan.bound_s,
                )
            )
            found.append(
                make_row(f"{_name(instance)}: CPU, {name}", float(seconds.min()), "s", spread=_spread(seconds))
            )
    return found


def _search_row(instance: dict) -> Row:
    graph, cluster = load_shipped_graph(instance["model"]), load_cluster(instance["cluster"])
    ours, sliced = (
        search_plans(
            Problem(
                graph_for=lambda _: graph,
                cluster=cluster,
                workload=Workload(global_batch=instance["batch"]),
                choices=Choices(schedules=("1f1b",)),
            ),
            method,
        ).ranked[0]
        for method in ("pipedream", "slicing")
    )
    return make_row(
        f"{instance['model']} on {instance['cluster']}, batch {instance['batch']}: step over that of exact slicing",
        ours.step_time_s,
        "s",
        baseline=sliced.step_time_s,
        ratio=ours.step_time_s / sliced.step_time_s,
    )


def _timed(run: Callable, repeats: int) -> tuple:
    """What a function returns, and CPU seconds of runs after a first one."""
    result, seconds = run(), np.empty(repeats)
    for k in range(repeats):
        start = time.process_time()
        run()
        seconds[k] = time.process_time() - start
    return result, seconds


def _spread(seconds: np.ndarray) -> float:
    low, middle, high = np.quantile(seconds, [0.1, 0.5, 0.9])
    return float(high - low) / 2 / float(middle) if middle else math.nan
