"""Start and release workers of a server that scales with the load.

The scaler decides how many workers are wanted (`policies.autoscaling`), as in the simulator. A worker that is released
gets no more batches, finishes its current ones, and then its process ends. The scheduler reports `hire` and `release`,
and the supervisor starts and ends the processes. The supervisor restarts a failed worker even if fewer are wanted.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from typing import Any

from meshwright.serving.policies.autoscaling import device_to_drain
from meshwright.serving.policies.pool import Ints
from meshwright.serving.server.reports import report
from meshwright.spec import Deployment, Scaling

_NS = 1e9


class DeviceFleet:
    """The devices of a server, by number, each with one worker.

    The workers of ``hired`` devices are up or starting. Those of ``draining`` devices finish their last batches.
    ``wanted`` is the number of devices that should be hired; `step` changes ``hired`` accordingly.
    """

    def __init__(self, deployment: Deployment) -> None:
        self.scaling: Scaling | None = deployment.scaling
        self._num_devices = deployment.devices
        self.hired = set(range(self._num_devices if self.scaling is None else self.scaling.minimum))
        self.draining: set[int] = set()
        self._released: set[int] = set()
        self.wanted = len(self.hired)
        # An earlier scheduler may have hired others.
        for device in self.hired if self.is_scaled else ():
            report("hire", device=device)

    @property
    def is_scaled(self) -> bool:
        """Whether the number of devices follows the load."""
        return self.scaling is not None

    @property
    def every_ns(self) -> int:
        """Time (ns) between two decisions on the number of devices."""
        assert self.scaling is not None
        return round(self.scaling.every * _NS)

    def facts(self) -> dict[str, Any] | None:
        """Return the arguments of `allocate_scaler`; None without scaling."""
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
        """Handle the connection of a worker, which an earlier scheduler may have hired."""
        # One that was released while it started may still connect; it ends then.
        if device not in self.draining | self._released | self.hired:
            self.hired.add(device)
            self.wanted = max(self.wanted, len(self.hired))
            report("hire", device=device)

    def step(self, usable: Collection[int], pool: Ints) -> int | None:
        """Hire all missing devices, or release one surplus device.

        ``usable`` are the devices whose workers can run batches. Returns the released device if its worker first has
        to finish its batches (`drained`), otherwise None.
        """
        lacking = self.wanted - len(self.hired)
        if lacking > 0:
            others = [device for device in range(self._num_devices) if device not in self.hired]
            # First those that are up and finish their last batches.
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
        """Release a device that has finished its batches."""
        self.draining.discard(device)
        self._release(device)

    def _release(self, device: int) -> None:
        self._released.add(device)
        report("release", device=device)
