"""PipeDream's layer profiles (``graph.txt``): their lines, and rows of the measurement table.

    node3 -- Conv2d(3, 64) -- forward_compute_time=MS, backward_compute_time=MS, activation_size=B, parameter_size=B
    <tab>node2 -- node3

Times are milliseconds of one minibatch on one device. In the table, inputs, which measure the loading of data, are left
out; an activation that is a list (``[a; b]``) counts as the sum. Format: `read_graph.py` and `graph/graph.py` of the
PipeDream repository (Narayanan et al., SOSP 2019).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import NamedTuple

from meshwright.records.importing.imported import Imported
from meshwright.records.table import Row, columns_of, keep_sound, named_shapes
from meshwright.spec import DocumentError

_NODE = re.compile(r"(?P<name>\S+) -- (?P<what>.*?) -- (?P<figures>forward_compute_time=[^\t]*?)(?: -- stage_id=\d+)?")
_EDGE = re.compile(r"(\S+) -- (\S+)")
_FIGURES = ("forward_compute_time", "backward_compute_time", "activation_size", "parameter_size")


class ProfiledLayer(NamedTuple):
    """One line of a profile; ``activation_bytes`` are those of what the layer puts out."""

    name: str
    what: str
    forward_ms: float
    backward_ms: float
    activation_bytes: float
    parameter_bytes: float

    @property
    def is_input(self) -> bool:
        """Whether it stands for the loading of data."""
        return self.what.startswith("Input")


def read_layers(text: str, *, source: str) -> Iterator[ProfiledLayer]:
    """The layers of a profile, in its order. Raises DocumentError for lines of another kind."""
    for line in text.splitlines():
        if not line.strip() or line.startswith("\t"):
            continue
        match = _NODE.fullmatch(line.strip())
        if match is None:
            raise _no_line(line, source)
        yield ProfiledLayer(match["name"], match["what"], *_figures(match["figures"], source))


def read_edges(text: str, *, source: str) -> Iterator[tuple[str, str]]:
    """Which layer hands its output to which, by their names. Raises DocumentError for lines of another kind."""
    for line in text.splitlines():
        if line.startswith("\t"):
            match = _EDGE.fullmatch(line.strip())
            if match is None:
                raise _no_line(line, source)
            yield match[1], match[2]


def read_profile(text: str, *, device: str, source: str) -> Imported:
    """Forward and backward of every layer in seconds. Raises DocumentError for lines of another kind."""
    rows: list[Row] = []
    left_out = {"inputs (the loading of data)": 0, "passes that take no time": 0}
    for layer in read_layers(text, source=source):
        if layer.is_input:
            left_out["inputs (the loading of data)"] += 1
            continue
        shapes = named_shapes(activation_bytes=int(layer.activation_bytes), parameter_bytes=int(layer.parameter_bytes))
        for phase, milliseconds in (("forward", layer.forward_ms), ("backward", layer.backward_ms)):
            if milliseconds == 0:
                left_out["passes that take no time"] += 1
            else:
                rows.append({"op": layer.what, "phase": phase, "shapes": shapes, "seconds": milliseconds / 1e3})
    columns = columns_of(rows, ("op", "phase", "shapes", "seconds"))
    records, odd = keep_sound(**columns, dtype="float32", device=device, software="PipeDream", source=source)
    return Imported(kind="a PipeDream profile", records=records, left_out={**left_out, **odd})


def _no_line(line: str, source: str) -> DocumentError:
    return DocumentError(f"{source}: {line[:100]!r} is not a line of a PipeDream profile. Check the file.")


def _figures(text: str, source: str) -> list[float]:
    given = dict(part.partition("=")[::2] for part in text.split(", "))
    try:
        if tuple(given) != _FIGURES:
            raise ValueError("other names")
        figures = [math.fsum(float(item) for item in given[name].strip("[]").split(";")) for name in _FIGURES]
        if not all(0 <= figure < 1e18 for figure in figures):
            raise ValueError("impossible figures")
    except ValueError:
        raise DocumentError(f"{source}: {text[:100]!r} are not the four figures of a layer. Check the file.") from None
    return figures
