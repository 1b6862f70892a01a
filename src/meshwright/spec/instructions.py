"""What a rank can do: one typed class per kind of instruction, and the name that people read.

The classes are the row views of a `Program`, whose columns hold an `Opcode` for each of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Literal, assert_never

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
    STASH = 10
    DROP = 11
    MERGE = 12
    REDUCE_SCATTER = 13
    ALL_GATHER = 14
    PUSH = 15
    SUM = 16
    PULL = 17
    LOAD = 18
    COPY_DOWN = 19
    HOST_STEP = 20
    COPY_UP = 21
    READ_STATES = 22
    WRITE_STATES = 23
    SAVED_DOWN = 24
    SAVED_UP = 25


# What occupies a device and belongs to a microbatch.
COMPUTATIONS = (Opcode.FORWARD, Opcode.BACKWARD, Opcode.BACKWARD_INPUT, Opcode.BACKWARD_WEIGHT)
# What makes a new version of a stage's weights.
UPDATES = (Opcode.OPTIMIZER_STEP, Opcode.MERGE)
# In what all ranks of a group take part.
COLLECTIVES = (Opcode.ALL_REDUCE, Opcode.REDUCE_SCATTER, Opcode.ALL_GATHER)
# Those that sum gradients.
SUMS = (Opcode.ALL_REDUCE, Opcode.REDUCE_SCATTER)
# Between ranks and parameter servers.
SERVING = (Opcode.PUSH, Opcode.SUM, Opcode.PULL)
# Copies of what is kept for backwards, layer by layer.
SAVED_COPIES = (Opcode.SAVED_DOWN, Opcode.SAVED_UP)
# What a rank does beside its device where something is kept away from it.
OFFLOADING = (
    Opcode.COPY_DOWN,
    Opcode.HOST_STEP,
    Opcode.COPY_UP,
    Opcode.READ_STATES,
    Opcode.WRITE_STATES,
    *SAVED_COPIES,
)
# What keeps and gives up copies of weights that were updated while microbatches that began with them are under way.
STASHING = (Opcode.STASH, Opcode.DROP)


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
class ReduceScatter:
    """Sum one bucket of gradients; each rank of the group keeps its part of the sums. Starts with the last member.

    ``num_bytes`` are those of the whole bucket.
    """

    stage: int
    bucket: int
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AllGather:
    """Give every rank of the group the parts of one bucket that the others have. Starts with the last member.

    ``num_bytes`` are those of the whole bucket.
    """

    stage: int
    bucket: int
    num_bytes: int


Collective = AllReduce | ReduceScatter | AllGather


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerStep:
    """Update the stage's parameters from their summed gradients and clear these.

    Makes weight version ``version + 1``.
    """

    stage: int
    version: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Stash:
    """Keep a copy of the stage's weights of ``version``, which are about to be updated: microbatches need them still.

    Occupies the device.
    """

    stage: int
    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Drop:
    """Give up the copy of ``version``: the last microbatch that needs it is done."""

    stage: int
    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Merge:
    """Add what the other replicas changed in a wave of minibatches, the sum less the own share, to the stage's weights.

    Makes weight version ``version + 1``. Occupies the device.
    """

    stage: int
    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Push:
    """Send one bucket of gradients to the server that sums it; its group is (rank, server). Does not block the device.

    A server needs no receive: what sums waits for the pushes.
    """

    stage: int
    bucket: int
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Sum:
    """On a server: add up what the ranks of the group have pushed of one bucket."""

    stage: int
    bucket: int
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Pull:
    """Send the sum of one bucket from its server to a rank; its group is (server, rank)."""

    stage: int
    bucket: int
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Make the inputs of one microbatch, beside what the device does."""

    stage: int
    microbatch: int


Exchange = Collective | Push | Sum | Pull
Instruction = Computation | Send | Receive | Exchange | Offloading | Load | OptimizerStep | Stash | Drop | Merge


_OPCODES: dict[type[Instruction], Opcode] = {
    AllReduce: Opcode.ALL_REDUCE,
    ReduceScatter: Opcode.REDUCE_SCATTER,
    AllGather: Opcode.ALL_GATHER,
    Push: Opcode.PUSH,
    Sum: Opcode.SUM,
    Pull: Opcode.PULL,
    OptimizerStep: Opcode.OPTIMIZER_STEP,
    Stash: Opcode.STASH,
    Drop: Opcode.DROP,
    Merge: Opcode.MERGE,
    CopyDown: Opcode.COPY_DOWN,
    HostStep: Opcode.HOST_STEP,
    CopyUp: Opcode.COPY_UP,
    ReadStates: Opcode.READ_STATES,
    WriteStates: Opcode.WRITE_STATES,
    SavedDown: Opcode.SAVED_DOWN,
    SavedUp: Opcode.SAVED_UP,
}


