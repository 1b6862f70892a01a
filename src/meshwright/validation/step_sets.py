"""Score the predictions of `plan` for published training steps (`score_steps`); `step_plans` turns rows into plans.

Baselines on the same rows are two constant shares of the peak FLOP rate. One is fitted on our calibration rows, the
other on the scored rows of large models from all origins except that of the predicted row; our predictor never sees
those. If a source prints the prediction of its own simulator, that is a baseline, too. The order of runs within a job
is scored (`scores`), and the rows that are refused for memory are listed (`judge_memory`).

Only `calibration_rows` may be fitted. One number of our predictor is: how slowly Megatron-LM's host issues kernels
(``cost/software.toml``).
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from meshwright.cost.memory import MemoryLimit
from meshwright.spec import MeasurementError, MeshwrightError
from meshwright.templates.shapes import TransformerError
from meshwright.validation.datasets import StepRow, load_all_steps
from meshwright.validation.scores import Score, Split, draw_split, read_folds, score_rows
from meshwright.validation.step_cells import CellError
from meshwright.validation.step_plans import Found, StepPrediction, evaluate_steps, predictions_of
from meshwright.validation.step_rows import StepCase, read_step
from meshwright.validation.step_table import LeftOut, check_steps, list_reasons, read_steps

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from meshwright.cost.costs import Floats, Predictions


SEED, NUM_FOLDS = 20261122, 10
# Kinds of devices with rows on one node that may be fitted.
KINDS = ("A100", "H100", "V100")
CALIBRATION_FOLD = NUM_FOLDS - 1
_GROUP = ("family", "layers", "hidden", "heads", "seq", "n_devices", "tp", "pp", "dp", "cp", "mbs")


def single_node_rows(rows: Sequence[StepRow]) -> dict[str, list[StepRow]]:
    """Return, by kind of device, the timed rows on one node, in their order; only kinds that may be fitted."""
    found: dict[str, list[StepRow]] = defaultdict(list)
    for row in rows:
        kind = re.match(r"\w+", row["device"])
        if kind and kind[0] in KINDS and row["iter_time_s"] and _on_one_node(row):
            found[kind[0]].append(row)
    return found


# A tenth of each kind of device's rows on one node may be fitted, drawn once. The files ``splits/steps_KIND.json``
# divide the single-node rows of a kind of device into ten folds, grouped by configuration: rows of one model, sequence,
# layout and microbatch are on one side, whatever their batch, schedule, precision and recompute. The rows of the last
# fold, group by group in sorted order as long as they are a tenth of the kind's rows or fewer, are for calibration; all
# other rows, and all rows of more than one node, are for scoring only. SimuMax's rows (B200) are in no fold: nothing is
# fitted on that kind. The files were drawn with `SEED` and committed before the first fit on their rows.
def calibration_rows(rows: Sequence[StepRow]) -> list[StepRow]:
    """Return the published rows that may be fitted, about a tenth of each kind of device's rows on one node.

    Raises DocumentError if ``rows`` are not those for which the folds were drawn.
    """
    fitted: list[StepRow] = []
    for kind, mine in sorted(single_node_rows(rows).items()):
        folds = read_folds(f"steps_{kind}", [group_key(row) for row in mine])
        groups: dict[str, list[StepRow]] = defaultdict(list)
        for row, fold in zip(mine, folds, strict=True):
            if fold == CALIBRATION_FOLD:
                groups[group_key(row)].append(row)
        taken: list[StepRow] = []
        for _, group in sorted(groups.items()):
            if (len(taken) + len(group)) * NUM_FOLDS > len(mine):
                break
            taken += group
        fitted += taken
    return fitted


def scored_rows(rows: Sequence[StepRow]) -> list[StepRow]:
    """Return the published rows that are timed and not among `calibration_rows`. Raises as `calibration_rows`.

    ``splits/steps_scored.txt`` lists the ids of those rows that are complete enough to be predicted.
    """
    fitted = {row["id"] for row in calibration_rows(rows)}
    return [row for row in rows if row["id"] not in fitted and row["iter_time_s"]]


def draw_step_splits(rows: Sequence[StepRow]) -> dict[str, Split]:
    """Return the splits of the rows by kind of device, drawn as the committed files were."""
    return {
        kind: draw_split(f"steps_{kind}", [group_key(row) for row in mine], num_folds=NUM_FOLDS, seed=SEED)
        for kind, mine in sorted(single_node_rows(rows).items())
    }


def group_key(row: StepRow) -> str:
    """Return a row's key for the split: rows with equal keys are in the same fold."""
    # A run of Alpa whose mesh is not stated is identified by its method.
    apart = "" if row["tp"] else row["zero_or_sharding"]
    return "|".join([*(row[name] for name in _GROUP), apart])


