"""Score predicted bytes: of real training on this machine, and of published runs.

    training on this machine    `simulator.simulate_plan`, which `plan` and `simulate` print, against the allocations
                                that torch reports (``data/memory_training.csv``, by ``scripts/measure_memory.py``);
                                with recomputed layers, `cost.memory.trace_step`
    pipelines on this machine   the same for every rank of plans of two to four stages, run by Meshwright's runtime
                                (``data/memory_pipelines.csv``), and of plans with recompute
                                (``data/memory_recompute.csv``), or sharded states (``data/memory_sharing.csv``)
    training on an H100         `planner.evaluate_plan`, which decides whether a plan fits, against torch's allocator
                                (``data/steps_cuda.csv``): allocated bytes, and bytes reserved from the driver
    published runs              rows of ``data/training_steps.csv`` as plans (`step_plans`), evaluated as `plan` does:
                                the bytes allocated (SimuMax on B200; Zero Bubble, as printed) or reserved (torchtitan)
                                on the device that needs most
    activation percentages      graphs of one layer from `templates`, split by `program`, against Korthikanti et al.,
                                figure 7, whose values follow from a formula: a check, not an accuracy

Nothing is fitted: the model counts tensors. The software of a published row decides whether attention is fused;
everything else is as in our runtime, which allocates other buffers than Megatron-LM, Transformer Engine and torchtitan
do (docs/concepts/memory.md). The 80 % interval around a row comes from the errors of the other configurations of the
same set, never from its own.

SimuMax's rows leave schedule and recompute empty: 1F1B and no recompute are assumed, as in its launchers
(MooreThreads/SimuMax, simu_tools/megatron_scripts/scripts). Zero Bubble does not say which memory was read; its figures
are compared with the allocated bytes.

A row of ``memory_pipelines.csv`` describes a plan and one of its ranks; rows of ``memory_recompute.csv`` also state the
recompute, rows of ``memory_sharing.csv`` the ZeRO stage and shard size.
"""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from meshwright.cost.costs import Floats, Predictions, fit_interval
from meshwright.cost.memory import MEMORY_MARGIN, find_peak, trace_step, weigh_stage
from meshwright.planner import RankedPlan, evaluate_plan
from meshwright.program import shard_graph
from meshwright.simulator import simulate_plan
from meshwright.spec import (
    GradientExchange,
    MeasurementError,
    Optimizer,
    Plan,
    Sharding,
    StagePlan,
    Workload,
    format_percent,
    load_cluster,
    load_shipped_graph,
    read_recompute,
    recompute_layers,
    slice_graph,
    with_recompute,
)
from meshwright.spec.memory import SENT
from meshwright.templates import decoder_graph
from meshwright.templates.shapes import TransformerShape
from meshwright.validation.datasets import StepRow, load_steps, load_table
from meshwright.validation.gpu_runs import TABLE, read_run
from meshwright.validation.scores import Score, score_rows
from meshwright.validation.step_plans import StepPrediction, evaluate_steps, recompute_attention
from meshwright.validation.step_rows import read_step

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from meshwright.cost import Basis
    from meshwright.spec.exchange import ZeroStage
    from meshwright.spec.recompute import Ranges

DATASET = "memory"
_GIB, _GB = 2**30, 10**9
_TITAN_NOTE = "form chosen with these rows in view: the split in microbatches"
_PIPELINE_NOTE = "form chosen with these rows in view: how long the runtime holds the buffers of messages"
_RECOMPUTE_NOTE = (
    "form chosen with these rows in view: kept results that a recomputation does not reach are freed at its end"
)
_SHARING_NOTE = (
    "form chosen with the first 32 rows in view: when gradients move into buckets, and which gathered units are in "
    "memory at which op"
)
_CUDA_NOTE = "form chosen with these rows in view: what CUDA's kernels keep, by torch's sources"
_BUBBLE_NOTE = "form chosen with these rows in view: attention keeps its scores, as its software does"
# Korthikanti et al., table 3: layers do not matter for shares. Hidden size and heads; sequences of 2048, tp 8.
_SEQ, _TENSOR = 2048, 8
_FIGURE_7 = {"22B": (6144, 64), "175B": (12288, 96), "530B": (20480, 128), "1T": (25600, 160)}


def score_memory() -> tuple[Score, ...]:
    """Return all scores of memory: every part of the module's table."""
    return (*score_training(), *score_pipelines(), *score_cuda(), *score_published(), score_percentages())


def score_training() -> tuple[Score, ...]:
    """Score peaks of real training on a CPU: our prediction, and the growth of the process as a baseline."""
    rows = load_table("memory_training")
    measured, predicted = _column(rows, "peak_bytes"), np.array([predict_row(row) for row in rows])
    part = "peak of training on a CPU"
    return (
        score_rows(DATASET, part, "ours", measured, _with_intervals(measured, predicted, rows), target=3.0),
        score_rows(DATASET, part, "growth of the process", measured, _column(rows, "resident_bytes")),
    )


