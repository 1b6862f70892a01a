"""Conversion between torch.fx graphs and terms; other parts of rewriting do not depend on ATen operators.

`read_captured` turns a captured model into terms; `write_graph` turns terms into a module.
"""

from meshwright.rewrite.fx.captured import read_captured
from meshwright.rewrite.fx.reading import ReadGraph, read_graph
from meshwright.rewrite.fx.write import write_graph

__all__ = ["ReadGraph", "read_captured", "read_graph", "write_graph"]