def run_of(row: StepRow) -> tuple[str, ...]:
    """Return what identifies a run: model, parallelism, batch, and seconds to four digits; not its id and notes."""
    try:
        seconds = f"{float(row.get('iter_time_s', '')):.4g}"
    except ValueError:
        seconds = ""
    return (
        *(row.get(name, "").strip() for name in ("layers", "hidden", "n_devices", "tp", "pp", "dp", "gbs_seq")),
        seconds,
    )


def _on_one_node(row: StepRow) -> bool:
    # Alpa's end-to-end rows are scored only.
    return int(row["n_devices"]) <= int(row["devices_per_node"] or 8) and not row["id"].startswith("alpa-e2e")


_GIB = 2**30
_OUT_OF_MEMORY = "out of memory"
_MAX_NAMED = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryVerdicts:
    """Ids of rows, by whether their plan is refused for memory.

    ``refused`` and ``missed``: runs that ran out of memory and are refused, or not. ``wrongly_refused``: timed runs
    that are refused. ``num_timed``: the number of timed runs.
    """

    refused: tuple[str, ...]
    missed: tuple[str, ...]
    wrongly_refused: tuple[str, ...]
    num_timed: int

    def __str__(self) -> str:
        failed = len(self.refused) + len(self.missed)
        said = (
            f"{len(self.refused)} of {failed} runs that ran out of memory are refused, and "
            f"{len(self.wrongly_refused)} of {self.num_timed} that were timed"
        )
        named = [*self.wrongly_refused[:_MAX_NAMED], *(["..."] if len(self.wrongly_refused) > _MAX_NAMED else [])]
        return said + (f" ({', '.join(named)})" if named else "")


# A prediction is correct for refused runs that ran out of memory, wrong for refused runs that were timed. A row is
# refused if the bytes that `planner.evaluate_plan` predicts to be reserved on its fullest device exceed what plans may
# reserve (`cost.memory.MemoryLimit`) of the memory that its device states. Software may take less than all of the
# memory. Rows that no plan expresses (`step_plans`) are not judged.
def judge_memory(rows: Sequence[StepRow], known: Mapping[str, Found] | None = None) -> MemoryVerdicts:
    """Return which rows are refused for memory, among all rows that a plan can express.

    A run ran out of memory if its ``status`` contains "out of memory". ``known``: results of `evaluate_steps` for some
    of the rows, by row id.
    """
    known = known or {}
    judged: list[tuple[bool, StepRow, StepCase]] = []
    for row in rows:
        failed = _OUT_OF_MEMORY in row.get("status", "")
        if not (failed or row.get("iter_time_s")):
            continue
        try:
            judged.append((failed, row, read_step({**row, "iter_time_s": "", "status": ""})))
        except (CellError, TransformerError):
            continue
    others = [case for _, _, case in judged if case.row_id not in known]
    predicted = {**known, **dict(zip([case.row_id for case in others], evaluate_steps(others), strict=True))}
    found: dict[tuple[bool, bool], list[str]] = {
        (failed, over): [] for failed in (True, False) for over in (True, False)
    }
    for failed, row, case in judged:
        item = predicted[case.row_id]
        if isinstance(item, StepPrediction):
            found[failed, item.reserved_bytes > usable_bytes(row, case)].append(case.row_id)
    return MemoryVerdicts(
        refused=tuple(found[True, True]),
        missed=tuple(found[True, False]),
        wrongly_refused=tuple(found[False, True]),
        num_timed=len(found[False, True]) + len(found[False, False]),
    )


def usable_bytes(row: StepRow, case: StepCase) -> int:
    """Return the bytes that may be reserved on a row's device.

    The device's memory is that in its name ("-80GB"), otherwise that of the kind of device.
    """
    stated = re.search(r"-([0-9]+)GB", row["device"])
    memory_bytes = case.software.memory_share * (int(stated[1]) * _GIB if stated else case.kind.memory_bytes)
    return MemoryLimit().usable_bytes(replace(case.kind, memory_bytes=round(memory_bytes)))


