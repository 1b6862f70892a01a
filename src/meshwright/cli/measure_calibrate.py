"""``meshwright measure --calibrate``: a table corrected by real steps, and the error before and after."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshwright.cli.json_output import print_json
from meshwright.cli.output import print_tables, terminal_sink
from meshwright.spec.errors import MeasurementError
from meshwright.spec.units import format_seconds

if TYPE_CHECKING:
    from meshwright.training import Calibration


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
    """Correct the table at ``out`` by real steps of the model, unless other steps show no improvement.

    Raises MeasurementError if there is no table.
    """
    from meshwright.records import load_measurements, save_measurements
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
        print_json("calibration", {**found.row(), "file": str(out)})
        return
    print_tables(*calibration_tables(found, model, out))


def calibration_tables(found: Calibration, model: str, out: Path) -> list[Any]:
    """The corrections, their effect on the predicted step, and where the table is."""
    from meshwright.report import make_table

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
    return [
        f"{'corrections' if found.why_kept else 'corrected'} by {found.num_fitted} steps of {model}:",
        make_table(parts),
        make_table(steps),
        found.why_kept or f"measurements written to {out}",
    ]
