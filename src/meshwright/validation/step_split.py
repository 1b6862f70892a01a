"""Which rows of measured steps may be fitted: a tenth of each kind of device's rows on one node, drawn once.

The files ``splits/steps_KIND.json`` deal the single-node rows of a kind of device out to ten folds, grouped by
configuration: rows of one model, sequence, layout and microbatch are on one side, whatever their batch, schedule,
precision and recompute. The rows of the last fold, group by group in sorted order as long as they are a tenth of the
kind's rows or fewer, are for calibration; all other rows, and all rows of more than one node, are for scoring only.
SimuMax's rows (B200) are not dealt out: nothing is fitted on that kind.

The files were drawn with `SEED` and committed before the first fit on their rows.
"""

from __future__ import annotations

import re
from collections import defaultdict
from typing import TYPE_CHECKING

from meshwright.validation.splits import Split, draw_split, read_folds

if TYPE_CHECKING:
    from collections.abc import Sequence

    from meshwright.validation.datasets import StepRow

SEED, NUM_FOLDS = 20261122, 10
# Kinds of devices with rows on one node that may be fitted.
KINDS = ("A100", "H100", "V100")
CALIBRATION_FOLD = NUM_FOLDS - 1
_GROUP = ("family", "layers", "hidden", "heads", "seq", "n_devices", "tp", "pp", "dp", "cp", "mbs")


def single_node_rows(rows: Sequence[StepRow]) -> dict[str, list[StepRow]]:
    """The timed rows on one node of each kind that may be fitted, in their order."""
    found: dict[str, list[StepRow]] = defaultdict(list)
    for row in rows:
        kind = re.match(r"\w+", row["device"])
        if kind and kind[0] in KINDS and row["iter_time_s"] and _on_one_node(row):
            found[kind[0]].append(row)
    return found


def calibration_rows(rows: Sequence[StepRow]) -> list[StepRow]:
    """Those rows of all published ones that may be fitted. Raises DocumentError if ``rows`` are not what was dealt."""
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
    """The timed rows of all published ones that are not fitted. Raises as `calibration_rows`.

    ``splits/steps_scored.txt`` lists the ids of those that say enough to be predicted.
    """
    fitted = {row["id"] for row in calibration_rows(rows)}
    return [row for row in rows if row["id"] not in fitted and row["iter_time_s"]]


def draw_step_splits(rows: Sequence[StepRow]) -> dict[str, Split]:
    """The splits as they were drawn, by kind of device."""
    return {
        kind: draw_split(f"steps_{kind}", [group_key(row) for row in mine], num_folds=NUM_FOLDS, seed=SEED)
        for kind, mine in sorted(single_node_rows(rows).items())
    }


def group_key(row: StepRow) -> str:
    """The columns of a row that keep rows together on one side of the split."""
    # A run of Alpa whose mesh is not stated is identified by its method.
    apart = "" if row["tp"] else row["zero_or_sharding"]
    return "|".join([*(row[name] for name in _GROUP), apart])


def run_of(row: StepRow) -> tuple[str, ...]:
    """The identity of a run: model, layout, batch and seconds to four digits; independent of id and notes."""
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
