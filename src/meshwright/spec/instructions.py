"""What a rank can do: one typed class per kind of instruction, and the name that people read.

The classes are the row views of a `Program`, whose columns hold an `Opcode` for each of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Literal

Payload = Literal["activation", "gradient"]


class Opcode(IntEnum):
    """What an instruction does; one per typed class."""

    FORWARD = 0
    BACKWARD = 1
    SEND_ACTIVATION = 2
    RECEIVE_ACTIVATION = 3
    SEND_GRADIENT = 4
    RECEIVE_GRADIENT = 5
    ALL_REDUCE = 6
    OPTIMIZER_STEP = 7
    BACKWARD_INPUT = 8
    BACKWARD_WEIGHT = 9


# What occupies a device and belongs to a microbatch.
COMPUTATIONS = (Opcode.FORWARD, Opcode.BACKWARD, Opcode.BACKWARD_INPUT, Opcode.BACKWARD_WEIGHT)


@dataclass(frozen=True, slots=True, kw_only=True)
class Forward:
    """Run the stage's forward on one microbatch with weights of ``version`` and keep what the backward needs.

    Occupies the device.
    """

    stage: int
    microbatch: int
    version: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Backward:
    """Run the stage's backward of one microbatch, add to the gradients, release what was kept.

    Raises the marks of ready buckets. Occupies the device.
    """

    stage: int
    microbatch: int
    version: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class BackwardInput:
    """The part of a backward that others wait for: the gradients of what the stage received.

    Keeps what `BackwardWeight` needs. Occupies the device.
    """

    stage: int
    microbatch: int
    version: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class BackwardWeight:
    """The rest of a backward: add to the gradients of the stage's parameters, release what was kept.

    Raises the marks of ready buckets. Occupies the device.
    """

    stage: int
    microbatch: int
    version: int = 0


Computation = Forward | Backward | BackwardInput | BackwardWeight


@dataclass(frozen=True, slots=True, kw_only=True)
class Send:
    """Send one microbatch's values (or their gradients) to stage ``peer``. Does not block the device."""

    stage: int
    microbatch: int
    peer: int
    payload: Payload
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Receive:
    """Receive what stage ``peer`` sends for one microbatch.

    Ends when the bytes are there; does not block the device.
    """

    stage: int
    microbatch: int
    peer: int
    payload: Payload
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AllReduce:
    """Sum one bucket of gradients over the ranks of its group. Starts when the last member arrives."""

    stage: int
    bucket: int
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerStep:
    """Update the stage's parameters from their summed gradients and clear these.

    Makes weight version ``version + 1``.
    """

    stage: int
    version: int = 0


Instruction = Computation | Send | Receive | AllReduce | OptimizerStep


def instruction_name(opcode: int, stage: int, microbatch: int, peer: int) -> str:
    """The span name of an instruction in every timeline and picture.

    ``F0.3``, ``B1.0``, ``I1.0`` and ``W1.0`` (a backward in two parts), ``send 0→1.3``, ``all-reduce 0 #2``.
    """
    match Opcode(opcode):
        case Opcode.FORWARD:
            return f"F{stage}.{microbatch}"
        case Opcode.BACKWARD:
            return f"B{stage}.{microbatch}"
        case Opcode.BACKWARD_INPUT:
            return f"I{stage}.{microbatch}"
        case Opcode.BACKWARD_WEIGHT:
            return f"W{stage}.{microbatch}"
        case Opcode.SEND_ACTIVATION:
            return f"send {stage}→{peer}.{microbatch}"
        case Opcode.RECEIVE_ACTIVATION:
            return f"receive {peer}→{stage}.{microbatch}"
        case Opcode.SEND_GRADIENT:
            return f"send gradient {stage}→{peer}.{microbatch}"
        case Opcode.RECEIVE_GRADIENT:
            return f"receive gradient {peer}→{stage}.{microbatch}"
        case Opcode.ALL_REDUCE:
            return f"all-reduce {stage} #{peer}"
        case Opcode.OPTIMIZER_STEP:
            return f"optimizer {stage}"
