"""Errors of datasheet costs of collectives: factors that contain 80 % of measurements on public clusters.

    t₀·[low, high] of latency + (t - t₀)·[low, high] of bandwidth,     t₀ the cost of the smallest message

by op. The document ``cost/models/collectives.json`` holds the factors fitted by `validation.collective_errors`:
``inside`` one node on NVIDIA devices of several kinds with equal weights; ``across`` nodes on the only public cluster,
V100s with a NIC of 25 Gbit/s per node, where small messages take ten times the datasheet's time. An op without
measurements has the widest factors of the others. Devices without NCCL have factors of a half to two, the range within
which rules of thumb agree; they were not measured.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING, ClassVar

from meshwright.cost.collectives.fitted import ErrorScale
from meshwright.cost.collectives.fitting import UNKNOWN
from meshwright.cost.prediction import Interval
from meshwright.spec import decode_document
from meshwright.spec.parsing import read_data

if TYPE_CHECKING:
    from meshwright.cost.collectives.algorithms import CollectiveOp
    from meshwright.cost.prediction import Floats


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasheetErrors:
    """Factors by op; ``rows_sha256`` is the hash of the hashes of the rows that they were fitted on.

    ``devices``: the kinds measured for ``inside``.
    """

    source: str
    devices: tuple[str, ...]
    rows_sha256: str
    inside: dict[str, ErrorScale]
    across: dict[str, ErrorScale]

    SCHEMA_VERSION: ClassVar[int] = 2

    def scale_of(self, op: CollectiveOp, *, across: bool) -> ErrorScale:
        """Return the factors of an op inside a node or across nodes, or the widest of all if it was not measured."""
        scales = self.across if across else self.inside
        known = scales.get(op)
        if known is not None:
            return known
        return ErrorScale(
            latency=_widest([scale.latency for scale in scales.values()]),
            bandwidth=_widest([scale.bandwidth for scale in scales.values()]),
        )


def bound_cost(seconds: Floats, latency_s: float | Floats, scale: ErrorScale) -> tuple[Floats, Floats]:
    """Return the lower and upper end of the interval of datasheet costs, by the module's formula (same shape)."""
    wire = seconds - latency_s
    return (
        latency_s * scale.latency.low + wire * scale.bandwidth.low,
        latency_s * scale.latency.high + wire * scale.bandwidth.high,
    )


def _widest(intervals: list[Interval]) -> Interval:
    return Interval(low=min(one.low for one in intervals), high=max(one.high for one in intervals))


@cache
def load_datasheet_errors() -> DatasheetErrors:
    """Load the shipped factors."""
    with resources.as_file(resources.files("meshwright.cost") / "models" / "collectives.json") as path:
        return decode_document(DatasheetErrors, read_data(path), path.name)


def datasheet_scale(op: CollectiveOp, *, by_nccl: bool, across: bool) -> ErrorScale:
    """Return factors of a datasheet estimate of an op: within or across nodes, on devices with or without NCCL."""
    if by_nccl:
        return load_datasheet_errors().scale_of(op, across=across)
    return ErrorScale(latency=UNKNOWN, bandwidth=UNKNOWN)
