"""Capture a PyTorch model as a `Graph`, and cut runnable modules out of it.

* `capture_model` traces a model and compares the graph with it; `check_capture` does the comparison later.
* `part` returns the module that computes given tensors, such as a pipeline stage; `rebuild` makes such a module from a
  graph without a captured model; `own_graph` returns the module of an op that contains a graph (such as `torch.cond`).
* `flatten_batch` returns a batch's tensors in the order of the graph's inputs.
* `differentiate` returns the joint forward-backward graph.
* `capture_calls` makes a graph of separate ATen calls.
* `strides_of` returns the strides of captured tensors.
"""

from meshwright.capture.calls import capture_calls
from meshwright.capture.capture import Captured, capture_model, check_capture, flatten_batch
from meshwright.capture.describe import has_own_graph, own_graph
from meshwright.capture.export import split_batch
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
    "split_batch",
    "strides_of",
]
