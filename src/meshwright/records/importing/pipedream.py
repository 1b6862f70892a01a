"""PipeDream's layer profiles (``graph.txt``) as rows of the measurement table.

    node3 -- Conv2d(3, 64) -- forward_compute_time=MS, backward_compute_time=MS, activation_size=B, parameter_size=B

Times are milliseconds of one minibatch on one device. Inputs measure the loading of data and are left out; an
activation that is a list (``[a; b]``) counts as the sum. Format: `read_graph.py` and `graph/graph.py` of the PipeDream
repository (Narayanan et al., SOSP 2019).
"""

from __future__ import annotations

import math
import re

from meshwright.records.importing.imported import Imported
from meshwright.records.table import Row, columns_of, keep_sound, named_shapes
from meshwright.spec import DocumentError

_NODE = re.compile(r"\S+ -- (?P<what>.*?) -- (?P<figures>forward_compute_time=[^\t]*?)(?: -- stage_id=\d+)?")
_FIGURES = ("forward_compute_time", "backward_compute_time", "activation_size", "parameter_size")


def read_profile(text: str, *, device: str, source: str) -> Imported:
    """Forward and backward of every layer in seconds. Raises DocumentError for lines of another kind."""
    rows: list[Row] = []
    left_out = {"inputs (the loading of data)": 0, "passes that take no time": 0}
    for line in text.splitlines():
        if not line.strip() or line.startswith("\t"):
            continue
        match = _NODE.fullmatch(line.strip())
        if match is None:
            raise DocumentError(f"{source}: {line[:100]!r} is no line of a PipeDream profile. Check the file.")
        if match["what"].startswith("Input"):
            left_out["inputs (the loading of data)"] += 1
            continue
        forward_ms, backward_ms, activation, parameters = _figures(match["figures"], source)
        shapes = named_shapes(activation_bytes=int(activation), parameter_bytes=int(parameters))
        for phase, milliseconds in (("forward", forward_ms), ("backward", backward_ms)):
            if milliseconds == 0:
                left_out["passes that take no time"] += 1
            else:
                rows.append({"op": match["what"], "phase": phase, "shapes": shapes, "seconds": milliseconds / 1e3})
    columns = columns_of(rows, ("op", "phase", "shapes", "seconds"))
    records, odd = keep_sound(**columns, dtype="float32", device=device, software="PipeDream", source=source)
    return Imported(kind="a PipeDream profile", records=records, left_out={**left_out, **odd})


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
