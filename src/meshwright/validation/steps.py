"""How wrong are predicted steps: published training steps, from one set of efficiencies and the devices' datasheets.

What the set is fitted on, and what the intervals rest on, stands in `step_model`. Beside it, on the same rows: the best
constant share of the peak FLOP rate (fitted on the same rows as ours), and where a source prints the prediction of its
own simulator, that one.

Six of the eight rows of Korthikanti's Table 5 have the size of a model that the set is fitted on. They are judged by
sets that were fitted anew without any row of their size; the shipped set stands beside, without a target.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from meshwright.cost.prediction import Predictions
from meshwright.cost.roofline import peak_flops
from meshwright.cost.steps import StepPrices, head_ops, layer_ops, load_step_model, predict_layer
from meshwright.spec import MeasurementError
from meshwright.validation.datasets import load_steps, load_table
from meshwright.validation.scores import Score, score_rows
from meshwright.validation.splits import refuse_seen
from meshwright.validation.step_model import Residuals, is_fitted, predict_cases, predict_left_out, regime_of
from meshwright.validation.step_rows import StepCase, read_step, row_hash
from meshwright.validation.step_table import check_steps, list_reasons, read_steps

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from meshwright.cost.prediction import Floats
    from meshwright.cost.steps import Regime, StepModel
    from meshwright.cost.transformer import Recompute

DATASET = "steps"
OURS, CONSTANT = "op list and pipeline", "constant share of the peak"
WITHOUT_SIZE = f"{OURS}, fitted without the row's size"


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Rows that are scored together: their ids start so; their bandwidth and regime are these, where given.

    ``targets``: of fits without the row's size of model. ``note``: of the shipped set's score.
    """

    name: str
    ids: str = ""
    device: str = ""
    bandwidth_bytes_per_s: float | None = None
    regime: Regime | None = None
    targets: tuple[tuple[str, float], ...] = ()
    note: str = ""

    def holds(self, case: StepCase, regime: Regime) -> bool:
        """Whether a case belongs here."""
        return (
            case.row_id.startswith(self.ids)
            and case.kind.name.startswith(self.device)
            and self.bandwidth_bytes_per_s in (None, case.kind.memory_bandwidth_bytes_per_s)
            and self.regime in (None, regime)
        )


# The line between the regimes (`step_model`) and what a row of torchtitan leaves out (`step_rows`).
_CUT = "form chosen with these rows in view: the cut at 100 µs per op, by vTrain's rows on one node"
_TITAN = "form chosen with these rows in view: a pipeline whose microbatches are not stated runs one sequence at a time"
PARTS = (
    Part(name="Korthikanti, Table 5", ids="korth-t5", targets=(("mape", 4.0), ("worst", 8.0))),
    Part(name="Korthikanti, section 6.3", ids="korth-s63"),
    Part(name="vTrain, many nodes", ids="vtrain-multi"),
    Part(name="vTrain, one node", ids="vtrain-single"),
    Part(name="vTrain, one node, ops from 100 µs on", ids="vtrain-single", regime="fitted", note=_CUT),
    Part(name="Zero Bubble", ids="zb-"),
    Part(name="SC'21, ZeRO-3", ids="sc21-t2-ZeRO"),
    Part(name="llm-foundry, A100 80 GB", ids="mpt-", device="A100", bandwidth_bytes_per_s=2039e9),
    Part(name="llm-foundry, A100 40 GB", ids="mpt-", device="A100", bandwidth_bytes_per_s=1555e9),
    Part(name="llm-foundry, H100", ids="mpt-", device="H100"),
    Part(name="torchtitan, H100", ids="tt-", device="H100", note=_TITAN),
    Part(name="torchtitan, H200", ids="tt-", device="H200", note=_TITAN),
    Part(name="SimuMax, B200", ids="simumax-"),
    Part(name="all on A100, ops from 100 µs on", regime="fitted", note=_CUT),
    Part(name="all on other devices, ops from 100 µs on", regime="elsewhere", note=_CUT),
    Part(name="all with shorter ops", regime="small", note=_CUT),
)


