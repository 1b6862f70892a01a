"""The report of the GPU check, from its rows alone: a table per question, and what is left."""

from __future__ import annotations

import csv
import io
from dataclasses import dataclass
from typing import Any

import numpy as np
from gpu.rows import PAIRS, REPEATS, RowFile
from harness import MET, Row, format_table, make_row, ratio_row

EAGER_TARGET, COMPILED_TARGET, ISSUE_TARGET, PREDICTION_TARGET = 1.03, 1.05, 1.15, 0.05
# A step whose issuing takes this share of it, or more, is bound by the host.
BOUND_BY_HOST = 0.9
# Of steps_cuda.csv (meshwright.validation); what it has beside these a row of ours has, too.
FACTS = ("seconds_in_a_row", "seconds_waited", "forward_s", "backward_s", "optimizer_s", "device_s", "issue_s")
BYTES = ("peak_bytes", "reserved_bytes")

ARMS = """\
Each case is one process in which our session and plain PyTorch train the same model on the same microbatch, which is on
the device, with the same AdamW (fused on GPUs). Pairs of steps are alternated ABBA, {pairs} in each of {repeats}
repeats; a step is waited for. Ratios are medians of pairs, spreads half the width of their middle 80 % over the median;
"repeats" are the lowest and the highest median of a repeat. A/A is plain PyTorch against itself: the second of two
steps in a row over the first; no ratio says more than that. Issuing a step ends when the call returns. A step is bound
by the host if issuing takes {share:.0%} of it or more in plain PyTorch; then the time of issuing has a target, else the
step.

What plain PyTorch runs: amp: float32 weights, forward and loss under autocast to bfloat16. bfloat16:
`model.bfloat16()`. mixed: `model.bfloat16()`, and the optimizer updates float32 copies of the weights. compiled:
`torch.compile(model)`, the whole model, where ours compiles layer by layer."""

PREDICTIONS = """\
Predicted is the step of `meshwright simulate`: before from the tables that ship, after from what `meshwright measure`
timed on this device (`measurements.json`). Measured: our steps in a row, without waiting between them."""


@dataclass(frozen=True, kw_only=True)
class Found:
    """What the rows of a case say."""

    name: str
    done: dict[str, Any]
    step: Row
    issue: Row
    step_again: Row
    issue_again: Row
    step_repeats: tuple[float, float]
    issue_repeats: tuple[float, float]
    by_host: bool
    in_a_row_s: float
    after_s: float | None


def is_judged(rows: RowFile) -> bool:
    """Whether rows are enough for a figure; quick ones, as all on a processor, are not."""
    return rows.here["pairs"] >= PAIRS


def read_cases(rows: RowFile) -> list[Found]:
    """The cases that are done, in the order in which they were."""
    after = {row["job"]: row["predicted_s"] for row in rows.read("predicted")}
    done = {row["job"]: row for row in rows.read("done") if "model" in row}
    return [read_case(rows, row, after.get(name)) for name, row in done.items()]


def read_case(rows: RowFile, done: dict[str, Any], after_s: float | None) -> Found:
    repeats = list({row["repeat"]: row for row in rows.of_job("repeat", done["job"])}.values())
    columns = {
        name: np.array([row[name] for row in repeats]) for name in ("own_s", "plain_s", "own_issue_s", "plain_issue_s")
    }
    plain, issued = columns["plain_s"], columns["plain_issue_s"]
    # On a processor issuing is computing.
    is_beside = rows.here["device"] != "cpu"
    by_host = is_beside and float(np.median(issued)) >= BOUND_BY_HOST * float(np.median(plain))
    judged = is_judged(rows)
    step_target = COMPILED_TARGET if done["compiled"] else EAGER_TARGET
    return Found(
        name=done["job"],
        done=done,
        step=ratio_row(
            "step", columns["own_s"].ravel(), plain.ravel(), step_target if judged and not by_host else None
        ),
        issue=ratio_row(
            "issue", columns["own_issue_s"].ravel(), issued.ravel(), ISSUE_TARGET if judged and by_host else None
        ),
        # Round 0 ends and round 1 begins with a step of plain PyTorch, and so on.
        step_again=ratio_row("A/A", plain[:, 1::2].ravel(), plain[:, 0::2].ravel()),
        issue_again=ratio_row("A/A", issued[:, 1::2].ravel(), issued[:, 0::2].ravel()),
        step_repeats=ends(columns["own_s"] / plain),
        issue_repeats=ends(columns["own_issue_s"] / issued),
        by_host=by_host,
        in_a_row_s=float(np.median([row["in_a_row_s"] for row in repeats])),
        after_s=after_s,
    )


def ends(ratios: np.ndarray) -> tuple[float, float]:
    """The lowest and the highest median of a repeat."""
    medians = np.median(ratios, axis=1)
    return float(medians.min()), float(medians.max())


def ratio_lines(found: list[Found], kind: str) -> list[list[str]]:
    lines = []
    for case in found:
        row, again = getattr(case, kind), getattr(case, f"{kind}_again")
        low, high = getattr(case, f"{kind}_repeats")
        lines.append(
            [
                case.name,
                "host" if case.by_host else "device",
                f"{row.value * 1e3:.2f}",
                f"{row.baseline * 1e3:.2f}",
                f"{row.ratio:.3f}",
                f"{row.spread:.3f}",
                f"{low:.3f} to {high:.3f}",
                f"{again.ratio:.3f} ± {again.spread:.3f}",
                "" if row.target is None else f"{row.target:g}",
                MET[row.met],
            ]
        )
    return lines


