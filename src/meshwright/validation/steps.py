"""How wrong are predicted steps: published training steps, from a few efficiencies per kind of device.

What they are fitted on, and what the intervals rest on, stands in `step_model`; the split in `step_split`. Beside it,
on the same rows: two constant shares of the peak FLOP rate, one fitted on those of our rows that the device paces, one
on the scored rows of large models from all origins but the predicted row's, which ours never sees; where a source
prints the prediction of its own simulator, that one, and the same op list at the rates of the datasheet.
The order of layouts within a job is scored, too (`ranking`), and which rows are refused for memory is told
(`step_memory`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from meshwright.cost.parameters import count_parameters
from meshwright.cost.residual import ResidualShape
from meshwright.cost.roofline import peak_flops
from meshwright.cost.steps import StepPrices, head_ops, layer_ops, load_step_model, predict_layer, residual_ops
from meshwright.spec import MeasurementError
from meshwright.validation.datasets import load_all_steps, load_table
from meshwright.validation.scores import Score, score_rows
from meshwright.validation.splits import refuse_seen
from meshwright.validation.step_memory import judge_memory
from meshwright.validation.step_model import (
    UNDERSPECIFIED,
    UNDERSPECIFIED_PLANS,
    UNDERSPECIFIED_ZERO,
    Residuals,
    count_alike,
    predict_by_datasheet,
    predict_case,
    predict_cases,
    regime_of,
)
from meshwright.validation.step_rows import StepCase, read_step, row_hash
from meshwright.validation.step_split import calibration_rows
from meshwright.validation.step_table import check_steps, list_reasons, read_steps

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from meshwright.cost.prediction import Floats, Predictions
    from meshwright.cost.steps import Regime, StepModel
    from meshwright.cost.transformer import Recompute
    from meshwright.validation.step_table import LeftOut

DATASET = "steps"
OURS, CONSTANT = "op list and pipeline", "constant share of the peak"
CONSTANT_OF_OTHERS = "constant share of others' large models"
DATASHEET = "op list at the rates of the datasheet"
# Parameters from which on a model is large.
_LARGE = 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Rows that are scored together: their ids start so; their kind, bandwidth and regime are these, where given.

    ``without``: how their ids do not start. ``target``: the mean error to reach, in per cent. ``note``: what a reader
    of the figure has to know.
    """

    name: str
    ids: tuple[str, ...] = ("",)
    without: tuple[str, ...] = ("-",)
    device: str = ""
    bandwidth_bytes_per_s: float | None = None
    regime: Regime | None = None
    target: float | None = None
    note: str = ""

    def holds(self, case: StepCase, regime: Regime) -> bool:
        """Whether a case belongs here."""
        return (
            case.row_id.startswith(self.ids)
            and not case.row_id.startswith(self.without)
            and case.kind.name.startswith(self.device)
            and self.bandwidth_bytes_per_s in (None, case.kind.memory_bandwidth_bytes_per_s)
            and self.regime in (None, regime)
        )


