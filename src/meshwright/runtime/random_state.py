"""Random numbers that do not depend on the plan: one seed per (run, step, microbatch), passed from stage to stage.

A serial loop that calls ``torch.manual_seed(microbatch_seed(run_seed, step, microbatch))`` before each microbatch
draws the same numbers as any plan, whatever its stages, schedule or ranks.
"""

from __future__ import annotations

import torch
from torch._subclasses.fake_tensor import FakeTensor

_MASK = 2**64 - 1


def microbatch_seed(run_seed: int, step: int, microbatch: int) -> int:
    """Return the 63-bit seed of a microbatch; similar arguments give unrelated seeds.

    The mixing function is the finaliser of splitmix64 (Steele, Lea, Flood 2014).
    """
    value = 0
    for part in (run_seed, step, microbatch):
        value = (value + part + 0x9E3779B97F4A7C15) & _MASK
        value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
        value ^= value >> 31
    return value >> 1


def seed_generator(device: torch.device, seed: int) -> None:
    """Seed torch's default generator of the device."""
    if device.type == "cuda":
        torch.cuda.manual_seed(seed)
    else:
        torch.default_generator.manual_seed(seed)


def read_generator(device: torch.device) -> torch.Tensor:
    """Return the state of the device's generator as a uint8 tensor on that device, so that it can be sent."""
    state = torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()
    return torch.empty_like(state, device=device).copy_(state)


def write_generator(device: torch.device, state: torch.Tensor) -> None:
    """Set the device's generator to a state from `read_generator`; fake tensors of a dry run are ignored."""
    if isinstance(state, FakeTensor):
        return
    if device.type == "cuda":
        torch.cuda.set_rng_state(state.cpu(), device)
    else:
        torch.set_rng_state(state)