def predict_row(row: StepRow) -> float:
    """Return the predicted peak bytes of a row of ``memory_training.csv``."""
    size, optimizer = int(row["batch_size"]), _optimizer(row)
    if row["recompute"] == "none":
        return _simulated_peaks(even_plan(row["model"], 1, 1, size, 1, "1f1b", optimizer))[0]
    graph = load_shipped_graph(row["model"])
    again = [i for i, layer in enumerate(graph.layers) if "." in layer.name]
    workload = Workload(global_batch=size, optimizer=optimizer)
    return find_peak(trace_step(with_recompute(graph, recompute_layers(graph, again)), workload)).num_bytes


def score_pipelines() -> tuple[Score, ...]:
    """Score peaks of the ranks of real pipelines on a CPU, with recompute, and with sharded states."""
    again = "peaks of ranks that recompute"
    return (
        _score_ranks("memory_pipelines", "peaks of ranks of pipelines", _PIPELINE_NOTE),
        _score_ranks("memory_recompute", again, _RECOMPUTE_NOTE),
        _score_ranks("memory_sharing", "peaks of ranks that shard states", _SHARING_NOTE),
    )


def _score_ranks(table: str, part: str, note: str) -> Score:
    rows = load_table(table)
    peaks = {plan: _simulated_peaks(plan) for plan in {pipeline_plan(row) for row in rows}}
    predicted = np.array([peaks[pipeline_plan(row)][int(row["rank"])] for row in rows], np.float64)
    measured = _column(rows, "peak_bytes")
    ours = _with_intervals(measured, predicted, rows)
    return score_rows(DATASET, part, "ours", measured, ours, target=3.0, note=note)


def _simulated_peaks(plan: Plan) -> tuple[int, ...]:
    graph = load_shipped_graph(plan.model)
    return simulate_plan(plan, graph, load_cluster(plan.cluster)).peak_memory_bytes


def score_cuda() -> tuple[Score, ...]:
    """Score peaks of plain PyTorch on an H100: allocated and reserved bytes.

    The note of the reserved bytes names the margin that covers 9 of 10 rows.
    """
    rows = load_table(TABLE)
    found = [predict_cuda(row) for row in rows]
    is_large = np.array([bool(row["reserved_bytes"]) for row in rows])
    allocated = np.array([float(item.peak_memory_bytes[0]) for item in found])
    reserved = np.array([float(item.reserved_bytes[0]) for item in found])[is_large]
    taken = _column(rows, "peak_bytes")
    measured = _column([row for row in rows if row["reserved_bytes"]], "reserved_bytes")
    needed = format_percent(margin_needed(measured, reserved))
    note = (
        f"{_CUDA_NOTE}; 9 of 10 rows reserve at most {needed} more than predicted; plans leave a margin of "
        f"{format_percent(MEMORY_MARGIN)}"
    )
    return (
        score_rows(
            DATASET, "allocated, H100", "ours", taken[is_large], allocated[is_large], target=4.0, note=_CUDA_NOTE
        ),
        score_rows(DATASET, "allocated, H100, below 2.5 GiB", "ours", taken[~is_large], allocated[~is_large]),
        score_rows(DATASET, "reserved, H100", "ours", measured, reserved, target=10.0, note=note),
    )


def predict_cuda(row: StepRow) -> RankedPlan:
    """Return the evaluated plan of a row of ``steps_cuda.csv``, which has the predicted bytes."""
    run = read_run(row)
    return evaluate_plan(run.plan, run.graph, run.cluster, run.cost)


def margin_needed(measured: Floats, predicted: Floats) -> float:
    """Return the least margin, as a share of the prediction, that covers 9 of 10 measured values; never below 0."""
    return max(float(np.quantile(measured / predicted - 1, 0.9)), 0.0)


def score_published() -> tuple[Score, ...]:
    """Score the peak memory of published runs on GPUs."""
    rows = [row for row in load_steps() if row["peak_mem_gib"]]
    simumax = [row for row in rows if row["mem_kind"] == "peak allocated"]
    titan = [row for row in rows if row["framework"].startswith("torchtitan")]
    bubble = [row for row in rows if row["mem_kind"].startswith("GB as printed")]
    theirs = np.array([_simumax_gib(row) for row in simumax]) * _GIB
    part = "allocated, SimuMax B200"
    return (
        _score_ours(part, simumax, _GIB, target=2.0),
        score_rows(DATASET, part, "SimuMax", _column(simumax, "peak_mem_gib") * _GIB, theirs),
        _score_ours("reserved, torchtitan", titan, _GIB, target=8.0, note=_TITAN_NOTE),
        _score_ours("as printed, Zero Bubble", bubble, _GB, note=_BUBBLE_NOTE),
    )


def _score_ours(part: str, rows: Sequence[StepRow], unit: int, *, target: float | None = None, note: str = "") -> Score:
    measured = _column(rows, "peak_mem_gib") * unit
    ours = _with_intervals(measured, predict_published(rows), rows)
    return score_rows(DATASET, part, "ours", measured, ours, target=target, note=note)


