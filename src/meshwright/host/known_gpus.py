"""Known GPUs by name: the shipped device kind, with the figures in which a variant differs.

The names are those of the driver (``NVIDIA H100 80GB HBM3``); the table with its sources is ``known_gpus.toml``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import resources

from meshwright.spec import Cluster, DeviceKind, DocumentError, Node, load_cluster
from meshwright.spec.codec import decode
from meshwright.spec.parsing import read_data


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownGpu:
    """A row of the table. Empty and None mean: as in the shipped ``kind``."""

    pattern: str
    kind: str
    source: str
    name: str = ""
    memory_bandwidth_bytes_per_s: float | None = None
    nvlink_bytes_per_s: float | None = None
    peak_flops_per_s: dict[str, float] = field(default_factory=dict)

    def describe(self, memory_bytes: int) -> DeviceKind:
        """The device kind with the memory that was found."""
        shipped = self.shipped().device_kinds[0]
        figures = self.memory_bandwidth_bytes_per_s, self.peak_flops_per_s
        return replace(
            shipped,
            name=self.name or shipped.name,
            memory_bytes=memory_bytes,
            memory_bandwidth_bytes_per_s=figures[0] or shipped.memory_bandwidth_bytes_per_s,
            peak_flops_per_s=dict(figures[1] or shipped.peak_flops_per_s),
            source=self.source if any(figures) else shipped.source,
        )

    def shipped(self) -> Cluster:
        """The shipped description of the kind, with its node."""
        return load_cluster(self.kind)

    def shipped_node(self) -> Node:
        """The node of the shipped description."""
        return self.shipped().nodes[0]


def know_gpu(name: str) -> KnownGpu | None:
    """The row for a driver's name; None for an unknown GPU."""
    plain = re.sub(r"^(NVIDIA|Tesla)\s+", "", name.strip())
    return next((row for row in known_gpus() if re.fullmatch(row.pattern, plain, re.IGNORECASE)), None)


def name_gpu(name: str) -> str:
    """The device kind of a GPU, known or not, for clusters and measurement tables, from the driver's name."""
    known = know_gpu(name)
    if known is None:
        return name.removeprefix("NVIDIA ").replace(" ", "-")
    return known.name or known.shipped().device_kinds[0].name


@cache
def known_gpus() -> tuple[KnownGpu, ...]:
    """The whole table."""
    with resources.as_file(resources.files("meshwright.host") / "known_gpus.toml") as path:
        data = read_data(path)
    if not isinstance(data, dict) or set(data) != {"gpus"}:
        raise DocumentError("known_gpus.toml: expected the one key 'gpus'. Install Meshwright again.")
    return decode(tuple[KnownGpu, ...], data["gpus"], "known_gpus.toml")
