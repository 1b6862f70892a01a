"""nn.Module → Graph, and Graph → runnable parts.

`capture_model` traces, describes and checks a model, `check_capture` checks one later; `part` cuts out a runnable
stage; `flatten_batch` orders a batch as the graph's inputs; `differentiate` gives the joint forward-backward graph;
`module_parts` makes a module of a graph that has none, except for ops with a graph inside (`own_graph`);
`capture_calls` makes a graph of single ATen calls.
"""

from meshwright.capture.calls import capture_calls
from meshwright.capture.capture import Captured, capture_model, check_capture, flatten_batch
from meshwright.capture.describe import has_own_graph, own_graph
from meshwright.capture.joint import differentiate
from meshwright.capture.module_parts import part, rebuild, strides_of

__all__ = [
    "Captured",
    "capture_calls",
    "capture_model",
    "check_capture",
    "differentiate",
    "flatten_batch",
    "has_own_graph",
    "own_graph",
    "part",
    "rebuild",
    "strides_of",
]
