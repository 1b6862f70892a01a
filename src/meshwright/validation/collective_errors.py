"""What prices of collectives by datasheet are off by, on the public NCCL tables, and whether their interval holds.

`fit_datasheet_errors` makes the shipped factors from all rows. `score_datasheet` fits them on all kinds of device but
one and asks for that one, in turn, so that no row is in its own interval. Every kind of device counts the same, by the
percentiles of its measured / priced, however many rows it has.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import numpy as np

from meshwright.cost.collectives import place_group
from meshwright.cost.collectives.datasheet import quote_collective
from meshwright.cost.collectives.errors import DatasheetErrors
from meshwright.cost.collectives.fitted import ErrorScale, with_interval
from meshwright.cost.collectives.fitting import collective_rows
from meshwright.cost.prediction import Interval, fit_interval
from meshwright.spec import load_cluster
from meshwright.validation.datasets import load_records
from meshwright.validation.scores import Score, score_rows

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from meshwright.cost.prediction import Basis, Floats
    from meshwright.records import Records

_SOURCE = "NCCL tables of ai-dynamo/aiconfigurator and VIA-Research/vTrain, as in validation/data/nccl.parquet"
_BASIS: tuple[Basis, ...] = ("roofline",)


def fit_datasheet_errors(rows: Records) -> DatasheetErrors:
    """The factors of each op among the rows, whose devices are those of shipped clusters of one node."""
    usable = collective_rows(rows)
    scales = {}
    for op in sorted(set(usable.op)):
        mine = usable.where(op=op)
        priced, latency_s = price_rows(mine)
        ratios, in_latency = mine.seconds / priced, latency_s > priced / 2
        latency, bandwidth = (_factors(ratios, mine.device, regime) for regime in (in_latency, ~in_latency))
        scales[op] = ErrorScale(latency=latency, bandwidth=bandwidth)
    hashes = np.sort(usable.row_hashes()).astype("<u8").tobytes()
    return DatasheetErrors(
        source=_SOURCE,
        devices=tuple(sorted(set(usable.device))),
        rows_sha256=hashlib.sha256(hashes).hexdigest(),
        scales=scales,
    )


def score_datasheet() -> tuple[Score, ...]:
    """Prices by datasheet of each kind of device, with the interval of the other kinds."""
    rows = collective_rows(load_records("nccl"))
    scores = []
    for device in sorted(set(rows.device)):
        here = rows.device == device
        errors = fit_datasheet_errors(rows.select(~here))
        for op in sorted(set(rows.select(here).op)):
            asked = rows.select(here).where(op=op)
            priced, latency_s = price_rows(asked)
            found = with_interval(priced, latency_s, errors.scale_of(asked.op[0]), 1.0, _BASIS * len(asked))
            scores.append(score_rows("nccl", f"{device} {op} by datasheet", "ours", asked.seconds, found))
    return tuple(scores)


def price_rows(rows: Records) -> tuple[Floats, Floats]:
    """Seconds by datasheet of rows of one op, and of their smallest messages: both of shape (rows,)."""
    priced, latency_s = np.empty(len(rows)), np.empty(len(rows))
    sizes, counts, devices = rows.size("bytes").astype(np.float64), rows.size("ranks"), rows.device
    for device, count in sorted(set(zip(rows.device, counts.tolist(), strict=True))):
        mine = (devices == device) & (counts == count)
        cluster, ranks = load_cluster(f"8x{device}"), range(count)
        tariff = quote_collective(cluster, rows.op[0], ranks, place_group(cluster, ranks))
        priced[mine], latency_s[mine] = tariff.price(sizes[mine]), tariff.latency_s.min()
    return priced, latency_s


def _factors(ratios: Floats, devices: NDArray[np.object_], regime: NDArray[np.bool_]) -> Interval:
    """The interval of measured / priced in a regime, over the percentiles of each kind of device; 1 lies in it."""
    parts = [np.percentile(ratios[regime & (devices == name)], range(1, 100)) for name in sorted(set(devices[regime]))]
    pooled = np.concatenate(parts)
    found = fit_interval(pooled, np.ones(len(pooled)))
    return Interval(low=min(found.low, 1.0), high=max(found.high, 1.0))