DATASET = "steps"
OURS, CONSTANT = "plan", "constant share of the peak"
CONSTANT_OF_OTHERS, SIMUMAX = "constant share of others' large models", "SimuMax"
# Parameters from which on a model is large.
_LARGE = 1e9
# Rows whose source leaves out what decides their time are reported apart, too, and no baseline is fitted on them:
# ZeRO-3 of 2021, whose source does not say which gathers overlapped with what; plans that Alpa's search made of models
# other than GPT.
UNDERSPECIFIED_ZERO = ("sc21-t2-ZeRO",)
UNDERSPECIFIED_PLANS = tuple(
    f"alpa-node-{model}-{count}-auto_sharding" for model in ("wresnet", "moe") for count in (2, 4, 8)
)
UNDERSPECIFIED = UNDERSPECIFIED_ZERO + UNDERSPECIFIED_PLANS


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSet:
    """Rows that are scored together.

    ``ids``: beginnings of the rows' ids; ``without``: beginnings of ids that are left out. ``device``: beginning of the
    kind of device; ``bandwidth_bytes_per_s``: its memory bandwidth, None for any. ``target``: the mean error to reach,
    in per cent. ``note``: what a reader of the figure has to know.
    """

    name: str
    ids: tuple[str, ...] = ("",)
    without: tuple[str, ...] = ()
    device: str = ""
    bandwidth_bytes_per_s: float | None = None
    target: float | None = None
    note: str = ""

    def holds(self, case: StepCase) -> bool:
        """Return whether a case belongs to this set."""
        return (
            case.row_id.startswith(self.ids)
            and not case.row_id.startswith(self.without)
            and case.kind.name.startswith(self.device)
            and self.bandwidth_bytes_per_s in (None, case.kind.memory_bandwidth_bytes_per_s)
        )


_HOST = "how slowly the host issues is fitted on other rows of the same runs (calibration)"
_TITAN = "these runs are compiled and the predictions are not; rows without microbatches get one per stage"
_SIMUMAX = "the rows leave schedule and recompute empty"
_PLANS = "under-specified: how Alpa's search split convolutions over its devices; assumed: all of them split the batch"
_ZERO = "under-specified: the source does not say which DeepSpeed version ran, and which gathers overlapped with what"
PARTS = (
    RunSet(name="vTrain, one node", ids=("vtrain-single",), target=10.0, note=_HOST),
    RunSet(name="vTrain, many nodes", ids=("vtrain-multi",), target=10.0),
    RunSet(name="SC'21", ids=("sc21-t1", "sc21-t2-PTD"), target=10.0),
    RunSet(name="SC'21, ZeRO-3", ids=UNDERSPECIFIED_ZERO, note=_ZERO),
    RunSet(name="Korthikanti, Table 5", ids=("korth-t5",), target=10.0),
    RunSet(name="Korthikanti, section 6.3", ids=("korth-s63",)),
    RunSet(name="Zero Bubble, Table 4", ids=("zb-",), target=10.0),
    RunSet(name="FSDP: llm-foundry and torchtitan", ids=("mpt-", "tt-"), target=10.0),
    RunSet(name="llm-foundry, A100 80 GB", ids=("mpt-",), device="A100", bandwidth_bytes_per_s=2039e9),
    RunSet(name="llm-foundry, A100 40 GB", ids=("mpt-",), device="A100", bandwidth_bytes_per_s=1555e9),
    RunSet(name="llm-foundry, H100", ids=("mpt-",), device="H100"),
    RunSet(name="torchtitan, H100", ids=("tt-",), device="H100", note=_TITAN),
    RunSet(name="torchtitan, H200", ids=("tt-",), device="H200", note=_TITAN),
    RunSet(name="SimuMax, B200", ids=("simumax-",), target=10.0, note=_SIMUMAX),
    RunSet(name="Alpa, one node", ids=("alpa-node",), without=UNDERSPECIFIED_PLANS, target=10.0),
    RunSet(name="Alpa, GPT on one node", ids=("alpa-node-gpt",), target=10.0),
    RunSet(name="Alpa, Wide-ResNet on one node", ids=("alpa-node-wresnet",), without=UNDERSPECIFIED_PLANS),
    RunSet(name="Alpa, plans not stated", ids=UNDERSPECIFIED_PLANS, note=_PLANS),
    RunSet(name="Alpa, GPT end to end", ids=("alpa-e2e",), target=10.0),
    RunSet(name="all on A100", device="A100"),
    RunSet(name="all on H100 and H200", device="H"),
    RunSet(name="all", note="{memory}"),
)


def predict_steps(rows: Sequence[Mapping[str, str]]) -> Predictions:
    """Return the step time of every row in seconds, shape (rows,), with intervals, as `plan` predicts it.

    Raises MeasurementError if some row cannot be predicted; `step_table.read_steps` separates such rows.
    """
    check_steps(rows)
    cases, left_out = read_steps(rows)
    found = evaluate_steps(cases)
    reasons = [*list_reasons(left_out), *(str(item) for item in found if isinstance(item, MeshwrightError))]
    if reasons:
        count = len(rows) - len(cases) + sum(isinstance(item, MeshwrightError) for item in found)
        raise MeasurementError(
            f"{count} of {len(rows)} rows cannot be predicted: {'; '.join(dict.fromkeys(reasons))}. Complete them or "
            "leave them out."
        )
    return predictions_of(found)