def score_predictions(found: list[Found], judged: bool) -> list[Row]:
    """The median error over cases bound by the device, before and after measuring."""
    scores = []
    for name, target, predicted in (
        ("before", None, {case.name: case.done["predicted_s"] for case in found}),
        ("after", PREDICTION_TARGET if judged else None, {case.name: case.after_s for case in found}),
    ):
        errors = [
            abs(predicted[case.name] / case.in_a_row_s - 1)
            for case in found
            if not case.by_host and predicted[case.name] is not None
        ]
        if errors:
            low, high = np.quantile(errors, [0.1, 0.9])
            scores.append(make_row(name, float(np.median(errors)), "", spread=float(high - low) / 2, target=target))
    return scores


def prediction_lines(found: list[Found]) -> list[list[str]]:
    def cells(predicted_s: float | None, measured_s: float) -> list[str]:
        if predicted_s is None:
            return ["", ""]
        return [f"{predicted_s * 1e3:.2f}", f"{predicted_s / measured_s - 1:+.1%}"]

    return [
        [
            case.name,
            "host" if case.by_host else "device",
            f"{case.in_a_row_s * 1e3:.2f}",
            *cells(case.done["predicted_s"], case.in_a_row_s),
            *cells(case.after_s, case.in_a_row_s),
        ]
        for case in found
    ]


@dataclass(frozen=True, kw_only=True)
class Report:
    """The text, and the targets that were missed."""

    text: str
    missed: tuple[str, ...]


def write_report(rows: RowFile, head: str, left: list[str], failed: dict[str, str]) -> Report:
    """``left``: jobs that were not begun or not ended; ``failed``: jobs that failed, and why."""
    found = read_cases(rows)
    judged = is_judged(rows)
    scores = score_predictions(found, judged)
    parts = [head]
    if not judged:
        parts.append("Few pairs of tiny models, which show that the check runs. **Nothing is judged.**")
    if failed:
        parts.append("Failed:\n\n" + "\n".join(f"- {name}: {reason}" for name, reason in failed.items()))
    if left:
        parts.append(f"Not run, or not to the end, before the time was over: {', '.join(left)}. Call it again.")
    parts += [f"## Tests marked `gpu`\n\n{describe_tests(rows)}"]
    measured = ("case", "bound by", "ours, ms", "plain, ms", "ratio", "spread", "repeats", "A/A", "target", "met")
    parts += [
        "## Step against plain PyTorch",
        ARMS.format(pairs=rows.here["pairs"], repeats=REPEATS, share=BOUND_BY_HOST),
        format_table(measured, ratio_lines(found, "step")),
        "## Time of issuing a step",
        format_table(measured, ratio_lines(found, "issue")),
        "## Predicted step",
        PREDICTIONS,
        format_table(
            ("case", "bound by", "measured, ms", "before, ms", "error", "after, ms", "error"), prediction_lines(found)
        ),
    ]
    if scores:
        lines = [
            [
                row.name,
                f"{row.value:.1%}",
                f"{row.spread:.1%}",
                "" if row.target is None else f"{row.target:.0%}",
                MET[row.met],
            ]
            for row in scores
        ]
        parts.append("Over the cases that are bound by the device:")
        parts.append(format_table(("measuring", "median error", "spread", "target", "met"), lines))
    if remarks := describe_compiled(found):
        parts += ["## Compiled layers", "\n".join(remarks)]
    parts += ["## The device", describe_device(rows)]
    missed = [
        f"{kind} of {case.name}" for case in found for kind in ("step", "issue") if getattr(case, kind).met is False
    ]
    missed += [f"predicted step {row.name} measuring" for row in scores if row.met is False]
    return Report(text="\n\n".join(parts) + "\n", missed=tuple(missed))


def describe_tests(rows: RowFile) -> str:
    done = rows.of_job("done", "tests")
    if not done:
        return "**Not run** to the end."
    return f"{done[-1]['summary']}" + ("" if done[-1]["ran"] else ": **not run**, there is no GPU.")


def describe_compiled(found: list[Found]) -> list[str]:
    remarks = []
    for case in found:
        if case.done["compiled"]:
            left_out = "; ".join(f"{count} ran eagerly: {reason}" for reason, count in case.done["left_out"].items())
            remarks.append(f"- {case.name}: {case.done['compiled_units']} parts{f'; {left_out}' if left_out else ''}")
        if (word := case.done["plan_precision"]) != case.done["precision"]:
            remarks.append(f"- {case.name}: planned in {word}, which this torch can run")
    return remarks


def describe_device(rows: RowFile) -> str:
    states = [f"- {row['when']}: {row['state']}" for row in rows.read("state")]
    return "\n".join(states) or "The driver was not asked."


def steps_table(rows: RowFile) -> str:
    """Plain PyTorch's eager cases in the columns of ``steps_cuda.csv``, which `meshwright validate gpu_steps` reads.

    Empty where no case has them: on a processor.
    """
    known = [case for case in read_cases(rows) if case.done["plain"]]
    if not known:
        return ""
    text = io.StringIO()
    names = ("model", "batch_size", "precision", "optimizer", *FACTS, *BYTES, "device", "torch", "date")
    writer = csv.DictWriter(text, names, lineterminator="\n")
    writer.writeheader()
    for case in known:
        done = case.done
        writer.writerow(
            {
                "model": done["model"],
                "batch_size": done["batch"],
                "precision": done["precision"],
                "optimizer": "adamw",
                **{name: f"{done['plain'][name]:.6g}" for name in FACTS},
                **{name: done["plain"][name] for name in BYTES},
                **{name: done[name] for name in ("device", "torch", "date")},
            }
        )
    return text.getvalue()
