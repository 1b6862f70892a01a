"""Predicted against measured step time on this machine: two pinned ranks, one thread each, gloo.

First every model is measured once, with the neighbouring core busy (`measure_here`); then each configuration below is
predicted from that table by the simulator, and run for real by the launcher that `meshwright run` uses. The figure is
|predicted - measured| / measured, measured being the median over the steps after the warm-up.

The configurations were written down before the first run of this file. No step of `resnet18` or `unet` was compared
with a prediction before that; both were among the models on which op times were checked against whole passes while
`measurement` was written, so they are unseen as steps, not as models.
"""

from __future__ import annotations

import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from harness import parse_options, prediction_row, publish, score_row

from meshwright.cli.model_arguments import graphs_of
from meshwright.cost import CostModel
from meshwright.simulator import simulate_plan
from meshwright.spec import Optimizer, Plan, StagePlan, Workload, load_cluster, write_document
from meshwright.training import Job, measure_here, run_plan

NUM_STEPS, QUICK_STEPS, WARM_UP = 40, 12, 5
TARGET = 0.15


@dataclass(frozen=True, kw_only=True)
class Configuration:
    model: str
    sizes: tuple[tuple[str, int], ...] = ()
    replicas: tuple[int, ...]
    schedule: str
    global_batch: int
    num_microbatches: int
    optimizer: str = "adamw"

    @property
    def name(self) -> str:
        layout = "data parallel" if self.replicas == (2,) else f"pipeline, {self.schedule}"
        return f"{self.model}, {layout}, {self.num_microbatches} x {self.global_batch // self.num_microbatches}"


CONFIGURATIONS = [
    Configuration(model="gpt-tiny", replicas=(2,), schedule="1f1b", global_batch=16, num_microbatches=4),
    Configuration(model="gpt-tiny", replicas=(1, 1), schedule="1f1b", global_batch=32, num_microbatches=8),
    Configuration(model="gpt-tiny", replicas=(1, 1), schedule="gpipe", global_batch=16, num_microbatches=4),
    Configuration(
        model="resnet-tiny", replicas=(2,), schedule="1f1b", global_batch=32, num_microbatches=2, optimizer="sgd"
    ),
    Configuration(
        model="vgg-tiny", replicas=(1, 1), schedule="1f1b", global_batch=64, num_microbatches=4, optimizer="sgd"
    ),
    Configuration(
        model="resnet18",
        sizes=(("image_size", 64),),
        replicas=(1, 1),
        schedule="gpipe",
        global_batch=16,
        num_microbatches=4,
        optimizer="sgd",
    ),
    Configuration(
        model="resnet18",
        sizes=(("image_size", 64),),
        replicas=(2,),
        schedule="1f1b",
        global_batch=16,
        num_microbatches=4,
    ),
    Configuration(
        model="unet", sizes=(("image_size", 64),), replicas=(1, 1), schedule="1f1b", global_batch=4, num_microbatches=4
    ),
]


def make_plan(configuration: Configuration, graph) -> Plan:
    """Stages of nearly equal numbers of layers."""
    count, parts = len(graph.layers), len(configuration.replicas)
    stages, rank = [], 0
    for index, replicas in enumerate(configuration.replicas):
        start, stop = count * index // parts, count * (index + 1) // parts
        stages.append(StagePlan(start=start, stop=stop, ranks=tuple(range(rank, rank + replicas))))
        rank += replicas
    return Plan(
        model=configuration.model,
        model_sizes=configuration.sizes,
        graph_hash=graph.content_hash,
        cluster="2xcpu",
        workload=Workload(global_batch=configuration.global_batch, optimizer=Optimizer(kind=configuration.optimizer)),
        stages=tuple(stages),
        num_microbatches=configuration.num_microbatches,
        schedule=configuration.schedule,
    )


def measure_models() -> dict[tuple, object]:
    """One table per model, holding every microbatch size that its configurations use."""
    tables = {}
    for configuration in CONFIGURATIONS:
        key = (configuration.model, configuration.sizes)
        if key not in tables:
            sizes = {
                item.global_batch // item.num_microbatches for item in CONFIGURATIONS if (item.model, item.sizes) == key
            }
            tables[key] = measure_here(configuration.model, sorted(sizes), sizes=configuration.sizes, num_ranks=2)
            print(f"measured {configuration.model}", file=sys.stderr)
    return tables


def main() -> int:
    options = parse_options(__doc__)
    steps = QUICK_STEPS if options.quick else NUM_STEPS
    cluster = load_cluster("2xcpu")
    tables = measure_models()
    rows = []
    for configuration in CONFIGURATIONS:
        size = configuration.global_batch // configuration.num_microbatches
        graph = graphs_of(configuration.model, configuration.sizes)(size)
        plan = make_plan(configuration, graph)
        cost = CostModel(cluster=cluster, measurements=tables[configuration.model, configuration.sizes])
        predicted = simulate_plan(plan, graph, cluster, cost=cost, num_steps=3).step_time_s
        with tempfile.TemporaryDirectory() as folder:
            path = write_document(plan, Path(folder) / "plan.json")
            result = run_plan(Job(plan=str(path), num_steps=steps), folder)
        seconds = np.array(result.step_seconds[WARM_UP:])
        rows.append(prediction_row(configuration.name, predicted, seconds))
        print(f"{configuration.name}: predicted {predicted:.4f} s, measured {rows[-1].baseline:.4f} s", file=sys.stderr)
    rows.append(score_row(rows, TARGET))
    notes = (
        "value = predicted, baseline = measured (median), spread of the measured steps; the last row scores the errors."
    )
    return publish("step_time", rows, options, notes)


if __name__ == "__main__":
    sys.exit(main())
