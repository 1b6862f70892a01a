"""How far optimizer steps of whole models are from what a table of five tensor sizes says of them, on one core.

    python scripts/check_optimizer_steps.py

Prints a row per model and optimizer, then the factors that hold four out of five measured / predicted: of the measured
curve (`cost.optimizers.MEASURED_STEP`) and of the roofline. Caches are emptied before each step, as a backward does.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import numpy as np
import torch

from meshwright.cost.costs import fit_interval
from meshwright.cost.op_estimates import ROOFLINE
from meshwright.cost.optimizers import estimate_copy, estimate_step, optimizer_curves, trainable_elements
from meshwright.measurement import measure_optimizers
from meshwright.measurement.optimizer_timing import make_optimizer
from meshwright.spec import Measurements, Optimizer, load_cluster, load_shipped_graph
from meshwright.spec.measurements import BUCKET_COPY

MODELS = (
    *("gpt-tiny", "bert-tiny", "resnet-tiny", "llama-tiny", "t5-tiny", "mixtral-tiny", "unet-tiny", "vgg-tiny"),
    *("dlrm-tiny", "gnmt-tiny", "ddpm-tiny", "llama-lora-tiny", "resnet34", "resnet50", "t5-small"),
)
OPTIMIZERS = (Optimizer(kind="adamw"), Optimizer(kind="sgd"), Optimizer(kind="sgd", momentum=True))
REPEATS = 8
# Each measures its own table, as another hour finds the machine in another state.
RUNS = 3
# 256 MiB: more than the caches of the machine.
JUNK = torch.zeros(2**26)


def main() -> None:
    """Compare in several runs."""
    torch.set_num_threads(1)
    rows = [row for _ in range(RUNS) for row in _compare()]
    measured, curve, roofline = np.array(rows).T
    for name, predicted in (("curve", curve), ("roofline", roofline)):
        found = fit_interval(measured, predicted)
        error = float(np.median(np.abs(predicted / measured - 1)))
        print(f"{name}: {len(rows)} steps, median error {error:.0%}, interval {found.low:.2f} to {found.high:.2f}")


def _compare() -> list[tuple[float, float, float]]:
    """Measure the table, then the steps of all models: (measured, by the curve, by the roofline)."""
    table = measure_optimizers(OPTIMIZERS, before_repeat=lambda: JUNK.add_(1.0))
    curves = optimizer_curves(Measurements(device="cpu", software="", date="", optimizers=table), "float32")
    kind = load_cluster("cpu").device_kinds[0]
    rows = []
    for model in MODELS:
        graph = load_shipped_graph(model)
        elements = trainable_elements(graph, graph.parameters)
        parameters = [torch.randn(int(count), requires_grad=True) for count in elements]
        for name, step in _steps(parameters):
            optimizer = next((item for item in OPTIMIZERS if item.name == name), None)
            by_curve, by_datasheet = (
                estimate_copy(elements, kind, "float32", curve, ROOFLINE)
                if optimizer is None
                else estimate_step(elements, optimizer, kind, "float32", curve, "tensors", ROOFLINE)
                for curve in (curves[name], None)
            )
            rows.append((_time(parameters, step), by_curve.seconds, by_datasheet.seconds))
            print(
                f"{model:16} {name:14} {rows[-1][0]:9.2e} s, curve {rows[-1][1]:9.2e} s, roofline {rows[-1][2]:9.2e} s"
            )
    return rows


def _steps(parameters: list[torch.Tensor]) -> list[tuple[str, Callable[[], object]]]:
    bucket = [torch.zeros_like(parameter) for parameter in parameters]

    def fill() -> None:
        for view, parameter in zip(bucket, parameters, strict=True):
            view.copy_(parameter.grad)

    return [*((item.name, _stepper(item, parameters)) for item in OPTIMIZERS), (BUCKET_COPY, fill)]


def _stepper(optimizer: Optimizer, parameters: list[torch.Tensor]) -> Callable[[], object]:
    """A step and clearing the gradients, as the table has it."""
    update = make_optimizer(optimizer, parameters)
    return lambda: (update.step(), update.zero_grad())


def _time(parameters: list[torch.Tensor], step: Callable[[], object]) -> float:
    samples = []
    for _ in range(REPEATS):
        for parameter in parameters:
            parameter.grad = torch.full_like(parameter, 1e-3)
        JUNK.add_(1.0)
        start = time.perf_counter()
        step()
        samples.append(time.perf_counter() - start)
    return statistics.median(samples[1:])  # the first makes the states


if __name__ == "__main__":
    main()
