"""The latency of a served model by batch size: a line, or linear interpolation between measured batch sizes."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial

from meshwright.spec.bounds import check_bounds
from meshwright.spec.errors import ServingError
from meshwright.spec.units import Seconds

NO_TIME = Seconds(0)
LONGEST = 86_400.0
LARGEST_BATCH = 65_536

_check = partial(check_bounds, ServingError)


@dataclass(frozen=True, slots=True, kw_only=True)
class Latency:
    """The time of a batch of b samples: ``alpha`` b + ``beta``. No batch is larger than ``largest``.

    Instead of ``alpha`` and ``beta``, ``points`` can give measured pairs (batch size, time), both ascending. Times
    between points are interpolated linearly. Below the first point the time is constant; beyond the last point the last
    line is extended.
    """

    alpha: Seconds = NO_TIME
    beta: Seconds = NO_TIME
    largest: int = 1024
    points: tuple[tuple[int, Seconds], ...] = ()

    def __post_init__(self) -> None:
        _check("A latency", alpha=(0.0, self.alpha, LONGEST), beta=(0.0, self.beta, LONGEST))
        _check("A latency", largest=(1, self.largest, LARGEST_BATCH))
        if self.points:
            self._check_points()
        if self.of(1) < 1e-8:
            raise ServingError(
                f"By its latency, a batch of one sample takes {self.of(1):g} s; expected 10 ns or more. Check "
                f"{'the points' if self.points else 'alpha and beta'}."
            )

    @classmethod
    def through(cls, measured: Iterable[tuple[int, float]]) -> Latency:
        """Return the latency through ``measured`` pairs (batch size, seconds); the largest size is ``largest``.

        If a larger batch took less time than a smaller one, it gets the time of the smaller one.
        """
        points: list[tuple[int, Seconds]] = []
        for size, seconds in sorted(measured):
            points.append((size, Seconds(max(seconds, points[-1][1] if points else 0.0))))
        return cls(points=tuple(points), largest=points[-1][0])

    def of(self, batch: float) -> float:
        """Return the seconds that a batch of ``batch`` samples takes."""
        if not self.points:
            return self.alpha * batch + self.beta
        place = max(bisect_right(self.points, batch, key=lambda point: point[0]), 1)
        size, seconds = self.points[place - 1]
        return seconds + self._slope(place) * max(batch - size, 0.0)

    def _slope(self, place: int) -> float:
        """Seconds per sample after the first ``place`` points, at least one."""
        if len(self.points) == 1:
            return 0.0
        (size, seconds), (next_size, next_seconds) = self.points[min(place, len(self.points) - 1) - 1 :][:2]
        return (next_seconds - seconds) / (next_size - size)

    def _check_points(self) -> None:
        if self.alpha or self.beta:
            raise ServingError("A latency has points, and alpha or beta as well. Give either a line or points.")
        for size, seconds in self.points:
            _check("A point of a latency", size=(1, size, LARGEST_BATCH), seconds=(0.0, seconds, LONGEST))
        for (size, seconds), (next_size, next_seconds) in zip(self.points, self.points[1:], strict=False):
            if next_size <= size or next_seconds < seconds:
                raise ServingError(
                    f"The points of a latency give {seconds:g} s for batches of {size}, and next {next_seconds:g} s "
                    f"for batches of {next_size}; expected ascending sizes whose times do not fall. Sort the points, "
                    "and where a larger batch took less time, give it the time of the smaller one."
                )
