"""How long bytes take between ranks that share a node of the measured kind, and how much processor time they cost.

A number of ranks that was not measured is transferred from the nearest that was, by the ring's terms (Patarasu and
Yuan, JPDC 2009): its latency grows with k-1, its bytes with (k-1)/k. Ranks of other kinds or nodes, and other
collectives, are priced by `meshwright.cost.collectives`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from meshwright.cost.curves import Curve, fit_curve

if TYPE_CHECKING:
    from meshwright.spec import Measurements


class TransferTable:
    """Curves over bytes of wall and of host seconds, for sends and for all-reduces of each measured number of ranks."""

    def __init__(self, measurements: Measurements) -> None:
        self._curves: dict[tuple[str, int, bool], Curve] = {}
        rows = measurements.transfers
        for kind, num_ranks in sorted({(row.kind, row.num_ranks) for row in rows}):
            mine = [row for row in rows if (row.kind, row.num_ranks) == (kind, num_ranks)]
            self._curves[kind, num_ranks, False] = fit_curve((row.num_bytes, row.seconds) for row in mine)
            self._curves[kind, num_ranks, True] = fit_curve((row.num_bytes, row.host_s) for row in mine)

    def send(self, num_bytes: float, *, host: bool = False) -> float | None:
        """Seconds one way (with ``host``: of processor time on each side); None if no send was measured."""
        num_ranks = self._nearest("send", 2)
        return None if num_ranks is None else self._curves["send", num_ranks, host].seconds_at(num_bytes)

    def all_reduce(self, num_ranks: int, num_bytes: float, *, host: bool = False) -> float | None:
        """Seconds among ``num_ranks`` (with ``host``: of processor time per rank); None if none was measured."""
        nearest = self._nearest("all_reduce", num_ranks)
        if nearest is None:
            return None
        curve = self._curves["all_reduce", nearest, host]
        latency, seconds = float(curve.seconds[0]), curve.seconds_at(num_bytes)
        more_steps = (num_ranks - 1) / (nearest - 1)
        return latency * more_steps + (seconds - latency) * more_steps * nearest / num_ranks

    def _nearest(self, kind: str, num_ranks: int) -> int | None:
        measured = [ranks for found, ranks, _ in self._curves if found == kind]
        return min(measured, key=lambda ranks: (abs(ranks - num_ranks), ranks), default=None)