def score_steps(*, quick: bool = False) -> tuple[Score, ...]:
    """Score our predictions and the baselines on every part of the public steps, without calibration rows.

    With ``quick``, only every 20th row is scored.
    """
    rows = load_all_steps()
    scored = scored_rows(rows)[:: 20 if quick else 1]
    (read, left_out), calibration = read_steps(scored), read_steps(calibration_rows(rows))[0]
    evaluated = evaluate_steps([*read, *calibration])
    known = {case.row_id: item for case, item in zip([*read, *calibration], evaluated, strict=True)}
    cases, ours, missing = _split(read, known)
    fitted, ours_fitted, _ = _split(calibration, known)
    predicted = predictions_of(ours)
    constant_s = _peak_seconds(ours) / _fit_share(fitted, ours_fitted)
    of_others_s = predict_by_others(cases, ours)
    simulated = {row["id"]: seconds for row in scored if (seconds := _own_prediction(row)) is not None}
    memory = f"not predicted: {_name_left_out(left_out)}"
    if not quick:
        memory = f"{judge_memory(rows, known)}; {memory}"
    scores: list[Score] = []
    for part in PARTS:
        held = np.array([part.holds(case) for case in cases])
        mine = [case for case, kept in zip(cases, held, strict=True) if kept]
        reasons = Counter(str(known[case.row_id]) for case in missing if part.holds(case))
        cannot = [f"{count} rows cannot be planned: {reason}" for reason, count in reasons.items()]
        note = "; ".join(filter(None, [part.note.format(memory=memory), *cannot]))
        if not mine:
            continue
        measured, jobs = _measured(mine), [case.job for case in mine]
        arms = {CONSTANT: constant_s[held], CONSTANT_OF_OTHERS: of_others_s[held]}
        if all(case.row_id in simulated for case in mine):
            arms[SIMUMAX] = np.array([simulated[case.row_id] for case in mine])
        scores.append(
            score_rows(
                DATASET, part.name, OURS, measured, predicted.select(held), target=part.target, note=note, jobs=jobs
            )
        )
        scores += [score_rows(DATASET, part.name, arm, measured, other, jobs=jobs) for arm, other in arms.items()]
    return tuple(scores)


def _split(
    cases: Sequence[StepCase], known: Mapping[str, Found]
) -> tuple[list[StepCase], list[StepPrediction], list[StepCase]]:
    """The cases with a prediction, their predictions, and the other cases."""
    found: list[StepCase] = []
    predicted: list[StepPrediction] = []
    missing: list[StepCase] = []
    for case in cases:
        item = known[case.row_id]
        if isinstance(item, MeshwrightError):
            missing.append(case)
        else:
            found.append(case)
            predicted.append(item)
    return found, predicted, missing


def _name_left_out(left_out: Sequence[LeftOut]) -> str:
    """How many rows are not predicted, by what they lack."""
    return ", ".join(f"{len(reason.lines)} rows for {reason.reason.partition(':')[0]}" for reason in left_out) or "none"


def predict_by_others(cases: Sequence[StepCase], ours: Sequence[StepPrediction]) -> Floats:
    """Return the seconds that a constant share of the peak FLOP rate predicts, shape (cases,): a baseline.

    The share of each origin is fitted on the large models of other origins.
    """
    shares = {}
    for origin in {case.origin for case in cases}:
        others = [
            place
            for place, (case, item) in enumerate(zip(cases, ours, strict=True))
            if case.origin != origin and item.num_parameters >= _LARGE and not case.row_id.startswith(UNDERSPECIFIED)
        ]
        shares[origin] = _fit_share([cases[i] for i in others], [ours[i] for i in others])
    return _peak_seconds(ours) / [shares[case.origin] for case in cases]


def _fit_share(cases: Sequence[StepCase], ours: Sequence[StepPrediction]) -> float:
    """The share of the peak that explains the measured steps best, papers and repositories counting alike."""
    counts = Counter(case.origin for case in cases)
    shares = np.log(_peak_seconds(ours) / _measured(cases))
    return float(np.exp(np.average(shares, weights=[1 / counts[case.origin] for case in cases])))


def _peak_seconds(ours: Sequence[StepPrediction]) -> Floats:
    """Seconds of the models' FLOPs, a recomputed forward included, at the peak of all devices."""
    return np.array([item.peak_flops_s for item in ours], np.float64)


def _own_prediction(row: Mapping[str, str]) -> float | None:
    """What the source's own simulator predicted, s, where its notes say so."""
    found = re.match(r"SimuMax prediction ([\d.]+) ms", row.get("notes", ""))
    return float(found[1]) / 1e3 if found else None


def _measured(cases: Sequence[StepCase]) -> Floats:
    return np.array([case.measured_s for case in cases], np.float64)
