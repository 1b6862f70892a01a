"""The models of a worker: torch models, and emulated models, which only wait for the time of a batch.

runnable       the interface: names, types and shapes of a sample's tensors, and running of batches
emulated       a model that sleeps for the time of a batch, and returns answers that can be checked
batches        a batch from several slabs: gather, run, scatter; isolate samples that fail
warming        measure the time of batches of each size
opening        open a deployment's model, torch or emulated

torch_model    a torch model from a reference; in `serving`, only this module and the following ones load torch
sources        references: zoo names, shape files, configurations, user functions, exported programs
programs       exported programs (.pt2)
hooks          user functions before and after a model
matching       match a model's tensors to its outputs
tensors        tensors of a sample: their names, and conversion to and from numpy
"""

from meshwright.serving.server.models.batches import SampleFailures, run_batch
from meshwright.serving.server.models.emulated import EmulatedModel, echo
from meshwright.serving.server.models.opening import open_model
from meshwright.serving.server.models.runnable import DeviceLost, Runnable
from meshwright.serving.server.models.warming import warm_up

__all__ = [
    "DeviceLost",
    "EmulatedModel",
    "Runnable",
    "SampleFailures",
    "echo",
    "open_model",
    "run_batch",
    "warm_up",
]
