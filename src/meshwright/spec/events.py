"""Receivers of progress and metrics: a protocol, so that no package prints."""

from __future__ import annotations

from typing import Protocol


class EventSink(Protocol):
    """Receives progress and metrics; the command line draws bars, tests collect, libraries log."""

    def progress(self, task: str, done: int, total: int) -> None:
        """``done`` of ``total`` units of ``task`` are finished."""

    def metric(self, name: str, value: float, step: int) -> None:
        """Receive a number at a step, in the unit that its name ends with."""


class NullSink:
    """Drops everything."""

    def progress(self, task: str, done: int, total: int) -> None:
        """Drop it."""

    def metric(self, name: str, value: float, step: int) -> None:
        """Drop it."""
