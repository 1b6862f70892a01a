"""Measured rates for the description of this machine: rates of a device, and the link between two processes.

The timing needs torch and is in `meshwright.measurement`; its results are passed to the functions of `describe`.
"""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.spec import Link


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Measured figures of one device: dtype → FLOP/s of matrix products, bytes/s read and written by a copy.

    ``link`` is a send between two processes of this host (None: not measured); ``conditions`` says how and when.
    """

    peak_flops_per_s: dict[str, float]
    memory_bandwidth_bytes_per_s: float
    link: Link | None
    conditions: str
