"""The saved tensors of a compiled unit: torch's choice, except for masks of the unit's outputs.

A unit that ends with a ReLU could save a mask of one byte per element, which torch prefers to the output of four bytes.
But the output is saved anyway, by the unit that reads it; and on CPUs inductor writes such masks slowly: a tiny
residual network trained at half the speed (2026-11-28, two cores).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.custom_graph_pass import CustomPartitionerFn
from torch.utils.checkpoint import CheckpointPolicy

_COMPARISONS = (torch.ops.aten.le.Scalar, torch.ops.aten.lt.Scalar, torch.ops.aten.ge.Scalar, torch.ops.aten.gt.Scalar)


class UnitPartitioner(CustomPartitionerFn):
    """Cuts the joint graph of a unit into its forward and its backward."""

    def __call__(
        self, gm: fx.GraphModule, joint_inputs: Sequence[object], **kwargs: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        """As `min_cut_rematerialization_partition`."""
        (made,) = next(node for node in gm.graph.nodes if node.op == "output").args
        handed_on = set(made[: kwargs["num_fwd_outputs"]])
        for node in gm.graph.nodes:
            if node.target in _COMPARISONS and node.args[0] in handed_on:
                node.meta["recompute"] = CheckpointPolicy.PREFER_RECOMPUTE
        return min_cut_rematerialization_partition(gm, joint_inputs, **kwargs)

    def uuid(self) -> str:
        """The key for the cache of compiled code; it changes when this module changes."""
        return "meshwright.runtime.partitioning/1"