def predict_steps(rows: Sequence[Mapping[str, str]]) -> Predictions:
    """Seconds of the step of every row, shape (rows,), with the shipped model.

    Raises MeasurementError if a row does not say enough; `step_table.read_steps` tells which ones do.
    """
    check_steps(rows)
    cases, left_out = read_steps(rows)
    if left_out:
        count = sum(len(reason.lines) for reason in left_out)
        raise MeasurementError(
            f"{count} of {len(rows)} rows cannot be predicted: {'; '.join(list_reasons(left_out))}. Complete them or "
            "leave them out."
        )
    return predict_cases(cases, load_step_model())


def score_steps() -> tuple[Score, ...]:
    """Every part of the public steps, ours and the baselines on the same rows; the fitted rows by models left out."""
    model = load_step_model()
    rows = [*load_steps(), *load_steps(single_node=True)]
    fitted = read_steps([row for row in rows if is_fitted(row)])[0]
    scored = [row for row in rows if not is_fitted(row) and row.get("iter_time_s")]
    seen = np.array([int(row, 16) for row in model.fitted_rows], np.uint64)
    refuse_seen(DATASET, seen, np.array([row_hash(row) for row in scored], np.uint64))
    cases = read_steps(scored)[0]
    left_out_s = predict_left_out(fitted, fitted, model)
    predicted = predict_cases(cases, model, Residuals(fitted, left_out_s, cases, model))
    constant_s = _flops_seconds(cases) / _fit_constant(fitted)
    simulated = {row["id"]: seconds for row in scored if (seconds := _own_prediction(row)) is not None}
    scores: list[Score] = []
    for part in PARTS:
        held = np.array([part.holds(case, regime_of(case, model)) for case in cases])
        mine = [case for case, kept in zip(cases, held, strict=True) if kept]
        measured, ours = _measured(mine), predicted.select(held)
        if part.targets:
            without = _move(ours, predict_left_out(mine, fitted, model))
            for judged, target in part.targets:
                scores.append(
                    score_rows(DATASET, part.name, WITHOUT_SIZE, measured, without, judged=judged, target=target)
                )
        scores.append(score_rows(DATASET, part.name, OURS, measured, ours, note=part.note))
        scores.append(score_rows(DATASET, part.name, CONSTANT, measured, constant_s[held]))
        names = [case.row_id for case in mine]
        if all(name in simulated for name in names):
            own = np.array([simulated[name] for name in names])
            scores.append(score_rows(DATASET, part.name, "SimuMax", measured, own))
    scores.append(score_rows(DATASET, "SC'21, each model left out", OURS, _measured(fitted), left_out_s))
    return (*scores, *_score_layers(model))


def _move(predicted: Predictions, seconds: Floats) -> Predictions:
    """Other seconds with intervals of the same shares."""
    ratio = seconds / predicted.seconds
    return replace(predicted, seconds=seconds, low_s=predicted.low_s * ratio, high_s=predicted.high_s * ratio)


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
        prices = StepPrices(kind=case.kind, node=case.node, setup=setup, efficiencies=model.efficiencies)
        layer = predict_layer(case.shape, prices, case.software)
        measured += [float(row["forward_ms"]) / 1e3, float(row["backward_ms"]) / 1e3]
        predicted += [layer.forward_s, layer.input_gradient_s + layer.weight_gradient_s]
    return (score_rows(DATASET, "Korthikanti, Table 4, layers", OURS, np.array(measured), np.array(predicted)),)


def _fit_constant(cases: Sequence[StepCase]) -> float:
    return float(np.exp(np.mean(np.log(_flops_seconds(cases) / _measured(cases)))))


def _flops_seconds(cases: Sequence[StepCase]) -> Floats:
    """Seconds of the model's FLOPs, a recomputed forward included, at the peak of all devices."""
    return np.array([_flops(case) / peak_flops(case.kind, "bfloat16") for case in cases])


def _flops(case: StepCase) -> float:
    ops = (*layer_ops(case.shape, case.setup, case.shape.layers - 1),)
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
