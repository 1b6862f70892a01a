"""Instructions that the simulator knows and the executor does not, or that stand in a stream that is not theirs."""

from __future__ import annotations

from typing import assert_never

from meshwright.spec.errors import ProgramError
from meshwright.spec.instructions import (
    AllGather,
    AllReduce,
    Backward,
    BackwardInput,
    BackwardWeight,
    Drop,
    Exchange,
    Forward,
    Instruction,
    Load,
    Merge,
    OptimizerStep,
    Pull,
    Push,
    Receive,
    ReduceScatter,
    Send,
    Stash,
    Sum,
)
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

# What stands in streams beside that of the computations.
Beside = Send | Receive | Exchange | Load | Offloading


def wrong_in_compute(instruction: Beside) -> ProgramError:
    """The error for an instruction in a compute stream that stands beside it."""
    return ProgramError(
        f"{instruction} stands in a compute stream; communication, loading and what the host does have their own "
        "streams."
    )


def wrong_beside(instruction: Instruction) -> ProgramError:
    """The error for an instruction beside the compute stream that the executor does not issue."""
    match instruction:
        case Push() | Sum() | Pull():
            return ProgramError(
                f"{instruction} belongs to parameter servers; the runtime sums by all-reduces. Simulate this "
                "program, or plan without `servers` to run."
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
            return ProgramError(f"{instruction} stands in a stream that is not its own. Build the program again.")
        case _:
            assert_never(instruction)