def instruction_row(instruction: Instruction) -> tuple[int, int, int, int, int, int]:
    """The columns of an instruction: opcode, stage, microbatch, version, peer, num_bytes; -1 for what it has not."""
    match instruction:
        case Forward():
            return (Opcode.FORWARD, instruction.stage, instruction.microbatch, instruction.version, -1, 0)
        case Backward():
            return (Opcode.BACKWARD, instruction.stage, instruction.microbatch, instruction.version, -1, 0)
        case BackwardInput():
            return (Opcode.BACKWARD_INPUT, instruction.stage, instruction.microbatch, instruction.version, -1, 0)
        case BackwardWeight():
            return (Opcode.BACKWARD_WEIGHT, instruction.stage, instruction.microbatch, instruction.version, -1, 0)
        case Send():
            opcode = Opcode.SEND_ACTIVATION if instruction.payload == "activation" else Opcode.SEND_GRADIENT
            return (opcode, instruction.stage, instruction.microbatch, -1, instruction.peer, instruction.num_bytes)
        case Receive():
            opcode = Opcode.RECEIVE_ACTIVATION if instruction.payload == "activation" else Opcode.RECEIVE_GRADIENT
            return (opcode, instruction.stage, instruction.microbatch, -1, instruction.peer, instruction.num_bytes)
        case AllReduce() | ReduceScatter() | AllGather() | Push() | Sum() | Pull():
            opcode = _OPCODES[type(instruction)]
            return (opcode, instruction.stage, -1, -1, instruction.bucket, instruction.num_bytes)
        case CopyDown() | HostStep() | CopyUp() | ReadStates() | WriteStates():
            return (_OPCODES[type(instruction)], instruction.stage, -1, -1, instruction.piece, instruction.num_bytes)
        case SavedDown() | SavedUp():
            opcode = _OPCODES[type(instruction)]
            return (
                opcode,
                instruction.stage,
                instruction.microbatch,
                -1,
                instruction.layer,
                instruction.num_bytes,
            )
        case Load():
            return (Opcode.LOAD, instruction.stage, instruction.microbatch, -1, -1, 0)
        case OptimizerStep() | Stash() | Drop() | Merge():
            return (_OPCODES[type(instruction)], instruction.stage, -1, instruction.version, -1, 0)
        case _:
            assert_never(instruction)


_NAMES: dict[Opcode, str] = {
    Opcode.FORWARD: "F{stage}.{microbatch}",
    Opcode.BACKWARD: "B{stage}.{microbatch}",
    Opcode.BACKWARD_INPUT: "I{stage}.{microbatch}",
    Opcode.BACKWARD_WEIGHT: "W{stage}.{microbatch}",
    Opcode.SEND_ACTIVATION: "send {stage}→{peer}.{microbatch}",
    Opcode.RECEIVE_ACTIVATION: "receive {peer}→{stage}.{microbatch}",
    Opcode.SEND_GRADIENT: "send gradient {stage}→{peer}.{microbatch}",
    Opcode.RECEIVE_GRADIENT: "receive gradient {peer}→{stage}.{microbatch}",
    Opcode.ALL_REDUCE: "all-reduce {stage} #{peer}",
    Opcode.REDUCE_SCATTER: "reduce-scatter {stage} #{peer}",
    Opcode.ALL_GATHER: "all-gather {stage} #{peer}",
    Opcode.PUSH: "push {stage} #{peer}",
    Opcode.SUM: "sum {stage} #{peer}",
    Opcode.PULL: "pull {stage} #{peer}",
    Opcode.LOAD: "load {microbatch}",
    Opcode.OPTIMIZER_STEP: "optimizer {stage}",
    Opcode.STASH: "stash {stage}",
    Opcode.DROP: "drop {stage}",
    Opcode.MERGE: "merge {stage}",
    Opcode.COPY_DOWN: "copy down {stage} #{peer}",
    Opcode.HOST_STEP: "host step {stage} #{peer}",
    Opcode.COPY_UP: "copy up {stage} #{peer}",
    Opcode.READ_STATES: "read {stage} #{peer}",
    Opcode.WRITE_STATES: "write {stage} #{peer}",
    Opcode.SAVED_DOWN: "saved down {stage}.{microbatch} #{peer}",
    Opcode.SAVED_UP: "saved up {stage}.{microbatch} #{peer}",
}


def instruction_name(opcode: int, stage: int, microbatch: int, peer: int) -> str:
    """The span name of an instruction in every timeline and picture.

    ``F0.3``, ``B1.0``, ``I1.0`` and ``W1.0`` (a backward in two parts), ``send 0→1.3``, ``all-reduce 0 #2``.
    """
    return _NAMES[Opcode(opcode)].format(stage=stage, microbatch=microbatch, peer=peer)
