"""The models that a scheduler serves, by their numbers, which are their own for as long as the server lives.

A model that is **leaving** gets no more requests, and stays until those that it has are answered.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from meshwright.serving.policies.pool import NEVER
from meshwright.serving.server.peers import CAPACITY
from meshwright.serving.server.served import Served
from meshwright.spec import Deployment

_PAUSES_IN_BATCH, _MOST_PAUSE_NS = 200, 300_000


class Catalog:
    """See the module's docstring. ``generation`` counts how often fronts had to be told of other models."""

    def __init__(self, served: Iterable[Served]) -> None:
        self.generation = 0
        self._served = {one.number: one for one in served}
        self._leaving: dict[int, int] = {}

    def __getitem__(self, number: int) -> Served:
        """The model of a number."""
        return self._served[number]

    def __iter__(self) -> Iterator[Served]:
        """All models, also those that leave."""
        return iter(self._served.values())

    @property
    def numbers(self) -> list[int]:
        """Of all models."""
        return list(self._served)

    @property
    def most_late_ns(self) -> int:
        """What lateness is planned for at most: a quarter of what the tightest request has beside its computation."""
        return min(served.slo_ns - served.table[1] for served in self) // 4

    @property
    def pause_ns(self) -> int:
        """How long the scheduler may be away without harm: little beside the shortest batch of any model."""
        return min(*(served.table[1] // _PAUSES_IN_BATCH for served in self), _MOST_PAUSE_NS)

    def change(self, come: Iterable[Served], leave: Iterable[int]) -> None:
        """Models come; others get no more requests."""
        self.generation += 1
        self._served |= {one.number: one for one in come}
        self._leaving |= dict.fromkeys(leave, self.generation)

    def leavers(self, known: int) -> list[int]:
        """Models that leave, of which all fronts have been told if they know of this generation."""
        return [number for number, generation in self._leaving.items() if generation <= known]

    def forget(self, numbers: Iterable[int]) -> None:
        """Models have left."""
        for number in numbers:
            del self._served[number], self._leaving[number]
        self.generation += 1

    def facts(self, deployment: Deployment, guard_ns: int) -> dict[str, Any]:
        """What a pool has to know (`allocate_pool`); ``guard_ns`` where the deployment leaves it open."""
        most = max(len(served.table) for served in self)
        return {
            "latency": [served.table + [NEVER] * (most - len(served.table)) for served in self],
            "slo": [served.slo_ns for served in self],
            "num_devices": deployment.devices,
            "capacity": CAPACITY,
            "delay_ns": round(deployment.delay * 1e9),
            "slack_ns": round(deployment.slack * 1e9),
            "guard_ns": round(deployment.guard * 1e9) or guard_ns,
        }

    def documents(self) -> list[dict[str, Any]]:
        """What fronts are told."""
        return [{**served.document(), "leaving": served.number in self._leaving} for served in self]
