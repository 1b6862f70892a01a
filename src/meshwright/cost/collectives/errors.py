"""How wrong prices of collectives by datasheet are: factors that held 80 % of what was measured on public clusters.

    measured / priced in [low, high],  by op and by regime: latency where the smallest message takes over half the time

The document ``cost/models/collectives.json`` holds the factors, fitted by `meshwright.validation.collective_errors` on
groups inside one node of NVIDIA devices, each kind of device counting the same. Groups across nodes take the same
factors, unchecked. An op that was not measured takes the widest of the others'. Devices that
NCCL does not serve take half to twice, the range within which rules of thumb agree; nothing was measured on them.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasheetErrors:
    """Factors by op; ``rows_sha256`` is that of the hashes of the rows that they were fitted on, of ``devices``."""

    source: str
    devices: tuple[str, ...]
    rows_sha256: str
    scales: dict[str, ErrorScale]

    SCHEMA_VERSION: ClassVar[int] = 1

    def scale_of(self, op: CollectiveOp) -> ErrorScale:
        """The factors of an op, or the widest of all where it was not measured."""
        known = self.scales.get(op)
        if known is not None:
            return known
        return ErrorScale(
            latency=_widest([scale.latency for scale in self.scales.values()]),
            bandwidth=_widest([scale.bandwidth for scale in self.scales.values()]),
        )


def _widest(intervals: list[Interval]) -> Interval:
    return Interval(low=min(one.low for one in intervals), high=max(one.high for one in intervals))


@cache
def load_datasheet_errors() -> DatasheetErrors:
    """The shipped factors."""
    with resources.as_file(resources.files("meshwright.cost") / "models" / "collectives.json") as path:
        return decode_document(DatasheetErrors, read_data(path), path.name)


def datasheet_scale(op: CollectiveOp, *, by_nccl: bool) -> ErrorScale:
    """The factors of an op priced by datasheet, among devices that NCCL serves or among others."""
    return load_datasheet_errors().scale_of(op) if by_nccl else ErrorScale(latency=UNKNOWN, bandwidth=UNKNOWN)
