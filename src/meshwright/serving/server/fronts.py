"""The frontends of a scheduler: messages to them, and the deadlines of their requests."""

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
    """All connected frontends, by number."""

    def __init__(self, board: Switchboard) -> None:
        self._board = board
        self._fronts: dict[int, FrontendPeer] = {}

    def __len__(self) -> int:
        """Return how many there are."""
        return len(self._fronts)

    def __iter__(self) -> Iterator[FrontendPeer]:
        """Iterate over all of them."""
        return iter(self._fronts.values())

    def add(self, front: FrontendPeer) -> None:
        """Add a frontend that has connected."""
        self._fronts[front.number] = front

    def remove(self, front: FrontendPeer) -> None:
        """Remove a frontend that has gone."""
        del self._fronts[front.number]

    def has_asked(self, request: int) -> bool:
        """Return whether the frontend of a request is connected."""
        return front_of(request) in self._fronts

    def known(self, newest: int) -> int:
        """Return the generation of models that all frontends have confirmed."""
        return min((front.known for front in self), default=newest)

    def tell(self, document: dict[str, Any], only: FrontendPeer | None = None) -> None:
        """Send a document to all frontends, or to one."""
        for front in self if only is None else (only,):
            with contextlib.suppress(Closed):  # seen when it is read
                front.channel.send_text({**document, "channel": front.number})
                self._board.listen_for_room(front.channel)

    def answer(self, model: int, requests: Ints, fate: int, end: int = 0) -> None:
        """Send the outcome of requests to their frontends, with the end of their batch (ns; 0 without one)."""
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
        """Forget requests of models that have left."""
        for front in self:
            for model in models:
                front.submitted.pop(model, None)

    def deadlines_of(self, model: int, requests: Ints) -> Ints:
        """Return the deadlines of requests; 0 for those of frontends that have gone."""
        return self.submitted(model, requests)[:, 1]

    def submitted(self, model: int, requests: Ints) -> Ints:
        """Return requests as submitted, with their level, and their deadlines; 0 for frontends that have gone."""
        found = np.zeros((len(requests), 2), np.int64)
        for number, places in by_front(requests):
            front = self._fronts.get(number)
            if front is not None:
                found[places] = front.submitted[model][slots_of(requests[places])]
                found[places, 0] |= number << SLOT_BITS
        return found
