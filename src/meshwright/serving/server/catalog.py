"""The models that a scheduler serves, by number; numbers are unique for the lifetime of the server.

A model that is **leaving** (being removed) gets no new requests, and stays until its requests are answered.
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
    """The models that a scheduler serves, by number.

    ``generation`` is increased whenever frontends must be notified of changed models.
    """

    def __init__(self, served: Iterable[Served]) -> None:
        self.generation = 0
        self._served = {one.number: one for one in served}
        self._leaving: dict[int, int] = {}

    def __getitem__(self, number: int) -> Served:
        """Return the model of a number."""
        return self._served[number]

    def __iter__(self) -> Iterator[Served]:
        """Iterate over all models, including leaving ones."""
        return iter(self._served.values())

    @property
    def numbers(self) -> list[int]:
        """Numbers of all models, including leaving ones."""
        return list(self._served)

    @property
    def most_late_ns(self) -> int:
        """Upper limit (ns) of the measured delays that batches are planned with.

        A quarter of the difference between SLO and time of a batch of one, for the model with the smallest difference.
        """
        return min(served.slo_ns - served.table[1] for served in self) // 4

    @property
    def pause_ns(self) -> int:
        """Time (ns) for which the scheduler may let messages wait: 1/200 of the shortest batch, at most 300 us."""
        return min(*(served.table[1] // _PAUSES_IN_BATCH for served in self), _MOST_PAUSE_NS)

    def change(self, come: Iterable[Served], leave: Iterable[int]) -> None:
        """Add the models ``come``, and mark the models with the numbers ``leave`` as leaving."""
        self.generation += 1
        self._served |= {one.number: one for one in come}
        self._leaving |= dict.fromkeys(leave, self.generation)

    def leavers(self, known: int) -> list[int]:
        """Return the numbers of leaving models that frontends no longer use.

        ``known`` is the lowest generation that any frontend has confirmed.
        """
        return [number for number, generation in self._leaving.items() if generation <= known]

    def forget(self, numbers: Iterable[int]) -> None:
        """Remove leaving models whose requests have all been answered."""
        for number in numbers:
            del self._served[number], self._leaving[number]
        self.generation += 1

    def facts(self, deployment: Deployment, guard_ns: int) -> dict[str, Any]:
        """Return the arguments of `allocate_pool`; ``guard_ns`` applies if the deployment does not set a guard."""
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
        """Return the description of each model for frontends (`Served.document`), with whether it is ``leaving``."""
        return [{**served.document(), "leaving": served.number in self._leaving} for served in self]