def predict_published(rows: Sequence[StepRow]) -> Floats:
    """Return the predicted bytes of the fullest device of each row of published steps, shape (rows,).

    They are reserved bytes for torchtitan's rows, allocated bytes for others. Raises InexpressibleError or another
    MeshwrightError if a row cannot become a plan.
    """
    found = evaluate_steps([read_step(row) for row in rows])
    predicted = np.empty(len(rows))
    for i, (row, item) in enumerate(zip(rows, found, strict=True)):
        if not isinstance(item, StepPrediction):
            raise item
        predicted[i] = item.reserved_bytes if row["framework"].startswith("torchtitan") else item.peak_bytes
    return predicted


def score_percentages() -> Score:
    """Score activation memory as a percentage of that with tensor parallelism alone (Korthikanti et al., figure 7)."""
    rows = load_table("activation_memory_korthikanti_fig7")
    shares = np.array([predict_percentage(row["model"], row["technique"]) for row in rows])
    measured = _column(rows, "pct_of_tensor_parallel_baseline")
    return score_rows(DATASET, "activation percentages (formula)", "ours", measured, shares, judged="worst", target=2.0)


def predict_percentage(model: str, technique: str) -> float:
    """Return a layer's activation memory with ``technique``, in per cent of that with tensor parallelism alone.

    ``model``: a model of figure 7 of Korthikanti et al., such as "22B".
    """
    hidden, heads = _FIGURE_7[model]
    shape = TransformerShape(
        layers=3,
        hidden=hidden,
        heads=heads,
        kv_heads=heads,
        head_dim=hidden // heads,
        ffn=4 * hidden,
        vocab=_TENSOR,
        max_positions=_SEQ,
    )
    return 100.0 * _kept_bytes(shape, technique) / _kept_bytes(shape, "none")


def _kept_bytes(shape: TransformerShape, technique: str) -> int:
    """What the second of three blocks keeps of a sample on each of the devices that split it, its input included."""
    graph = decoder_graph(shape, _SEQ, fused_attention=False)
    graph = shard_graph(graph, Sharding(tensor=_TENSOR, sequence_parallel="sequence" in technique)).graph
    again: Ranges = ()
    if "full" in technique:
        again = read_recompute(graph, "full").ranges
    elif "selective" in technique:
        again = recompute_attention(graph)
    block = slice_graph(graph, [(0, 2), (2, 3), (3, 5)])[1]
    work = Workload(global_batch=1, precision="mixed")
    found = weigh_stage(with_recompute(graph, again), block, 1, work, device="cuda")
    # What is sent is the input of the next block.
    return found.microbatch_bytes - found.phases.forward.after[SENT]


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
            f"Row {row['id']!r} lacks SimuMax's prediction; expected a number of GiB in its notes. Restore the notes."
        )
    return float(found[1])


# Stages are cut evenly by layers and each have the number of replicas in ``replicas``.
PIPELINE_COLUMNS = (
    "model",
    "num_stages",
    "replicas",
    "microbatch_size",
    "num_microbatches",
    "schedule",
    "optimizer",
)
RECOMPUTE_COLUMNS = (*PIPELINE_COLUMNS, "recompute")
SHARING_COLUMNS = (*PIPELINE_COLUMNS, "zero", "shard_size")


def pipeline_plan(row: Mapping[str, Any]) -> Plan:
    """Return the plan of a row of ``memory_pipelines.csv``, ``memory_recompute.csv`` or ``memory_sharing.csv``."""
    num_stages, replicas, size, count = (int(row[name]) for name in PIPELINE_COLUMNS[1:5])
    optimizer = Optimizer.named(row["optimizer"])
    plan = even_plan(row["model"], num_stages, replicas, size, count, row["schedule"], optimizer)
    again = read_recompute(load_shipped_graph(plan.model), row.get("recompute", "none"), plan.bounds)
    zero, shard_size = (int(row.get(name, 0)) for name in SHARING_COLUMNS[-2:])
    exchange = GradientExchange(zero=cast("ZeroStage", zero), shard_size=shard_size)
    return replace(plan, recompute=again.ranges, keeps=again.keeps, exchange=exchange)


def even_plan(
    model: str, num_stages: int, replicas: int, size: int, count: int, schedule: str, optimizer: Optimizer
) -> Plan:
    """Return a plan whose stages have about equal numbers of layers, for ``count`` microbatches of ``size`` samples."""
    graph = load_shipped_graph(model)
    cuts = [len(graph.layers) * stage // num_stages for stage in range(num_stages + 1)]
    return Plan(
        model=model,
        graph_hash=graph.content_hash,
        cluster=f"{num_stages * replicas}xcpu",
        workload=Workload(global_batch=size * count, optimizer=optimizer),
        stages=tuple(
            StagePlan(start=start, stop=stop, ranks=tuple(range(stage * replicas, (stage + 1) * replicas)))
            for stage, (start, stop) in enumerate(pairwise(cuts))
        ),
        num_microbatches=count,
        schedule=schedule,
    )
