"""Errors of datasheet costs of collectives on public tables, and the coverage of their interval.

`fit_datasheet_errors` makes the shipped factors from all rows: those of the NCCL tables inside a node, those of the
V100 cluster across nodes. `score_datasheet` fits them on all kinds of device but one and asks for that one, in turn,
and across nodes on two nodes for four, so that no row is in its own interval. Every kind of device counts the same, by
the percentiles of its measured / estimated, however many rows it has.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from meshwright.cost.collectives.datasheet import quote_collective
from meshwright.cost.collectives.errors import DatasheetErrors, bound_cost
from meshwright.cost.collectives.fitted import ErrorScale
from meshwright.cost.collectives.fitting import collective_rows, groups_of
from meshwright.cost.prediction import Interval, Predictions
from meshwright.spec import load_cluster
from meshwright.validation.collective_rows import digest_rows, fit_alike
from meshwright.validation.datasets import load_records
from meshwright.validation.scores import Score, score_rows

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from meshwright.cost.prediction import Basis, Floats
    from meshwright.records import Records

_SOURCE = (
    "NCCL tables of ai-dynamo/aiconfigurator and VIA-Research/vTrain (inside) and Alpa's profile of V100 nodes "
    "(across), as in validation/data/nccl.parquet and v100.parquet"
)
# Less than any message takes; logarithms stay finite.
_NOTHING_S = 1e-12
_BASIS: tuple[Basis, ...] = ("roofline",)


def fit_datasheet_errors(inside: Records, across: Records) -> DatasheetErrors:
    """The factors of each op among the rows, whose devices are those of shipped clusters."""
    inner, outer = collective_rows(inside), crossing_rows(across)
    return DatasheetErrors(
        source=_SOURCE,
        devices=tuple(sorted(set(inner.device))),
        rows_sha256=digest_rows(inner, outer),
        inside=_fit_scales(inner),
        across=_fit_scales(outer),
    )


def score_datasheet() -> tuple[Score, ...]:
    """Costs by datasheet: of each kind of device, with the interval of the other kinds; of four nodes, with two's."""
    rows, crossing = collective_rows(load_records("nccl")), crossing_rows(load_records("v100"))
    asked = {device: (rows.select(rows.device != device), rows.where(device=device)) for device in set(rows.device)}
    parts = {f"{device} {{}} by datasheet": asked[device] for device in sorted(asked)}
    fewer = crossing.size("nodes") < 4
    parts["V100 {} across four nodes by datasheet"] = crossing.select(fewer), crossing.select(~fewer)
    scores = []
    for part, (known, left_out) in parts.items():
        scales = _fit_scales(known)
        for op in sorted(set(left_out.op)):
            mine = left_out.where(op=op)
            estimated, latency_s = estimate_rows(mine)
            low_s, high_s = bound_cost(estimated, latency_s, scales[op])
            found = Predictions(seconds=estimated, low_s=low_s, high_s=high_s, basis=_BASIS * len(mine))
            dataset = "v100" if "across" in part else "nccl"
            scores.append(score_rows(dataset, part.format(op), "ours", mine.seconds, found))
    return tuple(scores)


def crossing_rows(rows: Records) -> Records:
    """The usable rows of groups that cross nodes."""
    usable = collective_rows(rows)
    return usable.select(np.array([group.num_nodes > 1 for group in groups_of(usable)], bool))


def estimate_rows(rows: Records) -> tuple[Floats, Floats]:
    """Seconds by datasheet of rows of one op, and of their smallest messages: both of shape (rows,)."""
    estimated, latency_s = np.empty(len(rows)), np.empty(len(rows))
    sizes, names = rows.size("bytes").astype(np.float64), ("nodes", "devices_per_node", "ranks", "stride")
    places = list(zip(rows.device, groups_of(rows), *(rows.size(name).tolist() for name in names), strict=True))
    for place in dict.fromkeys(places):
        device, group, num_nodes, per_node, count, stride = place
        mine = np.array([other == place for other in places], bool)
        # Tables of one node do not say how many devices theirs has; those that ship have eight.
        cluster = load_cluster(f"{num_nodes}x{max(per_node, 8)}x{device}")
        tariff = quote_collective(cluster, rows.op[0], range(0, count * stride, stride), group)
        estimated[mine], latency_s[mine] = tariff.estimate(sizes[mine]), tariff.latency_s.min()
    return estimated, latency_s


def _fit_scales(rows: Records) -> dict[str, ErrorScale]:
    """The factors of each op among usable rows."""
    scales = {}
    for op in sorted(set(rows.op)):
        mine = rows.where(op=op)
        estimated, latency_s = estimate_rows(mine)
        in_latency = latency_s > estimated / 2
        latency = _factors(mine.seconds / estimated, mine.device, in_latency)
        # What bytes take above that: the ends of the interval are those of both parts.
        wire = np.maximum(estimated - latency_s, _NOTHING_S)
        low, high = (
            _factors(np.maximum(mine.seconds - latency_s * end, _NOTHING_S) / wire, mine.device, ~in_latency)
            for end in (latency.low, latency.high)
        )
        scales[op] = ErrorScale(latency=latency, bandwidth=Interval(low=low.low, high=high.high))
    return scales


def _factors(ratios: Floats, devices: NDArray[np.object_], regime: NDArray[np.bool_]) -> Interval:
    """The interval of measured / estimated in a regime."""
    return fit_alike(ratios[regime & (devices == name)] for name in sorted(set(devices[regime])))
