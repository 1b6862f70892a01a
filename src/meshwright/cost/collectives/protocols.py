"""How bytes go over a link: NCCL's protocols, which trade latency for bandwidth; a data file with version and source.

    seconds on a link = base + steps·(share of the link's latency) + bytes / (share of its bandwidth)

Between devices that NCCL does not serve (processors), bytes go as the link says: `PLAIN`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from importlib import resources
from typing import ClassVar

from meshwright.spec import ClusterError, decode_document
from meshwright.spec.parsing import read_data


@dataclass(frozen=True, slots=True, kw_only=True)
class Protocol:
    """One way of sending: seconds to start, and shares of the latency and bandwidth that a link has at its best."""

    name: str
    base_s: float
    inside_latency_share: float
    across_latency_share: float
    bandwidth_share: float

    def __post_init__(self) -> None:
        shares = (self.inside_latency_share, self.across_latency_share, self.bandwidth_share)
        if self.base_s < 0 or min(shares) <= 0:
            raise ClusterError(f"Protocol {self.name!r}: seconds must not be negative, and shares must be positive.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Protocols:
    """The protocols of one version of a library."""

    version: str
    protocols: tuple[Protocol, ...]
    source: str

    SCHEMA_VERSION: ClassVar[int] = 1


PLAIN = Protocol(name="plain", base_s=0.0, inside_latency_share=1.0, across_latency_share=1.0, bandwidth_share=1.0)


@lru_cache(maxsize=1)
def load_nccl() -> Protocols:
    """NCCL's protocols, as shipped."""
    with resources.as_file(resources.files("meshwright.cost.collectives") / "nccl.toml") as path:
        return decode_document(Protocols, read_data(path), path.name)
