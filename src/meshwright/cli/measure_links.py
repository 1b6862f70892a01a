"""``meshwright measure --links``: time every collective between the available ranks, and fit the model of links."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from rich.text import Text

from meshwright.cli.json_output import print_json
from meshwright.cli.output import print_tables, terminal_sink
from meshwright.spec.errors import MeasurementError

if TYPE_CHECKING:
    from meshwright.cost.prediction import Interval
    from meshwright.records import Records
    from meshwright.spec.measurements import TransferKind


def measure_links_table(out: Path, *, num_ranks: int, as_json: bool) -> None:
    """Time the links of this machine (under torchrun: of all its machines), write the rows, and show a summary.

    Raises MeasurementError for fewer than two ranks, and what `check_table_place` raises.
    """
    from meshwright.cost.collectives import fit_collectives
    from meshwright.measurement import measure_links, measure_links_here
    from meshwright.records import add_records, check_table_place
    from meshwright.report import make_table
    from meshwright.training import started_by_torchrun

    by_torchrun = started_by_torchrun()
    ranks = int(os.environ["WORLD_SIZE"]) if by_torchrun else num_ranks
    if ranks < 2:
        raise MeasurementError(
            f"Timing links needs at least two ranks, got {ranks}; expected at least 2. Give --ranks 2 or more, or "
            f"start as "
            "many by torchrun."
        )
    check_table_place(out, of_many=True)
    with terminal_sink(as_json) as events:
        found = measure_links_here(events=events) if by_torchrun else measure_links(num_ranks=num_ranks, events=events)
    if found is None:
        return
    walls = found.where(phase="")
    scale = fit_collectives(walls).interpolated
    rows = place_rows(walls)
    add_records(found, out)
    if as_json:
        errors = {"small": _range(scale.latency), "large": _range(scale.bandwidth)}
        print_json("measured-links", {"places": rows, "interpolated": errors, "file": str(out)})
        return
    print_tables(
        make_table(rows, title="t = latency + bytes / bandwidth, bytes of the full tensor"),
        "Sizes between those measured: 80 % of those left out took "
        f"{_share(scale.latency)} of the prediction where latency counts, {_share(scale.bandwidth)} where bytes do.",
        Text(f"{len(found)} rows written to {out}"),
    )


def place_rows(walls: Records) -> list[dict[str, Any]]:
    """One row per op and place: ranks of a group, concurrent groups, stride, and the line fitted over the sizes."""
    from meshwright.report import fit_transfers
    from meshwright.spec import TransferMeasurement

    sizes = [walls.size(name).tolist() for name in ("ranks", "groups", "stride", "bytes")]
    places: dict[tuple[str, int, int, int], list[TransferMeasurement]] = {}
    for op, ranks, groups, stride, num_bytes, seconds in zip(walls.op, *sizes, walls.seconds.tolist(), strict=True):
        kind = cast("TransferKind", op)
        row = TransferMeasurement(kind=kind, num_ranks=ranks, num_bytes=num_bytes, seconds=seconds)
        places.setdefault((op, ranks, groups, stride), []).append(row)
    rows = []
    for (op, ranks, groups, stride), mine in places.items():
        latency_s, bandwidth = fit_transfers(mine)
        place = {"op": op, "ranks": ranks, "groups": groups, "stride": stride}
        rows.append({**place, "sizes": len(mine), "latency_s": latency_s, "bandwidth_bytes_per_s": bandwidth})
    return rows


def _range(interval: Interval) -> list[float]:
    return [interval.low, interval.high]


def _share(interval: Interval) -> str:
    return f"{100 * interval.low:.0f} to {100 * interval.high:.0f} %"
