"""Errors for instructions that the executor does not support, or that are in the wrong stream of a program."""

from __future__ import annotations

from typing import assert_never

from meshwright.spec import (
    AllGather,
    AllReduce,
    Backward,
    BackwardInput,
    BackwardWeight,
    Drop,
    Forward,
    Instruction,
    Load,
    Merge,
    OptimizerStep,
    ProgramError,
    Pull,
    Push,
    Receive,
    ReduceScatter,
    Send,
    Stash,
    Sum,
)
from meshwright.spec.instructions import Exchange
from meshwright.spec.offload_instructions import (
    CopyDown,
    CopyUp,
    HostStep,
    Offloading,
    ReadStates,
    SavedDown,
    SavedUp,
    WriteStates,
)

# Instructions in streams other than the compute stream.
Beside = Send | Receive | Exchange | Load | Offloading


def wrong_in_compute(instruction: Beside) -> ProgramError:
    """Return the error for an instruction that is in a compute stream but belongs in another."""
    return ProgramError(
        f"{instruction} is in a compute stream, but communication, loading and offload have their own streams. Build "
        "the program again."
    )


def wrong_beside(instruction: Instruction) -> ProgramError:
    """Return the error for an instruction outside the compute stream that the executor does not issue."""
    match instruction:
        case Push() | Sum() | Pull():
            return ProgramError(
                f"{instruction} is for parameter servers, which can only be simulated; the runtime sums gradients by "
                "all-reduce. Plan without `servers` to run."
            )
        case (
            Forward()
            | Backward()
            | BackwardInput()
            | BackwardWeight()
            | OptimizerStep()
            | Stash()
            | Drop()
            | Merge()
            | ReduceScatter()
            | AllGather()
            | Load()
            | Send()
            | Receive()
            | AllReduce()
            | CopyDown()
            | HostStep()
            | CopyUp()
            | ReadStates()
            | WriteStates()
            | SavedDown()
            | SavedUp()
        ):
            return ProgramError(f"{instruction} is in a stream where it is not allowed. Build the program again.")
        case _:
            assert_never(instruction)
