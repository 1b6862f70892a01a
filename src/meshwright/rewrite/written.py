"""Write a chosen graph as an fx graph with the same numerical behaviour as the model."""

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
    """Return the graph, its constants computed beforehand; frozen weights are constants."""
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
    """Return the largest relative difference in float64. Raises RewriteError if the graph is not equal to the model."""
    original = write_graph(source.terms, source, effects=source.effects)
    # Folded constants are rounded to the model's dtype: what is compared in float64 computes them again.
    worst = check_equal(original, write_graph(found.terms, source, effects=found.effects), tensors, training=training)
    # Also compare with the model in torch: an error in reading would be in both graphs.
    check_close(whole_graph(captured, tensors), graph, tensors, training=training)
    return worst
