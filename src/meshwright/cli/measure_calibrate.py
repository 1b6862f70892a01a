"""``meshwright measure --calibrate``: a table corrected by real steps, and the error before and after."""

from __future__ import annotations

from pathlib import Path

from meshwright.cli.output import print_json, print_tables, terminal_sink
from meshwright.spec.errors import MeasurementError
from meshwright.spec.units import format_seconds


def calibrate_table(
    model: str,
    out: Path,
    microbatch_size: int,
    *,
    sizes: tuple[tuple[str, int], ...],
    num_ranks: int,
    num_steps: int,
    as_json: bool,
) -> None:
    """Correct the table at ``out`` by real steps of the model, unless other steps do not show it to be better.

    Raises MeasurementError if there is no table.
    """
    from meshwright.records import load_measurements, save_measurements
    from meshwright.report import make_table
    from meshwright.spec import load_cluster
    from meshwright.training import calibrate_here

    if not out.exists():
        raise MeasurementError(
            f"{out}: there is no table to correct. Measure first (`meshwright measure {model} --out {out}`), then "
            "calibrate."
        )
    known = load_measurements(out, load_cluster("cpu"))
    with terminal_sink(as_json) as events:
        found = calibrate_here(
            model, known, microbatch_size, sizes=sizes, num_ranks=num_ranks, num_steps=num_steps, events=events
        )
    if not found.why_kept:
        save_measurements(found.table, out)
    if as_json:
        print_json(
            {
                "corrections": [
                    {
                        "part": item.part,
                        "predicted_s": item.predicted_s,
                        "measured_s": item.measured_s,
                        "factor": item.factor,
                    }
                    for item in found.corrections
                ],
                "steps_fitted": found.num_fitted,
                "steps_judged": found.num_judged,
                "step_measured_s": found.measured_s,
                "step_before_s": found.before_s,
                "step_after_s": found.after_s,
                "error_before": found.error_before,
                "error_after": found.error_after,
                "scatter": found.scatter,
                "why_kept": found.why_kept or None,
                "file": str(out),
            }
        )
        return
    parts = [
        {
            "part": item.part,
            "predicted": format_seconds(item.predicted_s),
            "measured": format_seconds(item.measured_s),
            "factor": f"{item.factor:.3f}",
        }
        for item in found.corrections
    ]
    steps = [
        {"step time": name, "seconds": format_seconds(seconds), "error": error}
        for name, seconds, error in (
            (f"measured ({found.num_judged} other steps)", found.measured_s, ""),
            ("predicted before", found.before_s, f"{found.error_before:+.1%}"),
            ("predicted after", found.after_s, f"{found.error_after:+.1%}"),
        )
    ]
    print_tables(
        f"{'corrections' if found.why_kept else 'corrected'} by {found.num_fitted} steps of {model}:",
        make_table(parts),
        make_table(steps),
        found.why_kept or f"measurements written to {out}",
    )
