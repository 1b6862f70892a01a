"""Instructions for offloaded optimizer states and activations; they run in parallel with the device.

Offloaded optimizer states are handled in pieces. A piece is some parameters of a stage, in the order in which a
backward makes their gradients. ``num_bytes`` is the size of the piece's gradients in the device's precision, or of its
states for reads and writes of drives. Offloaded activations are copied layer by layer for each microbatch.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyDown:
    """Copy the gradients of one piece of the stage's parameters from the device to the host."""

    stage: int
    piece: int
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class HostStep:
    """Make the optimizer step of one piece on the host, from its gradients of ``num_bytes``."""

    stage: int
    piece: int
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyUp:
    """Copy the updated parameters of one piece from the host to the device."""

    stage: int
    piece: int
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadStates:
    """Read the optimizer states of one piece from the drives of the host."""

    stage: int
    piece: int
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteStates:
    """Write the updated optimizer states of one piece back to the drives of the host."""

    stage: int
    piece: int
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedDown:
    """Copy the tensors that ``layer`` saves for the backward of one microbatch from the device to the host."""

    stage: int
    microbatch: int
    layer: int
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedUp:
    """Copy the saved tensors of ``layer`` for one microbatch back to the device, during the next layer's backward.

    The stage's backward waits for this copy before it reaches ``layer``.
    """

    stage: int
    microbatch: int
    layer: int
    num_bytes: int


Offloading = CopyDown | HostStep | CopyUp | ReadStates | WriteStates | SavedDown | SavedUp
