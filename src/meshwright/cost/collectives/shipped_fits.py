"""Costs of collectives measured on public machines, for nodes with the same device kind and link.

The document ``cost/models/nccl.json`` holds one `CollectiveModel` per device kind, fitted by
`meshwright.validation.collectives` to groups inside one node. A model is used for nodes whose link between devices has
the measured bandwidth, within 10 %. Nodes with the PCIe variant of a device use the datasheet instead. The user's
machine may have another version of NCCL, so the basis is "transferred". The interval is widened by the error of
predicting one table of measurements of a device from the device's other tables.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from meshwright.cost.collectives.fitted import CollectiveModel
from meshwright.cost.costs import Basis, Interval, Predictions
from meshwright.spec import Cluster, Link, decode_document, load_cluster
from meshwright.spec.parsing import read_data

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


# Generations of a link, and its PCIe variant, differ by a factor of 1.5 at least; datasheets round by less than this.
_SAME_LINK = 0.1
# A link whose latency differs by a larger factor is not the link of the node's shipped description.
_SLOWER = 4.0
_TRANSFERRED: tuple[Basis, ...] = ("transferred",)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShippedKind:
    """The measured collectives of one device kind.

    ``link_bytes_per_s``: bandwidth of the link between devices of the measured nodes. ``software``: versions of the
    measured software. ``rows_sha256``: hash of the rows of the fit.
    """

    link_bytes_per_s: float
    software: tuple[str, ...]
    rows_sha256: str
    model: CollectiveModel


@dataclass(frozen=True, slots=True, kw_only=True)
class ShippedCollectives:
    """The shipped collective models of all measured device kinds.

    ``elsewhere``: the interval of the factor measured / predicted on another machine, for 80 % of held-out rows.
    """

    source: str
    elsewhere: Interval
    kinds: tuple[ShippedKind, ...]

    SCHEMA_VERSION: ClassVar[int] = 1

    def find(self, cluster: Cluster, ranks: Sequence[int]) -> CollectiveModel | None:
        """Return the model for the ranks' devices; None unless all are on one node with a measured kind and link."""
        for kind, link in self._measured(cluster, ranks):
            return self.find_inside(kind.model.device, link)
        return None

    def find_inside(self, device: str, link: Link) -> CollectiveModel | None:
        """Return the model of a device kind for this link between the devices of a node; None if not measured."""
        for kind in self.kinds:
            if kind.model.device != device:
                continue
            if abs(link.bandwidth_bytes_per_s / kind.link_bytes_per_s - 1.0) <= _SAME_LINK:
                usual = load_cluster(f"2x{device}").nodes[0].device_link.latency_s
                return kind.model if usual / _SLOWER <= link.latency_s <= usual * _SLOWER else None
        return None

    def find_faster(self, cluster: Cluster, ranks: Sequence[int]) -> CollectiveModel | None:
        """Return the model for the ranks' devices if all are on one node and their link is at most as fast as measured.

        Returns None otherwise. The predictions of the model are lower bounds for the slower link.
        """
        for kind, link in self._measured(cluster, ranks):
            if link.bandwidth_bytes_per_s < kind.link_bytes_per_s * (1 + _SAME_LINK):
                return kind.model
        return None

    def _measured(self, cluster: Cluster, ranks: Sequence[int]) -> Iterator[tuple[ShippedKind, Link]]:
        """Yield the kinds of the ranks' devices with the link between them, if all are on one node."""
        nodes = {cluster.node_index(rank) for rank in ranks}
        names = {cluster.device_kind(rank).name for rank in ranks}
        if len(nodes) == len(names) == 1:
            link = cluster.nodes[nodes.pop()].device_link
            yield from ((kind, link) for kind in self.kinds if {kind.model.device} == names)

    def widen(self, found: Predictions) -> Predictions:
        """Return a model's predictions with wider intervals, for a machine other than the measured one."""
        return widen(found, self.elsewhere)


def widen(found: Predictions, elsewhere: Interval) -> Predictions:
    """Return predictions of positive seconds with the basis "transferred" and wider intervals.

    The error factors of ``found`` and ``elsewhere`` are taken as independent: the squares of their logarithms add.
    """
    high = np.hypot(np.log(found.high_s / found.seconds), np.log(elsewhere.high))
    low = np.hypot(np.log(found.low_s / found.seconds), np.log(elsewhere.low))
    return Predictions(
        seconds=found.seconds,
        low_s=found.seconds * np.exp(-low),
        high_s=found.seconds * np.exp(high),
        basis=_TRANSFERRED * len(found.seconds),
    )


@cache
def load_shipped() -> ShippedCollectives:
    """Load the shipped models of measured collectives."""
    with resources.as_file(resources.files("meshwright.cost") / "models" / "nccl.json") as path:
        return decode_document(ShippedCollectives, read_data(path), path.name)