# What was decided after a look at residuals of scored rows (docs/concepts/step-times.md, "What was chosen in view").
_VIEW = "form chosen with these rows in view"
_ALL = f"{_VIEW}: what the cache holds, and that origins count alike in the fit"
_SUSTAINED = f"{_ALL}; products sustain a published rate at most"
_BUBBLE = (
    f"{_VIEW}: attention keeps its scores, as these rows' peaks of memory say; as many words as their parameters "
    "leave; stages that go on without the norm of all gradients"
)
_TITAN = (
    f"{_VIEW}: as many microbatches as stages where they do not say, recompute that stops early, gathers in 8 bits, "
    "asynchronous tensor parallelism, a clock that follows the stated power, and what NCCL's kernels take from others"
)
_FOUNDRY = (
    f"{_VIEW}: FlashAttention's first version gains on H100 what the second one does; layers of MPT-70b by its "
    "parameters; what NCCL's kernels take from others"
)
_SIMUMAX = "nothing fitted on B200: it takes the set of H100; the rows leave schedule and recompute empty"
_ALPA = f"{_VIEW}: embeddings by products, softmax in three kernels and the optimizer in one, as its code and XLA's say"
_PLANS = (
    "under-specified: what Alpa's search made of these models; taken is that all devices split the batch, and experts "
    "where no mesh is stated"
)
_ZERO = "under-specified: which version of DeepSpeed gathered what beside what is not said"
PARTS = (
    Part(name="vTrain, one node", ids=("vtrain-single",), target=6.0, note=_ALL),
    Part(name="vTrain, one node, paced by the host", ids=("vtrain-single",), regime="small"),
    Part(name="vTrain, one node, paced by the device", ids=("vtrain-single",), regime="fitted"),
    Part(name="vTrain, many nodes", ids=("vtrain-multi",), target=8.0, note=_SUSTAINED),
    Part(name="SC'21", ids=("sc21-t1", "sc21-t2-PTD"), target=6.0, note=_SUSTAINED),
    Part(name="SC'21, ZeRO-3", ids=UNDERSPECIFIED_ZERO, note=_ZERO),
    Part(name="Korthikanti, Table 5", ids=("korth-t5",), target=4.0, note=_SUSTAINED),
    Part(name="Korthikanti, section 6.3", ids=("korth-s63",)),
    Part(name="Zero Bubble, Table 4", ids=("zb-",), target=6.0, note=_BUBBLE),
    Part(name="FSDP: llm-foundry and torchtitan", ids=("mpt-", "tt-"), target=9.0, note=_TITAN),
    Part(name="llm-foundry, A100 80 GB", ids=("mpt-",), device="A100", bandwidth_bytes_per_s=2039e9, note=_FOUNDRY),
    Part(name="llm-foundry, A100 40 GB", ids=("mpt-",), device="A100", bandwidth_bytes_per_s=1555e9, note=_FOUNDRY),
    Part(name="llm-foundry, H100", ids=("mpt-",), device="H100", note=_FOUNDRY),
    Part(name="torchtitan, H100", ids=("tt-",), device="H100", note=_TITAN),
    Part(name="torchtitan, H200", ids=("tt-",), device="H200", note=_TITAN),
    Part(name="SimuMax, B200", ids=("simumax-",), target=8.0, note=_SIMUMAX),
    Part(name="Alpa, one node", ids=("alpa-node",), without=UNDERSPECIFIED_PLANS, target=10.0, note=_ALPA),
    Part(name="Alpa, GPT on one node", ids=("alpa-node-gpt",), target=10.0, note=_ALPA),
    Part(name="Alpa, mixture of experts on one node", ids=("alpa-node-moe",), without=UNDERSPECIFIED_PLANS, note=_ALPA),
    Part(name="Alpa, Wide-ResNet on one node", ids=("alpa-node-wresnet",), without=UNDERSPECIFIED_PLANS, note=_ALPA),
    Part(name="Alpa, plans not stated", ids=UNDERSPECIFIED_PLANS, note=_PLANS),
    Part(name="Alpa, GPT end to end", ids=("alpa-e2e",), target=10.0, note=_ALPA),
    Part(name="all on A100 paced by the device", regime="fitted"),
    Part(name="all on other devices paced by the device", regime="elsewhere"),
    Part(name="all paced by the host", regime="small"),
    Part(name="all", note="{memory}"),
)


def predict_steps(rows: Sequence[Mapping[str, str]]) -> Predictions:
    """Seconds of the step of every row, shape (rows,), with the shipped model.

    Raises MeasurementError if a row does not say enough; `step_table.read_steps` tells which ones do.
    """
    check_steps(rows)
    model, seconds = load_step_model(), list[float]()
    cases, left_out = read_steps(rows, predict=lambda case: seconds.append(predict_case(case, model)))
    if left_out:
        count = sum(len(reason.lines) for reason in left_out)
        raise MeasurementError(
            f"{count} of {len(rows)} rows cannot be predicted: {'; '.join(list_reasons(left_out))}. Complete them or "
            "leave them out."
        )
    return predict_cases(cases, model, known_s=seconds)


def score_steps() -> tuple[Score, ...]:
    """Every part of the public steps, ours and the baselines on the same rows; the calibration rows in none."""
    model, rows = load_step_model(), load_all_steps()
    fitted = calibration_rows(rows)
    names = {row["id"] for row in fitted}
    scored = [row for row in rows if row["id"] not in names and row.get("iter_time_s")]
    seen = np.array([int(row, 16) for row in model.fitted_rows], np.uint64)
    refuse_seen(DATASET, seen, np.array([row_hash(row) for row in scored], np.uint64))
    (cases, left_out), calibration = read_steps(scored), read_steps(fitted)[0]
    predicted = predict_cases(cases, model, Residuals(calibration, cases, model))
    regimes = [regime_of(case, model) for case in cases]
    constant_s = _flops_seconds(cases) / _fit_constant([c for c in calibration if regime_of(c, model) == "fitted"])
    large = [case for case, regime in zip(cases, regimes, strict=True) if regime == "fitted" and _is_large(case)]
    of_others_s = predict_by_others(cases, large)
    simulated = {row["id"]: seconds for row in scored if (seconds := _own_prediction(row)) is not None}
    memory = f"{judge_memory(rows)}; not predicted: {_name_left_out(left_out)}"
    scores: list[Score] = []
    for part in PARTS:
        held = np.array([part.holds(case, regime) for case, regime in zip(cases, regimes, strict=True)])
        mine = [case for case, kept in zip(cases, held, strict=True) if kept]
        measured, jobs, note = _measured(mine), [case.job for case in mine], part.note.format(memory=memory)
        ours = predicted.select(held)
        scores.append(score_rows(DATASET, part.name, OURS, measured, ours, target=part.target, note=note, jobs=jobs))
        for arm, by_share in ((CONSTANT, constant_s), (CONSTANT_OF_OTHERS, of_others_s)):
            scores.append(score_rows(DATASET, part.name, arm, measured, by_share[held], jobs=jobs))
        if all(case.row_id in simulated for case in mine):
            plain = np.array([predict_by_datasheet(case) for case in mine])
            scores.append(score_rows(DATASET, part.name, DATASHEET, measured, plain, jobs=jobs))
            own = np.array([simulated[case.row_id] for case in mine])
            scores.append(score_rows(DATASET, part.name, "SimuMax", measured, own, jobs=jobs))
    return (*scores, *_score_layers(model))


