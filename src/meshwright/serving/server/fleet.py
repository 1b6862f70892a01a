"""Which workers a server has, when it scales with what arrives: some are started, others are handed back.

How many are wanted, the scaler decides (`policies.scaling`), as in the simulator. A worker that is handed back gets no
more batches, ends those that it has, and then its process. The supervisor starts and ends processes (`hire`, `release`
in reports); one that fails it starts again, whatever is wanted.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from typing import Any

from meshwright.serving.policies.pool import Ints
from meshwright.serving.policies.scaling import device_to_drain
from meshwright.serving.server.reports import report
from meshwright.spec import Deployment, Scaling

_NS = 1e9


class DeviceFleet:
    """Devices by number: ``hired`` are those that are to be there, or still start; ``draining`` end what they have.

    ``wanted`` is how many are to be hired (`step`).
    """

    def __init__(self, deployment: Deployment) -> None:
        self.scaling: Scaling | None = deployment.scaling
        self._num_devices = deployment.devices
        self.hired = set(range(self._num_devices if self.scaling is None else self.scaling.minimum))
        self.draining: set[int] = set()
        self._released: set[int] = set()
        self.wanted = len(self.hired)
        # Those of a scheduler before this one were perhaps others.
        for device in self.hired if self.is_scaled else ():
            report("hire", device=device)

    @property
    def is_scaled(self) -> bool:
        """Does what arrives say how many devices there are?"""
        return self.scaling is not None

    @property
    def every_ns(self) -> int:
        """How often it is decided anew."""
        assert self.scaling is not None
        return round(self.scaling.every * _NS)

    def facts(self) -> dict[str, Any] | None:
        """What a scaler has to know (`allocate_scaler`); None without scaling."""
        scaling = self.scaling
        if scaling is None:
            return None
        return {
            "minimum": scaling.minimum,
            "maximum": scaling.maximum or self._num_devices,
            "calm_ns": round(scaling.calm * _NS),
            "target": scaling.target,
            "now": time.monotonic_ns(),
        }

    def meet(self, device: int) -> None:
        """A worker is there: one that a scheduler before this one had hired, perhaps."""
        # One that was handed back while it started may still come, and ends then.
        if device not in self.draining | self._released | self.hired:
            self.hired.add(device)
            self.wanted = max(self.wanted, len(self.hired))
            report("hire", device=device)

    def step(self, usable: Collection[int], pool: Ints) -> int | None:
        """Hire all that lack, or hand one back that is too many; the one that is to be drained, if any."""
        lacking = self.wanted - len(self.hired)
        if lacking > 0:
            others = [device for device in range(self._num_devices) if device not in self.hired]
            # First those that are there, and end their last batches.
            for device in sorted(others, key=lambda each: each not in self.draining)[:lacking]:
                self.hired.add(device)
                self.draining.discard(device)
                self._released.discard(device)
                report("hire", device=device)
        elif lacking < 0:
            starting = self.hired.difference(usable)
            device = max(starting) if starting else int(device_to_drain(pool))
            self.hired.remove(device)
            if device not in starting:
                self.draining.add(device)
                return device
            self._release(device)
        return None

    def drained(self, device: int) -> None:
        """A device has ended what it had."""
        self.draining.discard(device)
        self._release(device)

    def _release(self, device: int) -> None:
        self._released.add(device)
        report("release", device=device)
