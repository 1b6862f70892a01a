"""The parts of device memory that are counted (`MEMORY_PARTS`), and the groups that reports show (`MEMORY_GROUPS`).

Each part belongs to one group, so the groups add up to the whole:

    parameters                          and the copies of older versions that a schedule keeps
    gradients, optimizer                one part each
    activations                         what grows with the microbatch: saved tensors, and the workspace of ops
    buffers                             what does not depend on the microbatch: the model's own, gradient buckets
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

# The parts of memory, in the order of all columns.
PARAMETERS, BUFFERS, GRADIENTS, OPTIMIZER, BUCKETS, SAVED, RECEIVED, INPUTS, SENT, WORKSPACE, STASHED = range(11)
MEMORY_PARTS = (
    "parameters",
    "buffers",
    "gradients",
    "optimizer states",
    "gradient buckets",
    "saved activations",
    "received",
    "inputs",
    "sent",
    "workspace",
    "stashed weights",
)

# The parts that grow with the microbatch.
ACTIVATIONS = "activations"
MEMORY_GROUPS: Mapping[str, tuple[str, ...]] = {
    "parameters": ("parameters", "stashed weights"),
    "gradients": ("gradients",),
    "optimizer": ("optimizer states",),
    ACTIVATIONS: ("saved activations", "received", "inputs", "sent", "workspace"),
    "buffers": ("buffers", "gradient buckets"),
}


def name_part(part: str) -> str:
    """Return the words for a part of memory in a sentence: ``received tensors`` for ``received``."""
    return f"{part} tensors" if part in ("received", "sent") else part


def group_parts(parts: Mapping[str, int]) -> dict[str, int]:
    """Return the bytes of each group, in the order of `MEMORY_GROUPS`, from the bytes of each part.

    Parts outside all groups are left out.
    """
    return {group: sum(parts.get(part, 0) for part in names) for group, names in MEMORY_GROUPS.items()}
