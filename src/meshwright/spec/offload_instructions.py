"""Instructions of a rank in parallel with its device, for offloaded states and activations.

Optimizer states: instructions on pieces of a stage. A piece is some parameters of a stage, in the order in which a
backward makes their gradients. Its ``num_bytes`` are those of its gradients, in the device's precision, except for
reads and writes of drives. Activations: copies of what one layer saves of a microbatch for its backward.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyDown:
    """Copy the gradients of one piece of the stage's parameters from the device to its host."""

    stage: int
    piece: int
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class HostStep:
    """On the host: update one piece of the stage's parameters from its gradients, of ``num_bytes``."""

    stage: int
    piece: int
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyUp:
    """Copy the new parameters of one piece from the host to the device."""

    stage: int
    piece: int
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadStates:
    """Read the optimizer's states of one piece from the drives of the host."""

    stage: int
    piece: int
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteStates:
    """Write the new states of one piece back to the drives."""

    stage: int
    piece: int
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedDown:
    """Copy what ``layer`` of the graph saves of one microbatch for its backward from the device to its host."""

    stage: int
    microbatch: int
    layer: int
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedUp:
    """Copy the saved values of ``layer`` for one microbatch back to the device during the next layer's backward.

    The backward of the stage waits for it before that layer.
    """

    stage: int
    microbatch: int
    layer: int
    num_bytes: int


Offloading = CopyDown | HostStep | CopyUp | ReadStates | WriteStates | SavedDown | SavedUp
