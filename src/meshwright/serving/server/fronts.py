"""The frontends that are connected to a scheduler: messages to them, and the requests that they have submitted."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator
from typing import Any

import numpy as np

from meshwright.serving.policies.pool import Ints
from meshwright.serving.server.channel import MOST_CELLS, Closed, Kind
from meshwright.serving.server.peers import SLOT_BITS, FrontendPeer, by_front, front_of, slots_of
from meshwright.serving.server.switchboard import Switchboard


class Fronts:
    """All connected frontends, by the number of their connection."""

    def __init__(self, board: Switchboard) -> None:
        self._board = board
        self._fronts: dict[int, FrontendPeer] = {}

    def __len__(self) -> int:
        """Return the number of connected frontends."""
        return len(self._fronts)

    def __iter__(self) -> Iterator[FrontendPeer]:
        """Iterate over the connected frontends."""
        return iter(self._fronts.values())

    def add(self, front: FrontendPeer) -> None:
        """Add a frontend that has connected."""
        self._fronts[front.number] = front

    def remove(self, front: FrontendPeer) -> None:
        """Remove a frontend that has disconnected."""
        del self._fronts[front.number]

    def has_asked(self, request: int) -> bool:
        """Return whether the frontend that submitted a request is still connected."""
        return front_of(request) in self._fronts

    def known(self, newest: int) -> int:
        """Return the latest generation of models (`Catalog`) that all frontends have confirmed.

        Without frontends this is the ``newest`` generation.
        """
        return min((front.known for front in self), default=newest)

    def tell(self, document: dict[str, Any], only: FrontendPeer | None = None) -> None:
        """Send a document to all frontends, or to ``only`` one."""
        for front in self if only is None else (only,):
            with contextlib.suppress(Closed):  # seen when it is read
                front.channel.send_text({**document, "channel": front.number})
                self._board.listen_for_room(front.channel)

    def answer(self, model: int, requests: Ints, fate: int, end: int = 0) -> None:
        """Send an outcome (`Fate`) of requests to their frontends; ``end`` is that of their batch (ns), or 0."""
        for number, places in by_front(requests):
            front = self._fronts.get(number)
            if front is None:
                continue
            slots = slots_of(requests[places])
            with contextlib.suppress(Closed):
                for place in range(0, len(slots), MOST_CELLS - 4):
                    part = slots[place : place + MOST_CELLS - 4]
                    front.channel.send(np.concatenate([np.array([Kind.ANSWER, model, fate, end], np.int64), part]))
                self._board.listen_for_room(front.channel)

    def forget(self, models: Collection[int]) -> None:
        """Forget the submitted requests of models that have been removed."""
        for front in self:
            for model in models:
                front.submitted.pop(model, None)

    def deadlines_of(self, model: int, requests: Ints) -> Ints:
        """Return the deadlines (ns) of a model's requests; 0 if the frontend has disconnected."""
        return self.submitted(model, requests)[:, 1]

    def submitted(self, model: int, requests: Ints) -> Ints:
        """Return an array (requests, 2): each request with its level, and its deadline (ns).

        Both are 0 if the frontend of the request has disconnected.
        """
        found = np.zeros((len(requests), 2), np.int64)
        for number, places in by_front(requests):
            front = self._fronts.get(number)
            if front is not None:
                found[places] = front.submitted[model][slots_of(requests[places])]
                found[places, 0] |= number << SLOT_BITS
        return found
