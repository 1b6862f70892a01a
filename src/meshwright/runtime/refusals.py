"""Instructions that the simulator knows and the executor does not, or that stand in a stream that is not theirs."""

from __future__ import annotations

from meshwright.spec.errors import ProgramError
from meshwright.spec.instructions import AllGather, Instruction, Load, Pull, Push, ReduceScatter, Sum
from meshwright.spec.offload_instructions import CopyDown, CopyUp, HostStep, ReadStates, WriteStates


def wrong_in_compute(instruction: Instruction) -> ProgramError:
    """The error for an instruction in a compute stream that is no computation."""
    return ProgramError(
        f"{instruction} stands in a compute stream; communication, loading and what the host does have their own "
        "streams."
    )


def wrong_beside(instruction: Instruction) -> ProgramError:
    """The error for an instruction beside the compute stream that the executor does not issue."""
    match instruction:
        case ReduceScatter() | AllGather():
            return ProgramError(
                f"{instruction} belongs to an optimizer that is sharded; the runtime sums whole buckets. Simulate "
                "this program, or plan with `zero` 0 to run."
            )
        case Load():
            return ProgramError(
                f"{instruction} belongs to an input pipeline; the runtime is given its inputs. Simulate this "
                "program, or plan without a loader to run."
            )
        case CopyDown() | HostStep() | CopyUp() | ReadStates() | WriteStates():
            return ProgramError(
                f"{instruction} belongs to an optimizer on the host; the runtime steps on the device. Simulate "
                "this program, or plan without `offload` to run."
            )
        case Push() | Sum() | Pull():
            return ProgramError(
                f"{instruction} belongs to parameter servers; the runtime sums by all-reduces. Simulate this "
                "program, or plan without `servers` to run."
            )
        case _:
            return ProgramError(f"{instruction} stands in a communication stream; it belongs to the compute stream.")
