"""The memory of devices that do not hold all models: what is there, and what is being copied there.

A device copies beside what it computes, one model after the other, each in its time. To run a batch on a device
without its model, or to load more than there is room for, is an error of the policy.
"""

from __future__ import annotations

import math

import numpy as np

from meshwright.compiled import compiled
from meshwright.serving.policies.clockwork import Clockwork
from meshwright.serving.policies.hooks import Policy
from meshwright.serving.policies.pool import LOAD, NEVER, Ints
from meshwright.serving.policies.residency import PARTS, Weights
from meshwright.spec import Deployment, ServingError
from meshwright.spec.units import format_bytes

# What a device has of its memory in use, and when it has copied all that it was told to.
_HELD, _COPIED_AT = range(2)
# Sums of sizes that fill a device to the byte do so in parts of it, too.
_ROUNDING = 1 - 1e-9
NO_WEIGHTS = Weights(np.zeros(0, np.int64), np.zeros(0, np.int64))


def find_weights(deployment: Deployment, policy: Policy) -> Weights:
    """Sizes and times of models, copies one by one, if they do not all fit; `NO_WEIGHTS` if they do, or are in groups.

    Raises ServingError for a policy that cannot load them, and for models of which nobody knows how long that takes.
    """
    names, memory = [model.name for model in deployment.models], deployment.device_memory
    if deployment.groups or memory is None or deployment.has_room(names):
        return NO_WEIGHTS
    whole = format_bytes(deployment.memory_of(names))
    takes = f"All models together take {whole}, and a device has {format_bytes(memory)}."
    if not isinstance(policy, Clockwork):
        raise ServingError(
            f"{takes} Say which devices hold which of them (groups), let `simulate --place best` find out, or take "
            "policy clockwork, which loads models as they are asked for."
        )
    parts, loads = list[int](), list[int]()
    for model in deployment.models:
        if model.load is None:
            raise ServingError(
                f"{takes} Policy clockwork loads models as they are asked for, but {model.name!r} has no load. Say how "
                'long its weights take to a device, as load = "10 ms".'
            )
        parts += [math.ceil((model.memory or 0.0) / memory * PARTS * _ROUNDING)] * model.copies
        loads += [round(model.load * 1e9)] * model.copies
    return Weights(np.array(parts, np.int64), np.array(loads, np.int64))


@compiled
def move_weights(
    weights: Weights, there_at: Ints, memory: Ints, kind: int, device: int, model: int, begin: int
) -> None:
    """Copy a model to a device, or let it leave; ``there_at`` is devices × models, ``memory`` a row of each device."""
    is_there = there_at[device, model] < NEVER
    if kind == LOAD:
        if is_there or memory[device, _HELD] + weights.memory[model] > PARTS:
            raise RuntimeError("The policy loads a model that is on the device already, or that it has no room for.")
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
    """A device has come up."""
    if len(there_at) > 0:
        there_at[device, :] = NEVER
        memory[device, :] = 0
