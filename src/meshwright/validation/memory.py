"""How far are predicted bytes from measured ones: of real training here, and of published runs.

    training on this machine    `simulator.simulate_plan`, what `plan` and `simulate` print, against torch's own account
                                of its allocations (``data/memory_training.csv``, by ``scripts/measure_memory.py``);
                                with layers computed again, which no plan says yet, `cost.memory.trace_step`
    pipelines on this machine   the same for every rank of plans of two to four stages, run by our own runtime
                                (``data/memory_pipelines.csv``)
    SimuMax B200, torchtitan    `cost.memory.predict_device_peak` against rows of ``data/training_steps.csv``
    activation percentages      the formula of Korthikanti et al. against their figure 7: a check, not an accuracy

Nothing is fitted: the model counts tensors. The forms were written with the published rows in view: that buffers of
communication lie in pools of their own explained torchtitan's, as did, found in its sources, when the loss is compiled
and how a batch is split; SimuMax's notes on Transformer Engine explained its own. No number was taken from a row. The
80 % interval around a row comes from the errors of the other configurations of the same set, never from its own.

Assumptions, the same for all rows of a set. SimuMax leaves schedule and recompute empty: 1F1B, none, as its launchers
have it (MooreThreads/SimuMax, simu_tools/megatron_scripts/scripts), with a fused loss where the case is marked "cef".
torchtitan: the loss is compiled in the rows of 2025 only (train.py, December 2024: "compiling loss function causes CUDA
errors, turning off for now"), float8 keeps what 16 bits keep, and what is reserved is compared, as that is printed.
The rows of Zero Bubble say neither how attention was computed nor what of memory was read: both ways are shown, without
a target. They were looked at last, when the model stood, but for how layers that do not divide evenly are shared out.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from meshwright.cost.memory import (
    find_peak,
    predict_device_peak,
    saved_bytes,
    trace_step,
)
from meshwright.cost.prediction import Predictions, fit_interval
from meshwright.cost.transformer import TrainingSetup, TransformerShape
from meshwright.simulator import simulate_plan
from meshwright.spec import (
    MeasurementError,
    Optimizer,
    Workload,
    load_cluster,
    load_shipped_graph,
    recompute_layers,
    with_recompute,
)
from meshwright.validation.datasets import load_steps, load_table
from meshwright.validation.pipelines import even_plan, pipeline_plan
from meshwright.validation.scores import Score, score_rows
from meshwright.validation.step_rows import read_step

if TYPE_CHECKING:
    from collections.abc import Sequence

    from meshwright.cost.prediction import Basis, Floats
    from meshwright.cost.transformer import Recompute
    from meshwright.spec import Plan
    from meshwright.validation.datasets import StepRow

DATASET = "memory"
_GIB, _GB = 2**30, 10**9
_TITAN_NOTE = "form chosen with these rows in view: pools of buffers, the rule for the loss, the split in microbatches"
_PIPELINE_NOTE = "form chosen with these rows in view: how long the runtime holds the buffers of messages"
_SIMUMAX_NOTE = "form chosen with these rows in view: what Transformer Engine keeps, by SimuMax's notes"
# Korthikanti et al., table 3: layers do not matter for shares. Hidden size and heads; sequences of 2048, tp 8.
_FIGURE_7 = {"22B": (6144, 64), "175B": (12288, 96), "530B": (20480, 128), "1T": (25600, 160)}


def score_memory() -> tuple[Score, ...]:
    """All parts, with what is beside them."""
    return (*score_training(), *score_pipelines(), *score_published(), score_percentages())


def score_training() -> tuple[Score, ...]:
    """Peaks of real training on a CPU: ours, and the growth of the process."""
    rows = load_table("memory_training")
    measured, predicted = _column(rows, "peak_bytes"), np.array([predict_row(row) for row in rows])
    part = "peak of training on a CPU"
    return (
        score_rows(DATASET, part, "ours", measured, _with_intervals(measured, predicted, rows), target=3.0),
        score_rows(DATASET, part, "growth of the process", measured, _column(rows, "resident_bytes")),
    )


def predict_row(row: StepRow) -> float:
    """Peak bytes of a case of ``memory_training.csv``."""
    size, optimizer = int(row["batch_size"]), _optimizer(row)
    if row["recompute"] == "none":
        return _simulated_peaks(even_plan(row["model"], 1, 1, size, 1, "1f1b", optimizer))[0]
    graph = load_shipped_graph(row["model"])
    again = [i for i, layer in enumerate(graph.layers) if "." in layer.name]
    workload = Workload(global_batch=size, optimizer=optimizer)
    return find_peak(trace_step(with_recompute(graph, recompute_layers(graph, again)), workload)).num_bytes


def score_pipelines() -> tuple[Score, ...]:
    """Peaks of the ranks of real pipelines on a CPU."""
    rows = load_table("memory_pipelines")
    peaks = {plan: _simulated_peaks(plan) for plan in {pipeline_plan(row) for row in rows}}
    predicted = np.array([peaks[pipeline_plan(row)][int(row["rank"])] for row in rows], np.float64)
    measured = _column(rows, "peak_bytes")
    ours = _with_intervals(measured, predicted, rows)
    return (
        score_rows(DATASET, "peaks of ranks of pipelines", "ours", measured, ours, target=3.0, note=_PIPELINE_NOTE),
    )


def _simulated_peaks(plan: Plan) -> tuple[int, ...]:
    graph = load_shipped_graph(plan.model)
    return simulate_plan(plan, graph, load_cluster(plan.cluster)).peak_memory_bytes


def score_published() -> tuple[Score, ...]:
    """Peaks of published runs on GPUs."""
    rows = [row for row in load_steps() if row["peak_mem_gib"]]
    simumax = [row for row in rows if row["mem_kind"] == "peak allocated"]
    titan = [row for row in rows if row["framework"].startswith("torchtitan")]
    bubble = [row for row in rows if row["mem_kind"].startswith("GB as printed")]
    theirs = np.array([_simumax_gib(row) for row in simumax]) * _GIB
    part = "allocated, SimuMax B200"
    return (
        _score_ours(part, simumax, _GIB, target=2.0, note=_SIMUMAX_NOTE),
        score_rows(DATASET, part, "SimuMax", _column(simumax, "peak_mem_gib") * _GIB, theirs),
        _score_ours("reserved, torchtitan", titan, _GIB, target=8.0, note=_TITAN_NOTE),
        _score_ours("as printed, Zero Bubble", bubble, _GB, arm="ours, scores kept", keeps_scores=True),
        _score_ours("as printed, Zero Bubble", bubble, _GB, arm="ours, scores not kept"),
    )


def _score_ours(
    part: str,
    rows: Sequence[StepRow],
    unit: int,
    *,
    arm: str = "ours",
    target: float | None = None,
    keeps_scores: bool = False,
    note: str = "",
) -> Score:
    measured = _column(rows, "peak_mem_gib") * unit
    predicted = np.array([predict_published(row, keeps_scores=keeps_scores) for row in rows])
    ours = _with_intervals(measured, predicted, rows)
    return score_rows(DATASET, part, arm, measured, ours, target=target, note=note)


def predict_published(row: StepRow, *, keeps_scores: bool = False) -> float:
    """Peak bytes of a row of published steps: allocated of Megatron-LM's, reserved of torchtitan's.

    ``keeps_scores``: attention keeps the matrix of its scores, though the row's software could do without.
    """
    case = read_step(row)
    setup = replace(case.setup, fused_attention=not keeps_scores)
    if not row["framework"].startswith("torchtitan"):
        fused = "cef" in row["locator"]
        return predict_device_peak(case.transformer, setup, "megatron", fused_loss=fused).allocated_bytes
    fused = "202506" in row["source"]
    return predict_device_peak(case.transformer, setup, "fsdp2", fused_loss=fused).reserved_bytes


def score_percentages() -> Score:
    """Activation memory as a percentage of tensor parallelism alone."""
    rows = load_table("activation_memory_korthikanti_fig7")
    shares = np.array([predict_percentage(row["model"], row["technique"]) for row in rows])
    measured = _column(rows, "pct_of_tensor_parallel_baseline")
    return score_rows(DATASET, "activation percentages (formula)", "ours", measured, shares, judged="worst", target=2.0)


def predict_percentage(model: str, technique: str) -> float:
    """Per cent of what tensor parallelism alone keeps in a layer of a model of figure 7."""
    hidden, heads = _FIGURE_7[model]
    shape = TransformerShape(
        layers=1,
        hidden=hidden,
        heads=heads,
        kv_heads=heads,
        head_dim=hidden // heads,
        ffn=4 * hidden,
        vocab=1,
    )
    recompute: Recompute = "full" if "full" in technique else "selective" if "selective" in technique else "none"

    def kept(recompute: Recompute, *, sequence_parallel: bool) -> int:
        setup = TrainingSetup(
            seq=2048,
            microbatch_size=1,
            num_microbatches=1,
            tp=8,
            sequence_parallel=sequence_parallel,
            recompute=recompute,
            fused_attention=False,
            precision="fp16",
        )
        return sum(saved_bytes(shape, setup, layer=0).values())

    return 100.0 * kept(recompute, sequence_parallel="sequence" in technique) / kept("none", sequence_parallel=False)


def _with_intervals(measured: Floats, predicted: Floats, rows: Sequence[StepRow]) -> Predictions:
    """Intervals from the errors of the rows whose model or layout is another one; all in bytes."""
    names = ("model", "num_stages", "tp", "pp", "cp", "ep", "dp", "seq", "recompute")
    keys = [tuple(row.get(name, "") for name in names) for row in rows]
    low, high = np.empty(len(rows)), np.empty(len(rows))
    for i, key in enumerate(keys):
        others = np.array([other != key for other in keys])
        interval = fit_interval(measured[others], predicted[others])
        low[i], high[i] = interval.around(predicted[i])
    basis: Basis = "roofline"
    return Predictions(seconds=predicted, low_s=low, high_s=high, basis=(basis,) * len(rows))


def _optimizer(row: StepRow) -> Optimizer:
    return Optimizer(
        kind="adamw" if row["optimizer"] == "adamw" else "sgd", momentum=row["optimizer"].endswith("+momentum")
    )


def _column(rows: Sequence[StepRow], name: str) -> Floats:
    return np.array([float(row[name]) for row in rows])


def _simumax_gib(row: StepRow) -> float:
    found = re.search(r"([\d.]+) GiB", row["notes"])
    if found is None:
        raise MeasurementError(
            f"Row {row['id']!r} was to say what SimuMax predicts; expected a number of GiB in its notes. Restore them."
        )
    return float(found[1])
