"""The executor: runs one rank's instructions of a Program with real tensors on torch.distributed.

One thread issues everything, in the order computed by `rank_program`. Computations run synchronously, transfers and
collectives asynchronously; a computation waits for the transfers that it needs. Order, peers, buckets and microbatches
come from the program, tensors and modules from the captured graph. `session` chooses the sections to run and their
batches. `Messages` holds activations and gradients between stages.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple, assert_never

import torch
import torch.distributed as dist

from meshwright.runtime.agreed import AgreedNumber
from meshwright.runtime.bucket_sums import BucketSums
from meshwright.runtime.gradient_reduction import Exchange
from meshwright.runtime.offload import Hosting
from meshwright.runtime.optimizer_steps import LossScale
from meshwright.runtime.position import Position
from meshwright.runtime.prefetch import Coming
from meshwright.runtime.random_state import microbatch_seed, read_generator, write_generator
from meshwright.runtime.rank_program import Computed, IssuedInstruction, RankProgram, SectionName
from meshwright.runtime.recorder import Recorder
from meshwright.runtime.refused_instructions import Beside, wrong_beside, wrong_in_compute
from meshwright.runtime.stage_module import StageRunner
from meshwright.runtime.transport import Key, Pending, Transport, WireLayout, Work
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
    Receive,
    ReduceScatter,
    Send,
    StageSlice,
    Stash,
)
from meshwright.spec.instructions import Payload

# Gradient sends that may be in flight before the oldest is waited for. The wait only bounds their memory: they are
# received by stages before this one, never by one after it, so it cannot cause a deadlock. Under a user's own schedule
# the replicas of such a stage may wait for each other's next gradients, and the number is not bounded.
_MAX_GRADIENT_SENDS = 4

# Received tensors, by source stage.
Received = dict[int, list[torch.Tensor]]


# Values between two stages of the rank are not sent. Received tensors return to the transport after their last use;
# sent ones are freed as soon as they are known to have arrived.
class Messages:
    """The activations and gradients that the stages of a rank exchange with each other and with other ranks.

    ``layouts``: shape, strides and dtype of each tensor of a transfer, by (source stage, target stage, payload).
    ``bound_gradient_sends``: wait for the oldest gradient send if more than four are in flight.
    """

    def __init__(
        self,
        stages: Mapping[int, StageSlice],
        transport: Transport,
        layouts: Mapping[tuple[int, int, str], tuple[WireLayout, ...]],
        pending: Pending,
        *,
        bound_gradient_sends: bool,
    ) -> None:
        self._stages, self._transport, self._layouts, self._pending = stages, transport, layouts, pending
        self._bound_gradient_sends = bound_gradient_sends
        self._gradient_sends: deque[Key] = deque()
        self._activation_sends: dict[tuple[int, int, int], Key] = {}
        self._activations: defaultdict[tuple[int, int], Received] = defaultdict(dict)
        self._gradients: defaultdict[tuple[int, int], Received] = defaultdict(dict)

    def activations(self, stage: int, microbatch: int) -> Received:
        """Return the activations that a stage has received for a microbatch, by source stage."""
        return self._activations[stage, microbatch]

    def gradients(self, stage: int, microbatch: int) -> Received:
        """Return the gradients that a stage has received for a microbatch, by source stage."""
        return self._gradients[stage, microbatch]

    def send_activations(
        self, key: Key, stage: int, target: int, microbatch: int, tensors: Sequence[torch.Tensor], rank: int
    ) -> list[dist.Work]:
        """Start to send a stage's outputs to the stage ``target`` on ``rank``; return the works."""
        self._activation_sends[stage, target, microbatch] = key
        return self._transport.send(tensors, self._layouts[stage, target, "activation"], rank)

    def send_gradients(
        self, key: Key, stage: int, target: int, tensors: Sequence[torch.Tensor], rank: int
    ) -> list[dist.Work]:
        """Start to send gradients to the earlier stage ``target`` on ``rank``; return the works."""
        self._gradient_sends.append(key)
        if self._bound_gradient_sends and len(self._gradient_sends) > _MAX_GRADIENT_SENDS:
            self._pending.wait(self._gradient_sends.popleft())
        return self._transport.send(tensors, self._layouts[stage, target, "gradient"], rank)

    def receive(self, stage: int, source: int, microbatch: int, payload: Payload, rank: int) -> list[dist.Work]:
        """Start to receive the values that the stage ``source`` on ``rank`` sends; return the works."""
        tensors, works = self._transport.receive(self._layouts[source, stage, payload], rank)
        inbox = self._activations if payload == "activation" else self._gradients
        inbox[stage, microbatch][source] = tensors
        return works

    def hand_on(self, stage: int, target: int, microbatch: int, tensors: Sequence[torch.Tensor]) -> None:
        """Pass a stage's outputs to another stage of this rank."""
        self._activations[target, microbatch][stage] = [value.detach() for value in tensors]

    def hand_back(self, stage: int, microbatch: int, gradients: Mapping[int, list[torch.Tensor]]) -> None:
        """Pass gradients to earlier stages of this rank, and free the send buffers of a microbatch.

        Its gradients came back, so the activations that the stage sent to later stages have arrived.
        """
        for source, values in gradients.items():
            if source in self._stages:
                self._gradients[source, microbatch][stage] = values
        received = self._gradients[stage, microbatch]
        for channel in self._stages[stage].outgoing:
            # The gradient came back, so the sent values have arrived: this wait returns at once and frees the sender's
            # buffers.
            sent = self._activation_sends.pop((stage, channel.target, microbatch), None)
            if sent is not None and channel.target in received:
                self._pending.wait(sent)

    def give_back(self, stage: int, microbatch: int) -> None:
        """Release the values received for a microbatch, after their last use."""
        received = self._gradients.pop((stage, microbatch), {})
        arrived = self._activations.pop((stage, microbatch), {})
        for source, tensors in (*received.items(), *arrived.items()):
            if source not in self._stages:
                self._transport.recycle(tensors)

    def forget(self, stage: int, microbatch: int) -> None:
        """Drop the activations received for a microbatch, without returning their memory to the transport."""
        del self._activations[stage, microbatch]

    def settled(self) -> None:
        """Forget all sends, after they have been waited for."""
        self._gradient_sends.clear()
        self._activation_sends.clear()


