"""Graphs of well-known models from their sizes, without torch: what capture makes of the same models in the zoo."""

from meshwright.templates.decoders import decoder_graph
from meshwright.templates.residual import residual_graph

__all__ = ["decoder_graph", "residual_graph"]
