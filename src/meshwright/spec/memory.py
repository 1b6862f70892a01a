"""What memory is used for: the parts that are counted, and the groups in which people read them.

A part belongs to one group, so groups add up to the whole wherever they are shown:

    parameters                          and the copies of older versions that a schedule keeps
    gradients, optimizer                one part each
    activations                         what grows with the microbatch: what it keeps, and what computing it takes
    buffers                             what is there once, whatever the microbatch: the model's own, gradient buckets
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

# What grows with the microbatch.
ACTIVATIONS = "activations"
MEMORY_GROUPS: Mapping[str, tuple[str, ...]] = {
    "parameters": ("parameters", "stashed weights"),
    "gradients": ("gradients",),
    "optimizer": ("optimizer states",),
    ACTIVATIONS: ("saved activations", "received", "inputs", "sent", "workspace"),
    "buffers": ("buffers", "gradient buckets"),
}


def group_parts(parts: Mapping[str, int]) -> dict[str, int]:
    """Bytes of each group, in the order of `MEMORY_GROUPS`; parts that no group names are left out."""
    return {group: sum(parts.get(part, 0) for part in names) for group, names in MEMORY_GROUPS.items()}
