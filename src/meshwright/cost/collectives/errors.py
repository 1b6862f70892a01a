"""How wrong costs of collectives by datasheet are: factors that held 80 % of what was measured on public clusters.

    t₀·[low, high] of latency + (t - t₀)·[low, high] of bandwidth,     t₀ the cost of the smallest message

by op. The document ``cost/models/collectives.json`` holds the factors that `validation.collective_errors` fits:
``inside`` one node on NVIDIA devices of several kinds, each counting the same; ``across`` nodes on the one public
cluster that there is, V100s behind a NIC of 25 Gbit/s for each node, whose small messages take ten times what a
datasheet says. An op that was not measured takes the widest of the others'. Devices that NCCL does not serve take half
to twice, the range within which rules of thumb agree; nothing was measured on them.
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
    """Factors by op; ``rows_sha256`` is that of the hashes of the rows that they were fitted on.

    ``devices``: the kinds that ``inside`` rests on.
    """

    source: str
    devices: tuple[str, ...]
    rows_sha256: str
    inside: dict[str, ErrorScale]
    across: dict[str, ErrorScale]

    SCHEMA_VERSION: ClassVar[int] = 2

    def scale_of(self, op: CollectiveOp, *, across: bool) -> ErrorScale:
        """The factors of an op inside a node or across nodes, or the widest of all where it was not measured."""
        scales = self.across if across else self.inside
        known = scales.get(op)
        if known is not None:
            return known
        return ErrorScale(
            latency=_widest([scale.latency for scale in scales.values()]),
            bandwidth=_widest([scale.bandwidth for scale in scales.values()]),
        )


def bound_cost(seconds: Floats, latency_s: float | Floats, scale: ErrorScale) -> tuple[Floats, Floats]:
    """Lower and upper end of the interval of costs by datasheet, as in the module's formula (same shape)."""
    wire = seconds - latency_s
    return (
        latency_s * scale.latency.low + wire * scale.bandwidth.low,
        latency_s * scale.latency.high + wire * scale.bandwidth.high,
    )


def _widest(intervals: list[Interval]) -> Interval:
    return Interval(low=min(one.low for one in intervals), high=max(one.high for one in intervals))


@cache
def load_datasheet_errors() -> DatasheetErrors:
    """The shipped factors."""
    with resources.as_file(resources.files("meshwright.cost") / "models" / "collectives.json") as path:
        return decode_document(DatasheetErrors, read_data(path), path.name)


def datasheet_scale(op: CollectiveOp, *, by_nccl: bool, across: bool) -> ErrorScale:
    """Factors of a datasheet's estimate of an op: within or across nodes, on devices that NCCL serves or others."""
    if by_nccl:
        return load_datasheet_errors().scale_of(op, across=across)
    return ErrorScale(latency=UNKNOWN, bandwidth=UNKNOWN)
