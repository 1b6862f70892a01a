"""The simulated memory of devices that do not hold all models: which models they hold, and which are being copied.

A device copies models while it computes, one after the other. If a policy runs a batch on a device without its model,
or loads more than fits, RuntimeError is raised.
"""

from __future__ import annotations

import math

import numpy as np

from meshwright.compiled import compiled
from meshwright.serving.policies.clockwork import Clockwork
from meshwright.serving.policies.hooks import Policy
from meshwright.serving.policies.pool import LOAD, NEVER, Ints
from meshwright.serving.policies.residency import PARTS, Weights
from meshwright.spec import Deployment, ServingError, format_bytes

# Used memory of a device, and when all copies requested so far are complete.
_HELD, _COPIED_AT = range(2)
# Keeps sizes that fill a device to the byte from exceeding it when rounded up to parts.
_ROUNDING = 1 - 1e-9
NO_WEIGHTS = Weights(np.zeros(0, np.int64), np.zeros(0, np.int64))


def find_weights(deployment: Deployment, policy: Policy) -> Weights:
    """Return sizes and load times of all models, counting each copy, if a device cannot hold all of them.

    Returns `NO_WEIGHTS` if all models fit, or if the deployment has groups. Raises ServingError for a policy that
    cannot load models, and for a model without a load time.
    """
    names, memory = [model.name for model in deployment.models], deployment.device_memory
    if deployment.groups or memory is None or deployment.has_room(names):
        return NO_WEIGHTS
    whole = format_bytes(deployment.memory_of(names))
    takes = f"All models together take {whole}, and a device has {format_bytes(memory)}."
    if not isinstance(policy, Clockwork):
        raise ServingError(
            f"{takes} Assign them to devices (groups), let `simulate --place best` find groups, or choose policy "
            "clockwork, which loads models on demand."
        )
    parts, loads = list[int](), list[int]()
    for model in deployment.models:
        if model.load is None:
            raise ServingError(
                f"{takes} Policy clockwork loads models on demand, but {model.name!r} has no load. Give the time that "
                'copying its weights to a device takes, as load = "10 ms".'
            )
        parts += [math.ceil((model.memory or 0.0) / memory * PARTS * _ROUNDING)] * model.copies
        loads += [round(model.load * 1e9)] * model.copies
    return Weights(np.array(parts, np.int64), np.array(loads, np.int64))


@compiled
def move_weights(
    weights: Weights, there_at: Ints, memory: Ints, kind: int, device: int, model: int, begin: int
) -> None:
    """Copy a model to a device, or remove it, as a decision of ``kind`` LOAD or UNLOAD orders.

    ``there_at`` is an array (devices, models), ``memory`` has a row per device (`DeviceBehaviour`). Raises RuntimeError
    if the model is on the device already, or does not fit.
    """
    is_there = there_at[device, model] < NEVER
    if kind == LOAD:
        if is_there:
            raise RuntimeError("The policy loads a model onto a device that has it. Load only missing models.")
        if memory[device, _HELD] + weights.memory[model] > PARTS:
            raise RuntimeError(
                "The policy loads a model for which the device has too little free memory. Unload another model first."
            )
        memory[device, _HELD] += weights.memory[model]
        memory[device, _COPIED_AT] = max(begin, memory[device, _COPIED_AT]) + weights.load[model]
        there_at[device, model] = memory[device, _COPIED_AT]
    elif is_there:
        memory[device, _HELD] -= weights.memory[model]
        there_at[device, model] = NEVER


@compiled
def check_there(there_at: Ints, device: int, model: int, begin: int) -> None:
    """Raise RuntimeError if a device does not hold a model when its batch begins."""
    if there_at[device, model] > begin:
        raise RuntimeError("The policy runs a batch on a device that does not hold its model.")


@compiled
def empty_memory(there_at: Ints, memory: Ints, device: int) -> None:
    """Empty the memory of a device that has come up."""
    if len(there_at) > 0:
        there_at[device, :] = NEVER
        memory[device, :] = 0
