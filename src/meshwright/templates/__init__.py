"""Graphs of well-known models from their sizes, without torch; they equal the captured graphs of the zoo's models."""

from meshwright.templates.decoders import decoder_graph
from meshwright.templates.residual import residual_graph

__all__ = ["decoder_graph", "residual_graph"]