Inputs = Sequence[Sequence[torch.Tensor]]
_Issue = Callable[[], Sequence[Work]]


class Output(NamedTuple):
    """An output of the graph for one microbatch: the number of its step, and the detached tensor."""

    step: int
    value: torch.Tensor


# Outputs by tensor id, in the order in which they were made.
Outputs = dict[int, list[Output]]


class Visit(NamedTuple):
    """One run of a section of the program (prologue, body or epilogue); ``place`` numbers these runs in order.

    ``microbatches_on`` and ``versions_on`` are added to the microbatches and weight versions that the section's
    instructions name. ``first_step`` is the step whose batch has microbatch 0.
    """

    section: SectionName
    place: int
    first_step: int
    microbatches_on: int = 0
    versions_on: int = 0


@dataclass(slots=True)
class _Bound:
    """A computation as calls. ``microbatch`` is that of a forward, else -1."""

    item: Computed
    run: Callable[[], None]
    then: list[tuple[IssuedInstruction, _Issue]]
    microbatch: int


class Executor:
    """Runs the sections of a program on one rank.

    ``rank_programs``: the rank's instructions by section. ``runners`` run the rank's ``stages``, in the same order.
    ``layouts``: shape, strides and dtype of each tensor of a transfer, by (source stage, target stage, payload).
    ``optimizer_step(stage)`` updates the stage's parameters and clears their gradients. ``loss_scale`` multiplies each
    microbatch's loss: 1 / number of microbatches for the mean over a step. ``scale`` multiplies it too, to keep
    gradients in the range of float16. ``agreements``: the numbers that all ranks sum, by bucket number. ``hosting``
    runs the offload. `runtime.opening` makes these arguments from a plan.
    """

    def __init__(
        self,
        *,
        rank_programs: Mapping[SectionName, RankProgram],
        num_microbatches: int,
        loss_scale: float,
        stages: Sequence[StageSlice],
        runners: Sequence[StageRunner],
        transport: Transport,
        exchange: Exchange | None,
        layouts: dict[tuple[int, int, str], tuple[WireLayout, ...]],
        optimizer_step: Callable[[int], None],
        recorder: Recorder,
        device: torch.device,
        run_seed: int = 0,
        bound_gradient_sends: bool = True,
        agreements: Mapping[int, AgreedNumber] = MappingProxyType({}),
        scale: LossScale | None = None,
        hosting: Hosting | None = None,
        position: Position | None = None,
    ) -> None:
        self._position = position or Position()
        self._num_microbatches = num_microbatches
        self._loss_scale = loss_scale
        self._stages = {stage.index: stage for stage in stages}
        self._runners = {stage.index: runner for stage, runner in zip(stages, runners, strict=True)}
        self._pending = Pending(recorder, self._position)
        self._messages = Messages(
            self._stages, transport, layouts, self._pending, bound_gradient_sends=bound_gradient_sends
        )
        self._sums = BucketSums(exchange, transport, self._issue_marked, agreements)
        self._scale, self._hosting = scale, hosting
        self._optimizer_step = optimizer_step
        self._recorder = recorder
        self._device = device
        self._run_seed = run_seed
        self._draws_random = any(stage.draws_random for stage in stages)
        self._channels = {(channel.source, channel.target): channel for stage in stages for channel in stage.outgoing}
        self._firsts = {
            name: [(item, self._bind_issue(item)) for item in program.first] for name, program in rank_programs.items()
        }
        self._awaited_late = {
            late.index for program in rank_programs.values() for item in program.computations for late in item.late
        }
        self._computations = {name: self._bind_all(program) for name, program in rank_programs.items()}
        self._rank_programs = rank_programs
        self._visit = Visit("body", 0, 0)
        self._place = 0
        self._reached = 0
        self._batches: dict[int, Mapping[int, Inputs]] = {}
        self._outputs: dict[int, torch.Tensor] = {}
        self._input_gradients: dict[int, list[torch.Tensor]] = {}
        self._made: defaultdict[int, list[Output]] = defaultdict(list)

    def feed(self, batch: int, inputs: Mapping[int, Inputs]) -> None:
        """Add batch number ``batch``: ``inputs[s][m]`` are the graph inputs that stage s reads for its microbatch m."""
        self._batches[batch] = inputs

    def release(self) -> None:
        """Drop the batches that are older than the batch of the last forward."""
        for batch in [batch for batch in self._batches if batch < self._reached // self._num_microbatches]:
            del self._batches[batch]

    def restart(self) -> None:
        """Reset to microbatch 0 and weight version 0, after all instructions have ended."""
        self._batches.clear()
        self._reached = 0
        self._sums.restart()
        for runner in self._runners.values():
            runner.restart()

    def begin(self, visit: Visit) -> None:
        """Start a section, and issue its instructions without dependencies."""
        self._visit, self._place = visit, 0
        self._position.begin(self._rank_programs, visit.section)
        self._pending.begin(visit.place, visit.section)
        if self._hosting is not None:
            for index, work in self._hosting.begin(self._rank_programs[visit.section].beside).items():
                self._pending.add(Key(visit.place, index), [work], self._recorder.now())
        for item, issue in self._firsts[visit.section]:
            self._issue(item, issue)

    def go_on(self, end: int | None = None) -> bool:
        """Continue the section; return whether it is done. Stops before the forward of microbatch ``end``, if given."""
        saved = read_generator(self._device) if self._draws_random else None
        computations = self._computations[self._visit.section]
        on = self._visit.microbatches_on
        while self._place < len(computations):
            bound = computations[self._place]
            if end is not None and bound.microbatch >= 0 and bound.microbatch + on >= end:
                break
            self._run(bound)
            self._place += 1
        if saved is not None:
            write_generator(self._device, saved)
        return self._place == len(computations)

    def settle(self, place: int | None = None) -> None:
        """Wait for all issued works, or for those of runs of sections up to ``place`` (`Visit.place`)."""
        self._pending.settle(place)
        if place is None:
            self._messages.settled()

    def end_step(self) -> None:
        """Wait for all issued works, except for those that the next section waits for itself."""
        self._pending.settle(but=self._awaited_late)
        self._messages.settled()
        if self._scale is not None:
            # A rank without updates changes its scale as all other ranks do.
            self._scale.skips()

    def take_outputs(self) -> Outputs:
        """Return the outputs of the graph that this rank made since the last call."""
        made, self._made = dict(self._made), defaultdict(list)
        return made

    # --- binding: instructions become calls, once
    # -------------------------------------------------------------------------

    def _bind_all(self, program: RankProgram) -> list[_Bound]:
        finals = self._sums.last_backwards(program)
        return [
            _Bound(
                item,
                self._bind(item.instruction, finals.get(item.index, ())),
                [(other, self._bind_issue(other)) for other in item.then],
                item.instruction.microbatch if isinstance(item.instruction, Forward) else -1,
            )
            for item in program.computations
        ]

    def _bind(self, instruction: Instruction, final: Collection[int]) -> Callable[[], None]:
        if isinstance(instruction, Beside):
            raise wrong_in_compute(instruction)
        match instruction:
            case Forward(stage=stage, microbatch=microbatch, version=version):
                return lambda: self._forward(stage, microbatch, version)
            case Backward(stage=stage, microbatch=microbatch):
                return lambda: self._backward(stage, microbatch, final)
            case BackwardInput(stage=stage, microbatch=microbatch):
                return lambda: self._backward_input(stage, microbatch)
            case BackwardWeight(stage=stage, microbatch=microbatch):
                return lambda: self._backward_weight(stage, microbatch, final)
            case OptimizerStep(stage=stage):
                return lambda: self._update(stage)
            case Merge(stage=stage):
                return lambda: self._merge(stage)
            case Stash(stage=stage, version=version):
                return lambda: self._runners[stage].versions.stash(version + self._visit.versions_on)
            case Drop(stage=stage, version=version):
                return lambda: self._runners[stage].versions.drop(version + self._visit.versions_on)
            case _:
                assert_never(instruction)

    def _bind_issue(self, item: IssuedInstruction) -> _Issue:
        instruction = item.instruction
        match instruction:
            case Send():
                return lambda: self._send(item.index, instruction, item.group[1])
            case Receive():
                return lambda: self._receive(instruction, item.group[0])
            case Load():
                return lambda: self._load(instruction)
            case AllReduce(bucket=bucket):
                return lambda: self._sums.sum_up(bucket, item.group, self._before(item))
            case ReduceScatter(bucket=bucket):
                return lambda: self._sums.scatter(bucket, item.group)
            case AllGather(bucket=bucket):
                return lambda: self._sums.gather(bucket, item.group)
            case _:
                raise wrong_beside(instruction)

    # --- execution
    # --------------------------------------------------------------------------------------------------------

    def _run(self, bound: _Bound) -> None:
        item, place = bound.item, self._visit.place
        self._position.instruction = item.index
        self._position.count += 1
        if self._hosting is not None:
            self._complete_gradients(item, place)
        for index in item.awaits:
            self._pending.wait(Key(place, index))
        for late in item.late:
            if self._pending.section_at(place - late.lag) == late.section:
                self._pending.wait(Key(place - late.lag, late.index))
        self._sums.expect(item.marked)
        if self._recorder.active:
            start = self._recorder.now()
            bound.run()
            self._pending.record(Key(place, item.index), start)
        else:
            bound.run()
        if self._hosting is not None:
            self._hosting.readiness.computed(item.index)
        for other, issue in bound.then:
            self._issue(other, issue)

    def _issue(self, item: IssuedInstruction, issue: _Issue) -> None:
        for index in item.awaits:
            self._pending.wait(Key(self._visit.place, index))
        start = self._recorder.now()
        works = issue()
        if self._hosting is not None:
            works = self._hosting.readiness.streams.issued(item.index, works)
        self._pending.add(Key(self._visit.place, item.index), works, start)

    def _complete_gradients(self, item: Computed, place: int) -> None:
        """Signal the start of a computation to the host; before the first update, complete the gradients."""
        assert self._hosting is not None, "there is a host"
        readiness = self._hosting.readiness
        readiness.computing(item.index)
        if isinstance(item.instruction, OptimizerStep) and readiness.completes:
            program = self._rank_programs[self._visit.section]
            updates = [other for other in program.computations if isinstance(other.instruction, OptimizerStep)]
            for index in {index for other in updates for index in other.awaits} - {one.index for one in program.beside}:
                self._pending.wait(Key(place, index))
            readiness.complete()

    def _before(self, item: IssuedInstruction) -> Sequence[Work] | None:
        """The works after which a collective is started without blocking; None if it starts at once."""
        if not item.behind:
            return None
        return [work for index in item.behind for work in self._pending.works(Key(self._visit.place, index))]

    def _issue_marked(self, item: IssuedInstruction) -> None:
        self._issue(item, self._bind_issue(item))

    def _forward(self, stage: int, microbatch: int, version: int) -> None:
        runner, facts, visit = self._runners[stage], self._stages[stage], self._visit
        microbatch += visit.microbatches_on
        self._reached = microbatch
        batch, place = divmod(microbatch, self._num_microbatches)
        step = visit.first_step + batch
        self._outputs = runner.forward(
            microbatch,
            self._batches[batch][stage][place],
            self._messages.activations(stage, microbatch),
            microbatch_seed(self._run_seed, step, place),
            version + visit.versions_on,
        )
        for channel in facts.outgoing:
            if channel.target in self._stages:
                self._messages.hand_on(stage, channel.target, microbatch, runner.leaving(channel, self._outputs))
        for tensor in facts.outputs:
            value = self._outputs[tensor].detach()
            # With a backward, received tensors return to a pool, and an output may be a view of one.
            self._made[tensor].append(Output(step, value.clone() if facts.has_backward else value))
        if not facts.has_backward:
            self._messages.forget(stage, microbatch)

    @property
    def _seed_gradient(self) -> float:
        """The gradient of a loss with respect to itself."""
        return self._loss_scale * (self._scale.value if self._scale is not None else 1.0)

    def _backward(self, stage: int, microbatch: int, final: Collection[int]) -> None:
        microbatch += self._visit.microbatches_on
        received = self._messages.gradients(stage, microbatch)
        with self._sums.filling(final):
            self._input_gradients = self._runners[stage].backward(
                microbatch, received, self._seed_gradient, is_last=bool(final)
            )
        self._messages.hand_back(stage, microbatch, self._input_gradients)
        self._messages.give_back(stage, microbatch)

    def _backward_input(self, stage: int, microbatch: int) -> None:
        microbatch += self._visit.microbatches_on
        received = self._messages.gradients(stage, microbatch)
        self._input_gradients = self._runners[stage].backward_input(microbatch, received, self._seed_gradient)
        self._messages.hand_back(stage, microbatch, self._input_gradients)

    def _backward_weight(self, stage: int, microbatch: int, final: Collection[int]) -> None:
        microbatch += self._visit.microbatches_on
        with self._sums.filling(final):
            self._runners[stage].backward_weight(microbatch)
        self._messages.give_back(stage, microbatch)

    def _update(self, stage: int) -> None:
        self._optimizer_step(stage)
        self._runners[stage].updated()

    def _merge(self, stage: int) -> None:
        self._sums.merge()
        self._runners[stage].updated()

    def _load(self, instruction: Load) -> Sequence[Work]:
        batch, place = divmod(instruction.microbatch + self._visit.microbatches_on, self._num_microbatches)
        inputs = self._batches[batch][instruction.stage]
        return [inputs.loading(place)] if isinstance(inputs, Coming) else []

    def _send(self, index: int, instruction: Send, rank: int) -> list[dist.Work]:
        stage, peer, key = instruction.stage, instruction.peer, Key(self._visit.place, index)
        if instruction.payload == "gradient":
            return self._messages.send_gradients(key, stage, peer, self._input_gradients[peer], rank)
        microbatch = instruction.microbatch + self._visit.microbatches_on
        tensors = self._runners[stage].leaving(self._channels[stage, peer], self._outputs)
        return self._messages.send_activations(key, stage, peer, microbatch, tensors, rank)

    def _receive(self, instruction: Receive, rank: int) -> list[dist.Work]:
        microbatch = instruction.microbatch + self._visit.microbatches_on
        return self._messages.receive(instruction.stage, instruction.peer, microbatch, instruction.payload, rank)