def _name_left_out(left_out: Sequence[LeftOut]) -> str:
    """How many rows are not predicted, by what they lack."""
    return ", ".join(f"{len(reason.lines)} rows for {reason.reason.partition(':')[0]}" for reason in left_out) or "none"


def _score_layers(model: StepModel) -> tuple[Score, ...]:
    """Korthikanti's Table 4: forward and backward of one layer of the 22B model, five ways; fitted on nowhere."""
    rows = load_table("layer_times_korthikanti")
    measured, predicted = [], []
    for row in rows:
        named = row["experiment"].lower()
        # The columns of a step that the table implies: eight devices, one microbatch of its size.
        full = {"id": named, "family": "gpt", "layers": "48", "n_devices": row["tp"], "pp": "1", "dp": "1"}
        case = read_step(row | full | {"gbs_seq": row["mbs"], "framework": "Megatron-LM", "iter_time_s": ""})
        again: Recompute = "selective" if "selective" in named else "full" if "with recompute" in named else "none"
        setup = replace(case.setup, sequence_parallel="sequence" in named, recompute=again)
        efficiencies = model.efficiencies_of(case.kind.name)
        prices = StepPrices(kind=case.kind, node=case.node, setup=setup, efficiencies=efficiencies)
        layer = predict_layer(case.shape, prices, case.software)
        measured += [float(row["forward_ms"]) / 1e3, float(row["backward_ms"]) / 1e3]
        predicted += [layer.forward_s, layer.input_gradient_s + layer.weight_gradient_s]
    return (score_rows(DATASET, "Korthikanti, Table 4, layers", OURS, np.array(measured), np.array(predicted)),)


def predict_by_others(cases: Sequence[StepCase], measured: Sequence[StepCase]) -> Floats:
    """Seconds by a constant share of the peak, shape (cases,); each origin's is fitted on what the others measured."""
    shares = {
        origin: _fit_constant([other for other in measured if other.origin != origin])
        for origin in {case.origin for case in cases}
    }
    return _flops_seconds(cases) / [shares[case.origin] for case in cases]


def _is_large(case: StepCase) -> bool:
    """Whether a row that says enough is of a large model."""
    whole = count_parameters(case.transformer, replace(case.setup, tp=1, pp=1, ep=1, chunks=1, schedule="1f1b"), 0)
    return whole.dense + whole.experts >= _LARGE and not case.row_id.startswith(UNDERSPECIFIED)


def _fit_constant(cases: Sequence[StepCase]) -> float:
    shares = np.log(_flops_seconds(cases) / _measured(cases))
    return float(np.exp(np.average(shares, weights=count_alike(cases))))


def _flops_seconds(cases: Sequence[StepCase]) -> Floats:
    """Seconds of the model's FLOPs, a recomputed forward included, at the peak of all devices."""
    return np.array([_flops(case) / peak_flops(case.kind, _half(case)) for case in cases])


def _half(case: StepCase) -> str:
    return "bfloat16" if "bfloat16" in case.kind.peak_flops_per_s else "float16"


def _flops(case: StepCase) -> float:
    if isinstance(case.shape, ResidualShape):
        return case.setup.num_microbatches * sum(op.count * op.flops for op in residual_ops(case.shape, case.setup))
    ops = layer_ops(case.shape, case.setup, case.shape.layers - 1)
    layer = sum(op.count * op.flops for op in ops)
    again = sum(op.count * op.flops for op in ops if op.part == "forward") if case.setup.recompute == "full" else 0.0
    head = sum(op.count * op.flops for op in head_ops(case.shape, case.setup))
    return case.setup.num_microbatches * ((layer + again) * case.shape.layers + head) / case.setup.pp


def _own_prediction(row: Mapping[str, str]) -> float | None:
    """What the source's own simulator predicted, s, where its notes say so."""
    found = re.match(r"SimuMax prediction ([\d.]+) ms", row.get("notes", ""))
    return float(found[1]) / 1e3 if found else None


def _measured(cases: Sequence[StepCase]) -> Floats:
    return np.array([case.measured_s for case in cases], np.float64)
