"""The instructions of a rank: one dataclass for each kind, and a table of their properties (`INSTRUCTIONS`).

A `Program` stores instructions as columns; row i is an `Opcode` and its numbers. The dataclasses are views of single
rows. `INSTRUCTIONS` lists the class, stream, kind of cost, names and colours of every opcode, for the program builder,
simulator, runtime and reports.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import IntEnum
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

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

if TYPE_CHECKING:
    from collections.abc import Sequence

Payload = Literal["activation", "gradient"]
StreamName = Literal["compute", "send", "receive", "exchange", "serve", "reply", "load", "down", "host", "up", "drives"]
STREAM_NAMES: tuple[StreamName, ...] = get_args(StreamName)
# The kinds of cost of an instruction.
CostKind = Literal[
    "forward",  # a microbatch on the device
    "backward",
    "update",  # a pass over all weights of a stage on the device
    "stash",  # a copy of them
    "message",  # between two ranks
    "collective",  # among all ranks of a group
    "server",  # between ranks and parameter servers
    "load",  # inputs on the host
    "copy",  # between device and host
    "host",  # an optimizer's step on the host
    "drives",  # a read or a write of drives
]


class Opcode(IntEnum):
    """The kind of an instruction, as the column ``opcode`` of a program stores it."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Forward:
    """Run the stage's forward on one microbatch, with weight version ``version``, and save tensors for the backward.

    Occupies the device (the compute stream).
    """

    stage: int
    microbatch: int
    version: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Backward:
    """Run the stage's backward of one microbatch, add to the gradients, and release the saved tensors.

    Raises a mark (`spec.program`) when the gradients of a bucket are ready. Occupies the device. ``version``: that of
    the weights which the microbatch uses, under asynchronous schedules.
    """

    stage: int
    microbatch: int
    version: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class BackwardInput:
    """Compute the first half of a backward: the gradients of the stage's inputs, for which other stages wait.

    Saves tensors for `BackwardWeight`. Occupies the device.
    """

    stage: int
    microbatch: int
    version: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class BackwardWeight:
    """Compute the second half of a backward: add to the parameters' gradients and release the saved tensors.

    Raises a mark (`spec.program`) when the gradients of a bucket are ready. Occupies the device.
    """

    stage: int
    microbatch: int
    version: int = 0


Computation = Forward | Backward | BackwardInput | BackwardWeight


@dataclass(frozen=True, slots=True, kw_only=True)
class Send:
    """Send one microbatch's activations (or their gradients) to stage ``peer``. Does not occupy the device."""

    stage: int
    microbatch: int
    peer: int
    payload: Payload
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Receive:
    """Receive the activations (or gradients) that stage ``peer`` sends for one microbatch.

    Ends when the bytes have arrived. Does not occupy the device.
    """

    stage: int
    microbatch: int
    peer: int
    payload: Payload
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AllReduce:
    """Sum one bucket of gradients over the ranks of its group. Starts when the last rank of the group arrives."""

    stage: int
    bucket: int
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ReduceScatter:
    """Sum one bucket of gradients; each rank of the group keeps its shard. Starts when the last rank arrives.

    ``num_bytes`` are those of the whole bucket.
    """

    stage: int
    bucket: int
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AllGather:
    """Gather the shards of one bucket from all ranks of the group on every rank. Starts when the last rank arrives.

    ``num_bytes`` are those of the whole bucket.
    """

    stage: int
    bucket: int
    num_bytes: int


