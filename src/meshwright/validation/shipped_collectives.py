"""The collectives that ship, fitted on public NCCL tables, and how far they are from a table that they have not seen.

A table is what one source measured on one kind of device with one version of NCCL. `fit_shipped` pools the tables of a
kind, dtypes and versions alike: what they are off by among themselves is less than what another machine is. How wide
that is, is asked of tables: each is predicted from the other tables of its kind, at sizes that those span. The interval
holds every kind of device alike, by percentiles of its measured / predicted; in `score_shipped` it is that of the other
kinds. Only the A100 was measured by two parties; the other tables of a kind come from one. What Alpa's profile of V100
nodes measured inside a node stands in for the ops that no table has of a kind.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING

import numpy as np

from meshwright.cost.collectives import fit_collectives
from meshwright.cost.collectives.fitting import collective_rows, groups_of
from meshwright.cost.collectives.shipped import ShippedCollectives, ShippedKind, widen
from meshwright.cost.prediction import Interval, Predictions, join_predictions
from meshwright.records import COLUMNS, Records, concat_records
from meshwright.spec import load_cluster
from meshwright.validation.collective_errors import estimate_rows
from meshwright.validation.collective_rows import digest_rows, fit_alike, predict_rows, table_of, topology_of
from meshwright.validation.datasets import load_records
from meshwright.validation.scores import Score, score_rows

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from meshwright.cost.collectives import CollectiveModel

_DATASET = "nccl"
_SOURCE = (
    "NCCL tables of ai-dynamo/aiconfigurator and VIA-Research/vTrain, as in validation/data/nccl.parquet; ops that "
    "these do not have of a kind from Alpa's profile, v100.parquet"
)
# Of a table that is predicted from the others, both with the model's own interval: an op's rows and what was said.
LeftOut = dict[str, list[tuple[Records, Predictions]]]


def fit_shipped() -> ShippedCollectives:
    """The models of all kinds of device that the NCCL tables have."""
    usable = _with_profiled(collective_rows(load_records(_DATASET)))
    kinds = []
    for device in sorted(set(usable.device)):
        mine = usable.where(device=device)
        kinds.append(
            ShippedKind(
                link_bytes_per_s=load_cluster(f"8x{device}").nodes[0].device_link.bandwidth_bytes_per_s,
                software=tuple(sorted(set(mine.software))),
                rows_sha256=digest_rows(mine),
                model=_round(_fit(mine)),
            )
        )
    return ShippedCollectives(source=_SOURCE, elsewhere=fit_elsewhere(leave_tables_out()), kinds=tuple(kinds))


def score_shipped() -> tuple[Score, ...]:
    """Every table from the other tables of its kind of device, by kind and op, with the interval of the other kinds.

    Beside it costs by datasheet.
    """
    left_out = leave_tables_out()
    scores = []
    for device, parts in left_out.items():
        elsewhere = fit_elsewhere({other: mine for other, mine in left_out.items() if other != device})
        for op in sorted({rows.op[0] for rows, _ in parts}):
            mine = [(rows, widen(found, elsewhere)) for rows, found in parts if rows.op[0] == op]
            measured = np.concatenate([rows.seconds for rows, _ in mine])
            estimated = np.concatenate([estimate_rows(rows)[0] for rows, _ in mine])
            part = f"{device} {op} from other tables of the device"
            scores.append(score_rows(_DATASET, part, "ours", measured, join_predictions([found for _, found in mine])))
            scores.append(score_rows(_DATASET, part, "by datasheet", measured, estimated))
    return tuple(scores)


@cache
def leave_tables_out() -> LeftOut:
    """By kind of device with two tables or more: each table by op, and what the others of the kind say of it."""
    rows = collective_rows(load_records(_DATASET))
    tables = np.array(["\n".join(table_of(rows, index)) for index in range(len(rows))], object)
    found: LeftOut = {}
    for device in sorted(set(rows.device)):
        for table in sorted(set(tables[rows.device == device])):
            others, mine = rows.select((rows.device == device) & (tables != table)), rows.select(tables == table)
            if not len(others):
                continue
            # Two rows of the B200 say the very same in two files.
            mine = mine.select(~np.isin(mine.row_hashes(), others.row_hashes()))
            model = _fit(others)
            for asked in _spanned(mine, others):
                found.setdefault(device, []).append((asked, predict_rows(model, asked)))
    return found


def fit_elsewhere(left_out: Mapping[str, list[tuple[Records, Predictions]]]) -> Interval:
    """The interval of measured / predicted of tables left out."""
    return fit_alike(
        np.concatenate([rows.seconds / said.seconds for rows, said in parts]) for parts in left_out.values()
    )


def _with_profiled(tables: Records) -> Records:
    """The tables, and what Alpa's profile says of groups inside a node where no table says it."""
    profiled = collective_rows(load_records("v100"))
    known = set(zip(tables.device, tables.op, strict=True))
    new = [
        group.num_nodes == 1 and (device, op) not in known
        for group, device, op in zip(groups_of(profiled), profiled.device, profiled.op, strict=True)
    ]
    return concat_records([tables, profiled.select(np.array(new, bool))])


def _fit(rows: Records) -> CollectiveModel:
    """One model of a kind of device, dtypes and versions pooled."""
    columns = {name: getattr(rows, name) for name in COLUMNS}
    return fit_collectives(Records(**{**columns, "dtype": np.full(len(rows), "", object)}), topology_of(rows.device[0]))


def _spanned(mine: Records, others: Records) -> Iterator[Records]:
    """The rows of each op of a table whose sizes lie among those that the others have of the op."""
    for op in sorted(set(mine.op) & set(others.op)):
        asked, sizes = mine.where(op=op), others.where(op=op).size("bytes")
        spanned = asked.select((asked.size("bytes") >= sizes.min()) & (asked.size("bytes") <= sizes.max()))
        if len(spanned):
            yield spanned


def _round(model: CollectiveModel) -> CollectiveModel:
    """Sizes to a tenth of a byte, seconds to four digits, no measured sizes: on another machine none is."""
    series = tuple(
        replace(
            one,
            measured=(),
            sizes=tuple(round(size, 1) for size in one.sizes),
            seconds=tuple(float(f"{seconds:.4g}") for seconds in one.seconds),
        )
        for one in model.series
    )
    return replace(model, series=series, row_hashes=())
