"""Captured: a graph together with what is needed to cut runnable parts out of it."""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.capture.legality import Legality
from meshwright.capture.table import CaptureTable
from meshwright.capture.trace import FlatTrace
from meshwright.spec import Graph


@dataclass(frozen=True, slots=True, kw_only=True)
class Captured:
    """A captured model; it lives in one process and is not serialisable (``graph`` is).

    Parameters and buffers stay the user's own objects. ``trace``, ``table`` and ``legality`` are for `part` and
    `differentiate`. ``remark``: what the user should know of it, as that its operators differ from those that the
    model calls by itself (if ``verify`` of `capture_model` looked); mostly empty.
    """

    graph: Graph
    trace: FlatTrace
    table: CaptureTable
    legality: Legality
    remark: str = ""
