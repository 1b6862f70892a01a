"""Write a graph that the search chose as an fx graph, and check that it computes the same as the model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from meshwright.rewrite.fx.captured import whole_graph
from meshwright.rewrite.fx.check import check_close, check_equal
from meshwright.rewrite.fx.fold import fold_constants
from meshwright.rewrite.fx.write import write_graph

if TYPE_CHECKING:
    import torch
    from torch import fx

    from meshwright.capture import Captured
    from meshwright.rewrite.fx.reading import ReadGraph
    from meshwright.rewrite.search.graph_search import FoundGraph


def write_found(found: FoundGraph, source: ReadGraph, *, training: bool) -> fx.GraphModule:
    """Return the graph as a module whose constants are already computed.

    ``source``: the model's graph. In inference (``training`` False) weights count as constants.
    """
    terms, effects, held = fold_constants(found.terms, source, found.effects, frozen=not training)
    return write_graph(terms, source, effects=effects, held=held)


def check_found(
    found: FoundGraph,
    graph: fx.GraphModule,
    source: ReadGraph,
    captured: Captured,
    tensors: tuple[torch.Tensor, ...],
    *,
    training: bool,
) -> float:
    """Compare a written graph with the model on a batch; return the largest relative difference in float64.

    ``tensors``: the batch, flattened. In training, gradients are compared, too. Raises RewriteError if the graph and
    the model differ by more than rounding.
    """
    original = write_graph(source.terms, source, effects=source.effects)
    # Folded constants are rounded to the model's dtype: what is compared in float64 computes them again.
    worst = check_equal(original, write_graph(found.terms, source, effects=found.effects), tensors, training=training)
    # Also compare with the model in torch: an error in reading would be in both graphs.
    check_close(whole_graph(captured, tensors), graph, tensors, training=training)
    return worst