Collective = AllReduce | ReduceScatter | AllGather


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerStep:
    """Update the stage's parameters from their summed gradients, and clear the gradients.

    Creates weight version ``version + 1``. Occupies the device.
    """

    stage: int
    version: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Stash:
    """Copy the stage's weights of version ``version`` before they are updated, for microbatches that still need them.

    Occupies the device.
    """

    stage: int
    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Drop:
    """Free the copy of weight version ``version`` (`Stash`) after the last microbatch that needs it."""

    stage: int
    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Merge:
    """Add the other replicas' weight changes of a wave of minibatches (hetpipe) to the stage's weights.

    These are the sum over all replicas minus the rank's own change. Creates weight version ``version + 1``. Occupies
    the device.
    """

    stage: int
    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Push:
    """Send one bucket of gradients to the parameter server that sums it. The instruction's group is (rank, server).

    A server has no receive instruction: its `Sum` waits for the pushes. Does not occupy the device.
    """

    stage: int
    bucket: int
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Sum:
    """Add, on a parameter server, the gradients of one bucket that the ranks of the group have pushed."""

    stage: int
    bucket: int
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Pull:
    """Send the sum of one bucket from its parameter server to a rank. The instruction's group is (server, rank)."""

    stage: int
    bucket: int
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Load the inputs of one microbatch on the host, in parallel with the device (`Loader`)."""

    stage: int
    microbatch: int


Exchange = Collective | Push | Sum | Pull
Instruction = Computation | Send | Receive | Exchange | Offloading | Load | OptimizerStep | Stash | Drop | Merge


class InstructionSpec(NamedTuple):
    """The properties that all instructions of one opcode share.

    ``view`` is the dataclass of the instruction, ``payload`` the content of a send or receive. ``stream`` is the stream
    in which it runs, ``kind`` its kind of cost. ``name`` is the pattern of a span's name in timelines, ``label`` the
    name of such instructions in legends. ``colour`` is (colour in pictures, colour in the terminal); each is empty if
    the instruction is not shown there.
    """

    view: type[Instruction]
    stream: StreamName
    kind: CostKind
    name: str
    label: str
    colour: tuple[str, str] = ("", "")
    payload: Payload | None = None


INSTRUCTIONS: dict[Opcode, InstructionSpec] = {
    Opcode.FORWARD: InstructionSpec(
        Forward, "compute", "forward", "F{stage}.{microbatch}", "forwards", ("#9fc3e6", "blue")
    ),
    Opcode.BACKWARD: InstructionSpec(
        Backward, "compute", "backward", "B{stage}.{microbatch}", "backwards", ("#a9d3b0", "green")
    ),
    Opcode.BACKWARD_INPUT: InstructionSpec(
        BackwardInput, "compute", "backward", "I{stage}.{microbatch}", "gradients of inputs", ("#8fc7c9", "cyan")
    ),
    Opcode.BACKWARD_WEIGHT: InstructionSpec(
        BackwardWeight, "compute", "backward", "W{stage}.{microbatch}", "gradients of weights", ("#cfe3a8", "magenta")
    ),
    Opcode.SEND_ACTIVATION: InstructionSpec(
        Send, "send", "message", "send {stage}→{peer}.{microbatch}", "sends of activations", payload="activation"
    ),
    Opcode.RECEIVE_ACTIVATION: InstructionSpec(
        Receive, "receive", "message", "receive {peer}→{stage}.{microbatch}", "receives", payload="activation"
    ),
    Opcode.SEND_GRADIENT: InstructionSpec(
        Send, "send", "message", "send gradient {stage}→{peer}.{microbatch}", "sends of gradients", payload="gradient"
    ),
    Opcode.RECEIVE_GRADIENT: InstructionSpec(
        Receive, "receive", "message", "receive gradient {peer}→{stage}.{microbatch}", "receives", payload="gradient"
    ),
    Opcode.ALL_REDUCE: InstructionSpec(
        AllReduce, "exchange", "collective", "all-reduce {stage} #{peer}", "sums of gradients"
    ),
    Opcode.OPTIMIZER_STEP: InstructionSpec(
        OptimizerStep, "compute", "update", "optimizer {stage}", "optimizer", ("#e8c766", "yellow")
    ),
    Opcode.STASH: InstructionSpec(Stash, "compute", "stash", "stash {stage}", "copies of weights", ("", "white")),
    Opcode.DROP: InstructionSpec(Drop, "compute", "stash", "drop {stage}", "copies of weights"),
    Opcode.MERGE: InstructionSpec(
        Merge, "compute", "update", "merge {stage}", "merges of waves", ("#e6a06f", "yellow")
    ),
    Opcode.REDUCE_SCATTER: InstructionSpec(
        ReduceScatter, "exchange", "collective", "reduce-scatter {stage} #{peer}", "sums of gradients"
    ),
    Opcode.ALL_GATHER: InstructionSpec(
        AllGather, "exchange", "collective", "all-gather {stage} #{peer}", "gathers of parameters"
    ),
    Opcode.PUSH: InstructionSpec(Push, "exchange", "server", "push {stage} #{peer}", "pushes to servers"),
    Opcode.SUM: InstructionSpec(Sum, "serve", "server", "sum {stage} #{peer}", "sums on servers"),
    Opcode.PULL: InstructionSpec(Pull, "reply", "server", "pull {stage} #{peer}", "pulls from servers"),
    Opcode.LOAD: InstructionSpec(Load, "load", "load", "load {microbatch}", "loading of inputs"),
    Opcode.COPY_DOWN: InstructionSpec(CopyDown, "down", "copy", "copy down {stage} #{peer}", "copies to the host"),
    Opcode.HOST_STEP: InstructionSpec(HostStep, "host", "host", "host step {stage} #{peer}", "optimizer on the host"),
    Opcode.COPY_UP: InstructionSpec(CopyUp, "up", "copy", "copy up {stage} #{peer}", "copies from the host"),
    Opcode.READ_STATES: InstructionSpec(ReadStates, "drives", "drives", "read {stage} #{peer}", "reads of drives"),
    Opcode.WRITE_STATES: InstructionSpec(WriteStates, "drives", "drives", "write {stage} #{peer}", "writes to drives"),
    Opcode.SAVED_DOWN: InstructionSpec(
        SavedDown, "down", "copy", "saved down {stage}.{microbatch} #{peer}", "copies of activations to the host"
    ),
    Opcode.SAVED_UP: InstructionSpec(
        SavedUp, "up", "copy", "saved up {stage}.{microbatch} #{peer}", "copies of activations from the host"
    ),
}


def of_kind(*kinds: CostKind) -> tuple[Opcode, ...]:
    """Return the opcodes whose kind of cost is one of ``kinds``, in the order of `Opcode`."""
    return tuple(opcode for opcode in Opcode if INSTRUCTIONS[opcode].kind in kinds)


# Computations of one microbatch, which occupy a device.
COMPUTATIONS = of_kind("forward", "backward")
# Instructions that create a new version of a stage's weights.
UPDATES = of_kind("update")
# Copies of weights that were updated while microbatches that started with them are in flight.
STASHING = of_kind("stash")
# The two ends of a message.
SENDS = (Opcode.SEND_ACTIVATION, Opcode.SEND_GRADIENT)
RECEIVES = (Opcode.RECEIVE_ACTIVATION, Opcode.RECEIVE_GRADIENT)
# Instructions in which all ranks of a group take part.
COLLECTIVES = of_kind("collective")
# Collectives that sum gradients.
SUMS = (Opcode.ALL_REDUCE, Opcode.REDUCE_SCATTER)
# Copies of saved activations, layer by layer.
SAVED_COPIES = (Opcode.SAVED_DOWN, Opcode.SAVED_UP)
# Work of a rank in parallel with its device, for offloaded states.
OFFLOADING = of_kind("copy", "host", "drives")

# The column of each field: stage, microbatch, version, peer, num_bytes; they follow the opcode.
_COLUMNS = {"stage": 1, "microbatch": 2, "version": 3, "peer": 4, "bucket": 4, "piece": 4, "layer": 4, "num_bytes": 5}
_FIELDS = {
    opcode: tuple((item.name, _COLUMNS[item.name]) for item in fields(row.view) if item.name != "payload")
    for opcode, row in INSTRUCTIONS.items()
}
_OPCODES = {(row.view, row.payload): opcode for opcode, row in INSTRUCTIONS.items()}


def instruction_row(instruction: Instruction) -> tuple[int, int, int, int, int, int]:
    """Return the columns of an instruction: (opcode, stage, microbatch, version, peer, num_bytes).

    ``peer`` holds the bucket, piece or layer of instructions that have one. A missing field is -1, missing bytes are 0.
    """
    opcode = _OPCODES[type(instruction), instruction.payload if isinstance(instruction, Send | Receive) else None]
    row = [int(opcode), -1, -1, -1, -1, 0]
    for name, column in _FIELDS[opcode]:
        row[column] = getattr(instruction, name)
    return row[0], row[1], row[2], row[3], row[4], row[5]


def instruction_of(row: Sequence[int]) -> Instruction:
    """Return the instruction whose columns are ``row``, as `instruction_row` returns them."""
    opcode = Opcode(row[0])
    view, payload = INSTRUCTIONS[opcode].view, INSTRUCTIONS[opcode].payload
    said: dict[str, Any] = {name: row[column] for name, column in _FIELDS[opcode]}
    if payload is not None:
        said["payload"] = payload
    return view(**said)


def instruction_name(opcode: int, stage: int, microbatch: int, peer: int) -> str:
    """Return the name of an instruction's span in timelines and pictures.

    Examples: ``F0.3`` (forward of stage 0, microbatch 3), ``B1.0``, ``I1.0`` and ``W1.0`` (the two halves of a
    backward), ``send 0→1.3``, ``all-reduce 0 #2`` (bucket 2 of stage 0).
    """
    return INSTRUCTIONS[Opcode(opcode)].name.format(stage=stage, microbatch=microbatch, peer=peer)
