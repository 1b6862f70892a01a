"""Trace: a captured model as one flat fx graph over the user's own names.

The graph has placeholders for the batch's tensors, `get_attr` nodes whose targets are the user's names of parameters
and buffers (tied ones once), `call_function` nodes, and an output tuple. Node metadata is reduced to ``module`` (path
of the module that ran the op; "" is the model itself) and ``where`` ("file:line" in the user's code).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

if TYPE_CHECKING:
    from collections.abc import Sequence

    from meshwright.capture.inputs import BatchLayout
    from meshwright.capture.values import ValueLooks

LOSS_MODULE = "loss"


@dataclass(frozen=True, slots=True)
class Returned:
    """How what is returned is put together: ``leaves`` are numbers of the graph's outputs, or values themselves."""

    spec: pytree.TreeSpec
    leaves: tuple[tuple[bool, Any], ...]

    def rebuild(self, outputs: Sequence[Any]) -> Any:
        """The model's own output of the graph's outputs."""
        leaves = [outputs[value] if is_output else value for is_output, value in self.leaves]
        return pytree.tree_unflatten(leaves, self.spec)


@dataclass(slots=True, kw_only=True)
class FlatTrace:
    """A flat graph with everything that it names.

    ``state`` holds the model's parameters and buffers by their first name in the model's order, ``aliases`` the further
    names of tied ones, ``constants`` tensors made in forward, ``branches`` the subgraphs of `torch.cond` and its like.
    ``values`` are the looks of the example batch; ``batched`` says which of them grow with the batch, of ``batch_size``
    samples in the example. ``returned``: how the model puts the graph's outputs together. ``checkpoint``: a place
    that calls ``torch.utils.checkpoint``, which the graph does not tell.
    """

    graph: fx.Graph
    layout: BatchLayout
    state: dict[str, torch.Tensor]
    aliases: dict[str, tuple[str, ...]]
    persistent: frozenset[str]
    constants: dict[str, torch.Tensor]
    branches: dict[str, fx.GraphModule]
    values: tuple[ValueLooks, ...]
    batched: tuple[bool, ...]
    batch_size: int
    training: bool
    has_loss: bool
    returned: Returned | None = None
    checkpoint: str = ""
    facts: dict[Any, Any] = field(default_factory=dict)

    @property
    def fixed(self) -> bool:
        """Whether the batch size is baked in."""
        return not any(self.batched)

    def attribute(self, name: str) -> Any:
        """What a `get_attr` node of the graph stands for."""
        for table in (self.state, self.constants, self.branches):
            if name in table:
                return table[name]
        raise KeyError(name)


def target_of(node: fx.Node) -> Any:
    """What the node calls or names (fx types it too widely to be of use)."""
    return node.target


def args_of(node: fx.Node) -> Any:
    """The node's positional arguments (fx types them too widely to be of use)."""
    return node.args
