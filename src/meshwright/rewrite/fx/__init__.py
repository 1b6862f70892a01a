"""torch.fx graphs in and out: the only part of rewriting that depends on torch's operators.

`read_captured` turns a captured model into terms, `write_graph` terms into a module.
"""

from meshwright.rewrite.fx.captured import read_captured
from meshwright.rewrite.fx.reading import ReadGraph, read_graph
from meshwright.rewrite.fx.write import write_graph

__all__ = ["ReadGraph", "read_captured", "read_graph", "write_graph"]
