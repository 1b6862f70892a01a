"""Links between the devices of one node that differ between pairs: data files with their sources.

A node with all devices on one switch has no topology: every group has the same links. If links are counted per pair, a
group has the number of rings that its own links can close; if they close none, the number of trees that they hold; if
they do not connect the group, its messages cross the host, at ``host_share`` of the bandwidth of one link.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from importlib import resources
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from meshwright.cost.collectives.rings import count_rings, count_trees
from meshwright.spec import ClusterError, decode_document, suggest
from meshwright.spec.parsing import read_data

if TYPE_CHECKING:
    from meshwright.cost.collectives.algorithms import Algorithm


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """Parallel links between each pair of a node's devices: a symmetric matrix of counts."""

    name: str
    source: str
    links: tuple[tuple[int, ...], ...]
    host_share: float

    SCHEMA_VERSION: ClassVar[int] = 1

    def __post_init__(self) -> None:
        count = len(self.links)
        square = all(len(row) == count and min(row) >= 0 for row in self.links)
        if not square or self.links != tuple(zip(*self.links, strict=True)):
            raise ClusterError(
                f"Topology {self.name!r}: links must be a symmetric matrix of counts; correct its {count} rows."
            )
        if not self.host_share > 0:
            raise ClusterError(f"Topology {self.name!r}: host_share {self.host_share} must be positive.")

    def lanes_among(self, devices: tuple[int, ...]) -> tuple[Algorithm, float]:
        """Return whether a group of the node's devices uses rings or trees, and how many at once.

        The number is in units of one link.
        """
        if not set(devices) <= set(range(len(self.links))):
            raise ClusterError(f"Topology {self.name!r} has devices 0 to {len(self.links) - 1}; asked for {devices}.")
        return _lanes(self.links, devices) or ("ring", self.host_share)


@lru_cache(maxsize=256)
def _lanes(links: tuple[tuple[int, ...], ...], devices: tuple[int, ...]) -> tuple[Algorithm, float] | None:
    among = np.array(links, np.int64)[np.ix_(devices, devices)]
    if rings := count_rings(among):
        return "ring", float(rings)
    if trees := count_trees(among):
        return "tree", float(trees)
    return None


def load_topology(name: str) -> Topology:
    """Return a shipped topology by name, such as ``dgx1-v100``. Raises ClusterError for unknown names."""
    folder = resources.files("meshwright.cost.collectives") / "links"
    known = sorted(item.name.removesuffix(".toml") for item in folder.iterdir() if item.name.endswith(".toml"))
    if name not in known:
        raise ClusterError(f"No topology {name!r} is shipped{suggest(name, known)}; known: {', '.join(known)}.")
    with resources.as_file(folder / f"{name}.toml") as path:
        return decode_document(Topology, read_data(path), path.name)
