"""Receivers of progress and metrics (`EventSink`): packages report to them instead of printing."""

from __future__ import annotations

from typing import Protocol


class EventSink(Protocol):
    """Receives progress and metrics: the command line draws bars, tests collect them, libraries log them."""

    def progress(self, task: str, done: int, total: int) -> None:
        """Receive progress: ``done`` of ``total`` units of ``task`` are finished."""

    def metric(self, name: str, value: float, step: int) -> None:
        """Receive the value of a metric at a step. The metric's name ends with its unit, as in ``step_s``."""


class NullSink:
    """An `EventSink` that ignores progress and metrics."""

    def progress(self, task: str, done: int, total: int) -> None:
        """Ignore the progress."""

    def metric(self, name: str, value: float, step: int) -> None:
        """Ignore the metric."""
