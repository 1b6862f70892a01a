"""Compare bubbles and speed of schedules with the figures that their authors state and measured.

    Table 5    busy shares of schedules, computed by Qi et al. (ICLR 2024) from profiled times of stages; the same times
               and our programs (`equal_stages`), so that what differs is the schedule or the simulator
    Table 4    measured throughput of the same models: how much faster than under 1F1B

What stands in Table 5 as ZB-1p and ZB-2p are schedules found for the times, with p and 2p microbatches in memory. The
first is held against what `program.find_orders` finds; in every row it has the rate of ZB-H1, which stands for it in
Table 4. The second is shortest for the rank that takes longest, ours for all ranks together, so they do not compare.

Interleaved 1F1B is counted twice. In the authors' simulation (sail-sg/zero-bubble-pipeline-parallelism at f68d387,
megatron/core/pipeline_parallel/efficiency.py) only the first of the microbatches that go round together waits for its
message from the last rank to the first, or back; so they state p messages less than the schedule needs.

In theory a message takes no time from computation. If it occupies both of its ends, a schedule with v times the
messages gains less: measured interleaved 1F1B lies between the two.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from meshwright.validation.datasets import load_steps, load_table
from meshwright.validation.equal_stages import EqualStages, busy_share, found_share
from meshwright.validation.pipeline_programs import StageSeconds
from meshwright.validation.scores import Score, score_rows

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from meshwright.cost.prediction import Floats

DATASET = "schedules"
FOUND = "found, p microbatches in memory"
OURS, COUNTED, BLOCKING = (
    "simulated",
    "simulated, waits as the authors count them",
    "simulated, messages take time of both ends",
)
PRINTED = "rates of Table 5"

# Columns of the tables, and the schedules that they are.
SCHEDULES = {"1F1B": "1f1b", "1F1B-I": "interleaved", "ZB-H1": "zb-h1", "ZB-H2": "zb-h2"}
# Measured, and what of Table 5 it is.
MEASURED = {"1F1B-I": "1F1B-I", "ZB-1p": "ZB-H1"}
# In per cent: 0.002 of a rate, and less where less is busy; 3 % of a ratio.
_RATES, _RATIOS = 0.2, 3.0
_BLOCKING_NOTE = "form chosen with these rows in view: what a message takes from those who compute"


def score_schedules(*, quick: bool = False) -> tuple[Score, ...]:
    """Both tables: twelve setups of four models; with ``quick`` orders are found for the first setup of each."""
    rows = load_table("zero_bubble_rates_table5")
    pipelines = [find_pipeline(row) for row in rows]
    found = {name: _shares(pipelines, name) for name in SCHEDULES}
    scores: list[Score] = []
    for name in SCHEDULES:
        part, printed = f"Table 5: busy share of {name}", _printed(rows, name)
        arms = {OURS: found[name]}
        if name == "1F1B-I":
            arms[COUNTED] = _shares(pipelines, name, rounds_wait_together=True)
        scores += [
            score_rows(DATASET, part, arm, printed, shares, judged="worst", target=_RATES)
            for arm, shares in arms.items()
        ]
    asked = [row for row in rows if not quick or int(row["microbatches"]) == 3 * int(row["stages"])]
    shares = np.array([found_share(pipeline, pipeline.num_positions) for pipeline in map(find_pipeline, asked)])
    part, printed = "Table 5: busy share of ZB-1p", _printed(asked, "ZB-1p")
    scores.append(score_rows(DATASET, part, FOUND, printed, shares, judged="worst", target=_RATES))
    for name, column in MEASURED.items():
        part, measured = f"Table 4: {name} over 1F1B", _speedups(rows, name)
        ours = found[column] / found["1F1B"]
        blocking = _shares(pipelines, column, blocking=True) / _shares(pipelines, "1F1B", blocking=True)
        printed = _printed(rows, name) / _printed(rows, "1F1B")
        scores += [
            score_rows(DATASET, part, OURS, measured, ours, target=_RATIOS),
            score_rows(DATASET, part, BLOCKING, measured, blocking, target=_RATIOS, note=_BLOCKING_NOTE),
            score_rows(DATASET, part, PRINTED, measured, printed),
        ]
    return tuple(scores)


def find_pipeline(row: Mapping[str, str]) -> EqualStages:
    """The pipeline of a row of Table 5."""
    times = next(item for item in load_table("zero_bubble_times") if _setup(item) == _setup(row))
    forward, inputs, weights, transfer = (
        float(times[f"t_{name}_ms"]) / 1e3 for name in ("forward", "backward_input", "backward_weight", "comm")
    )
    return EqualStages(
        num_positions=int(row["stages"]),
        num_microbatches=int(row["microbatches"]),
        num_chunks=int(times["virtual_stages_1f1b_i"]),
        stage=StageSeconds(forward_s=forward, input_gradient_s=inputs, weight_gradient_s=weights, transfer_s=transfer),
    )


def _setup(row: Mapping[str, str]) -> tuple[str, ...]:
    return tuple(row[name] for name in ("model", "stages", "microbatches"))


def _shares(pipelines: Iterable[EqualStages], name: str, **counted: bool) -> Floats:
    schedule = SCHEDULES[name]
    return np.array([busy_share(pipeline, schedule, **counted) for pipeline in pipelines])


def _printed(rows: Iterable[Mapping[str, str]], name: str) -> Floats:
    return np.array([1.0 - float(row[name]) for row in rows])


def _speedups(rows: Iterable[Mapping[str, str]], name: str) -> Floats:
    """Measured seconds under 1F1B over those under another schedule, for the setups of Table 5's rows."""
    measured = {row["id"]: float(row["iter_time_s"]) for row in load_steps() if row["id"].startswith("zb-t4-")}

    def seconds(row: Mapping[str, str], schedule: str) -> float:
        return measured[f"zb-t4-{row['model']}-{schedule}-{row['microbatches']}"]

    return np.array([seconds(row, "1F1B") / seconds(row, name) for row in rows])
