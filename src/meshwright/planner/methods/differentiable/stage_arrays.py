"""Costs of stages on unequal devices, as arrays: the input of the relaxation (`relaxed`) and of repair.

Stage s has the layers e_s to e_s+1 - 1 of L layers; each of D ranks belongs to one stage. Stage s has r ranks, each of
which computes at most n = ceil(M / r) of M microbatches. In seconds, its computation per microbatch t, its incoming
transfer x, its gradient reduction e and its optimizer step o are

    t = max over its ranks of  seconds[kind, i, j]
    x = max over pairs of ranks of the stage before and of this one of  transfer_s[link, i]
    e = exchange_bytes[i, j] · max over its pairs of  pair_s · group_factor     less the backward, if overlapped
    o = max over its ranks of  optimizer_s[kind, i, j]

and a step takes, as in `methods.slicing`, with f = `num_fills` (1 for training, 0 for inference),

    f Σ_s (t_s + x_s)  +  max_s ((n_s - f) max(t_s, x_s) + e_s + o_s)

i and j are the stage's first layer and the end of its layers. A rank keeps held_bytes[r, i, j], and
more_bytes[r, i, j] for each microbatch in flight beyond the first. Unlike in `methods.slicing`, any rank may serve any
stage. Communication of ZeRO 2 and 3 during forward and backward passes takes no time here.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]


class StageSpace(NamedTuple):
    """The arrays of one setting, microbatch size and schedule; times in seconds, memory in bytes.

    Shapes, with R the largest number of replicas: ``seconds``, ``backward_s``, ``optimizer_s`` (kinds, L, L + 1);
    ``exchange_bytes`` (L, L + 1); ``transfer_s`` (links, L), zero for layer 0; ``held_bytes``, ``more_bytes`` (R + 1,
    L, L + 1) by replicas; ``kind_of``, ``node_of``, ``memory_limit`` (D,); ``link_of`` (D, D); ``pair_s`` (D, D),
    seconds per byte to reduce gradients of two ranks; ``group_factor`` (R + 1, nodes + 1), how much longer r ranks on a
    number of nodes take than their slowest pair. ``keeps_all``: all microbatches are in flight (gpipe). ``overlap``:
    gradient reduction overlaps with the backward.
    """

    num_microbatches: int
    num_fills: int
    keeps_all: bool
    overlap: bool
    seconds: Floats
    backward_s: Floats
    optimizer_s: Floats
    exchange_bytes: Floats
    transfer_s: Floats
    held_bytes: Floats
    more_bytes: Floats
    kind_of: Integers
    link_of: Integers
    node_of: Integers
    pair_s: Floats
    group_factor: Floats
    memory_limit: Floats

    @property
    def num_layers(self) -> int:
        """The number of layers, L."""
        return len(self.exchange_bytes)

    @property
    def num_ranks(self) -> int:
        """The number of ranks, D."""
        return len(self.kind_of)
