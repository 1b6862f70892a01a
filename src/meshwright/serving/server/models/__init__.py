"""What a worker of a server computes: batches of a model, or the time that they would take.

runnable       what can be run: names, types and shapes of a sample's tensors, and batches of them
emulated       sleeps as long as batches would take, and answers what can be checked
batches        a batch of several slabs: gather, run, scatter; samples that fail are found
warming        what batches of each size take
opening        from a deployment's model to one of them

torch_model    a torch model from a reference; this and what follows loads torch, nothing else of `serving` does
sources        references: zoo names, shape files, configurations, own functions, exported programs
programs       exported programs (.pt2)
hooks          own functions before and behind a model
matching       which of its tensors are a model's outputs
tensors        tensors of a sample: their names, and how they cross to numpy and back
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
