"""torch.fx graphs in and out: the only part of rewriting that knows torch's operators.

`read_captured` makes terms of a captured model, `write_graph` a module of terms.
"""

from meshwright.rewrite.fx.captured import read_captured
from meshwright.rewrite.fx.read import ReadGraph, read_graph
from meshwright.rewrite.fx.write import write_graph

__all__ = ["ReadGraph", "read_captured", "read_graph", "write_graph"]
