"""Op spans: what happens inside the computations of a timeline, op by op."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OpSpans:
    """Parts of spans of a timeline, in order of the spans and of time; each column of shape (n,).

    Part i is inside span ``span[i]`` of the timeline and is called ``names[op[i]]``; the parts of a span follow each
    other without gaps and fill it.
    """

    span: NDArray[np.int64]
    op: NDArray[np.int32]
    start_ps: NDArray[np.int64]
    end_ps: NDArray[np.int64]
    names: tuple[str, ...]

    @property
    def num_parts(self) -> int:
        """Number of parts."""
        return len(self.span)

    def name(self, index: int) -> str:
        """Name of one part."""
        return self.names[int(self.op[index])]
