"""The executor: interprets one rank's share of a Program with real tensors on torch.distributed.

One thread issues everything, in the order that `rank_program` worked out: computations run here and now, transfers
and sums are asynchronous, and a computation waits for what it needs. The executor decides nothing: order, partners,
buckets and microbatches come from the program, tensors and parts from the captured graph. Which section runs when, and
with which batches, `steps` says.
"""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple, assert_never

import torch
import torch.distributed as dist

from meshwright.runtime.exchange import Exchange
from meshwright.runtime.random_state import microbatch_seed, read_generator, write_generator
from meshwright.runtime.rank_program import Computed, Issued, RankProgram, SectionName
from meshwright.runtime.recorder import Recorder
from meshwright.runtime.stage import StageRunner
from meshwright.runtime.transport import Layout, Transport
from meshwright.spec.errors import ProgramError
from meshwright.spec.instructions import (
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
    Pull,
    Push,
    Receive,
    ReduceScatter,
    Send,
    Stash,
    Sum,
)
from meshwright.spec.offload_instructions import CopyDown, CopyUp, HostStep, ReadStates, WriteStates
from meshwright.spec.slices import StageSlice

# Gradient sends that may be under way before the oldest is waited for. The wait only bounds the memory that they
# hold: they are
# awaited by stages before this one, never by one after it, so it cannot close a circle. Under an own schedule the
# replicas of such a stage may wait for each other's next gradients, and nothing is bounded.
_MAX_GRADIENT_SENDS = 4

Inputs = Sequence[Sequence[torch.Tensor]]
# A stage and a microbatch.
_Own = tuple[int, int]
# A place among the sections that run, and an instruction of the section there.
_Key = tuple[int, int]
_Issue = Callable[[], list[dist.Work]]


class Output(NamedTuple):
    """An output of the graph for one microbatch of the global batch of a step, detached."""

    step: int
    value: torch.Tensor


# By tensor id, in the order in which they were made.
Outputs = dict[int, list[Output]]


class Visit(NamedTuple):
    """A section at a place: its microbatches and the versions of the weights are counted on from its columns'.

    ``first_step`` is the step whose batch has microbatch 0.
    """

    section: SectionName
    place: int
    first_step: int
    microbatches_on: int = 0
    versions_on: int = 0


@dataclass(slots=True)
class _Bound:
    """A computation as calls. ``microbatch`` of a forward, else -1."""

    item: Computed
    run: Callable[[], None]
    then: list[tuple[Issued, _Issue]]
    marked: dict[int, Issued]
    microbatch: int


class Executor:
    """Runs the sections of a program on one rank.

    ``runners`` run the rank's ``stages``, each at its place; what one hands to another does not travel. ``layouts``
    gives the wire layouts of (source stage, target stage, payload). ``optimizer_step(stage)`` updates and clears its
    parameters. Arguments are what `runtime.session` makes of a plan; use that unless you bring your own parts.
    """

    def __init__(
        self,
        *,
        rank_programs: Mapping[SectionName, RankProgram],
        num_microbatches: int,
        stages: Sequence[StageSlice],
        runners: Sequence[StageRunner],
        transport: Transport,
        exchange: Exchange | None,
        layouts: dict[tuple[int, int, str], tuple[Layout, ...]],
        optimizer_step: Callable[[int], None],
        recorder: Recorder,
        device: torch.device,
        run_seed: int = 0,
        bound_gradient_sends: bool = True,
    ) -> None:
        self._num_microbatches = num_microbatches
        self._stages = {stage.index: stage for stage in stages}
        self._runners = {stage.index: runner for stage, runner in zip(stages, runners, strict=True)}
        self._transport = transport
        self._exchange = exchange
        self._layouts = layouts
        self._optimizer_step = optimizer_step
        self._recorder = recorder
        self._device = device
        self._run_seed = run_seed
        self._bound_gradient_sends = bound_gradient_sends
        self._draws_random = any(stage.draws_random for stage in stages)
        self._channels = {(channel.source, channel.target): channel for stage in stages for channel in stage.outgoing}
        self._firsts = {
            name: [(item, self._bind_issue(item)) for item in program.first] for name, program in rank_programs.items()
        }
        self._computations = {name: self._bind_all(program) for name, program in rank_programs.items()}
        self._visit = Visit("body", 0, 0)
        self._position = 0
        self._reached = 0
        self._marked: dict[int, Issued] = {}
        self._sections: dict[int, SectionName] = {}
        self._batches: dict[int, Mapping[int, Inputs]] = {}
        self._pending: dict[_Key, tuple[list[dist.Work], int]] = {}
        self._gradient_sends: deque[_Key] = deque()
        self._activation_sends: dict[tuple[int, int, int], _Key] = {}
        # What a stage has of a microbatch, by the stage that it comes from.
        self._activations: defaultdict[_Own, dict[int, list[torch.Tensor]]] = defaultdict(dict)
        self._gradients: defaultdict[_Own, dict[int, list[torch.Tensor]]] = defaultdict(dict)
        self._outputs: dict[int, torch.Tensor] = {}
        self._input_gradients: dict[int, list[torch.Tensor]] = {}
        self._made: defaultdict[int, list[Output]] = defaultdict(list)

    def feed(self, batch: int, inputs: Mapping[int, Inputs]) -> None:
        """Give batch number ``batch``: ``inputs[s][m]`` are the graph inputs that stage s reads of its microbatch m."""
        self._batches[batch] = inputs

    def release(self) -> None:
        """Forget batches before that of the last forward."""
        for batch in [batch for batch in self._batches if batch < self._reached // self._num_microbatches]:
            del self._batches[batch]

    def restart(self) -> None:
        """Begin again with microbatch 0 and version 0, after everything came to its end."""
        self._batches.clear()
        self._reached = 0
        if self._exchange is not None:
            self._exchange.restart()
        for runner in self._runners.values():
            runner.restart()

    def begin(self, visit: Visit) -> None:
        """Enter a section, and issue what waits for nothing in it."""
        self._visit, self._position = visit, 0
        self._sections[visit.place] = visit.section
        for item, issue in self._firsts[visit.section]:
            self._issue(item, issue)

    def go_on(self, end: int | None = None) -> bool:
        """Run the section on, up to a forward of a microbatch from ``end`` on; whether it is done."""
        saved = read_generator(self._device) if self._draws_random else None
        computations = self._computations[self._visit.section]
        on = self._visit.microbatches_on
        while self._position < len(computations):
            bound = computations[self._position]
            if end is not None and bound.microbatch >= 0 and bound.microbatch + on >= end:
                break
            self._run(bound)
            self._position += 1
        if saved is not None:
            write_generator(self._device, saved)
        return self._position == len(computations)

    def settle(self, place: int | None = None) -> None:
        """Wait for everything that was issued, or for what was up to a place."""
        for key in [key for key in self._pending if place is None or key[0] <= place]:
            self._wait(key)
        for passed in [other for other in self._sections if place is None or other < place]:
            del self._sections[passed]
        if place is None:
            self._gradient_sends.clear()
            self._activation_sends.clear()

    def take_outputs(self) -> Outputs:
        """The outputs of the graph that this rank made since the last call."""
        made, self._made = dict(self._made), defaultdict(list)
        return made

    # --- binding: instructions become calls, once
    # -------------------------------------------------------------------------

    def _bind_all(self, program: RankProgram) -> list[_Bound]:
        finals = _last_backwards(program, self._exchange.stages if self._exchange is not None else {})
        return [
            _Bound(
                item,
                self._bind(item.instruction, finals.get(item.index, ())),
                [(other, self._bind_issue(other)) for other in item.then],
                {other.instruction.bucket: other for other in item.marked if isinstance(other.instruction, AllReduce)},
                item.instruction.microbatch if isinstance(item.instruction, Forward) else -1,
            )
            for item in program.computations
        ]

    def _bind(self, instruction: Instruction, final: Collection[int]) -> Callable[[], None]:
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
            case Send() | Receive() | AllReduce() | ReduceScatter() | AllGather() | Push() | Sum() | Pull() | Load():
                raise ProgramError(
                    f"{instruction} stands in a compute stream; communication belongs to its own streams."
                )
            case CopyDown() | HostStep() | CopyUp() | ReadStates() | WriteStates():
                raise ProgramError(f"{instruction} stands in a compute stream; what the host does has its own streams.")
            case _:
                assert_never(instruction)

    def _bind_issue(self, item: Issued) -> _Issue:
        instruction = item.instruction
        match instruction:
            case Send():
                return lambda: self._send(item.index, instruction, item.group[1])
            case Receive():
                return lambda: self._receive(instruction, item.group[0])
            case AllReduce(bucket=bucket):
                return lambda: self._all_reduce(bucket, item.group)
            case ReduceScatter() | AllGather():
                raise ProgramError(
                    f"{instruction} belongs to an optimizer that is sharded; the runtime sums whole buckets. Simulate "
                    "this program, or plan with `zero` 0 to run."
                )
            case Load():
                raise ProgramError(
                    f"{instruction} belongs to an input pipeline; the runtime is given its inputs. Simulate this "
                    "program, or plan without a loader to run."
                )
            case CopyDown() | HostStep() | CopyUp() | ReadStates() | WriteStates():
                raise ProgramError(
                    f"{instruction} belongs to an optimizer on the host; the runtime steps on the device. Simulate "
                    "this program, or plan without `offload` to run."
                )
            case Push() | Sum() | Pull():
                raise ProgramError(
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
            ):
                raise ProgramError(f"{instruction} stands in a communication stream; it belongs to the compute stream.")
            case _:
                assert_never(instruction)

    # --- execution
    # --------------------------------------------------------------------------------------------------------

    def _run(self, bound: _Bound) -> None:
        item, place = bound.item, self._visit.place
        for index in item.awaits:
            self._wait((place, index))
        for late in item.late:
            if self._sections.get(place - late.lag) == late.section:
                self._wait((place - late.lag, late.index))
        self._marked = bound.marked
        if self._recorder.active:
            start = time.perf_counter_ns()
            bound.run()
            self._record(item.index, place, start)
        else:
            bound.run()
        for other, issue in bound.then:
            self._issue(other, issue)

    def _issue(self, item: Issued, issue: _Issue) -> None:
        start = time.perf_counter_ns()
        self._pending[self._visit.place, item.index] = (issue(), start)

    def _wait(self, key: _Key) -> None:
        if key in self._pending:
            works, start = self._pending.pop(key)
            for work in works:
                work.wait()
            if self._recorder.active:
                self._record(key[1], key[0], start)

    def _record(self, index: int, place: int, start: int) -> None:
        """Steps are repetitions of the body; what fills and empties the pipeline belongs to none."""
        if self._sections[place] == "body":
            self._recorder.add(index, place, start, time.perf_counter_ns())

    def _forward(self, stage: int, microbatch: int, version: int) -> None:
        runner, facts, visit = self._runners[stage], self._stages[stage], self._visit
        microbatch += visit.microbatches_on
        self._reached = microbatch
        batch, place = divmod(microbatch, self._num_microbatches)
        step = visit.first_step + batch
        self._outputs = runner.forward(
            microbatch,
            self._batches[batch][stage][place],
            self._activations[stage, microbatch],
            microbatch_seed(self._run_seed, step, place),
            version + visit.versions_on,
        )
        for channel in facts.outgoing:
            if channel.target in self._stages:
                handed_on = [value.detach() for value in runner.leaving(channel, self._outputs)]
                self._activations[channel.target, microbatch][stage] = handed_on
        for tensor in facts.outputs:
            value = self._outputs[tensor].detach()
            # With a backward, what was received goes back to a pool, and an output may be a view of it.
            self._made[tensor].append(Output(step, value.clone() if facts.has_backward else value))
        if not facts.has_backward:
            # Nobody else reads what came; what is handed on or sent is held by those who have it.
            del self._activations[stage, microbatch]

    def _backward(self, stage: int, microbatch: int, final: Collection[int]) -> None:
        microbatch += self._visit.microbatches_on
        received = self._gradients[stage, microbatch]
        with self._filling(final):
            self._input_gradients = self._runners[stage].backward(microbatch, received)
        self._hand_back(stage, microbatch)
        self._give_back(stage, microbatch)

    def _backward_input(self, stage: int, microbatch: int) -> None:
        microbatch += self._visit.microbatches_on
        received = self._gradients[stage, microbatch]
        self._input_gradients = self._runners[stage].backward_input(microbatch, received)
        self._hand_back(stage, microbatch)

    def _backward_weight(self, stage: int, microbatch: int, final: Collection[int]) -> None:
        microbatch += self._visit.microbatches_on
        with self._filling(final):
            self._runners[stage].backward_weight(microbatch)
        self._give_back(stage, microbatch)

    def _update(self, stage: int) -> None:
        self._optimizer_step(stage)
        self._runners[stage].updated()

    def _merge(self, stage: int) -> None:
        assert self._exchange is not None, "a rank that merges exchanges"
        self._exchange.merge()
        self._runners[stage].updated()

    @contextmanager
    def _filling(self, buckets: Collection[int]) -> Iterator[None]:
        """The last backward of some buckets: they leave as soon as they are full."""
        if buckets and self._exchange is not None:
            self._exchange.begin(buckets)
        yield
        if buckets and self._exchange is not None:
            self._exchange.finish()

    def _hand_back(self, stage: int, microbatch: int) -> None:
        """Gradients go to the stages before; what was sent to those behind has arrived."""
        facts, received = self._stages[stage], self._gradients[stage, microbatch]
        for source, gradients in self._input_gradients.items():
            if source in self._stages:
                self._gradients[source, microbatch][stage] = gradients
        for channel in facts.outgoing:
            # The gradient came back, so what was sent has arrived: this wait returns at once and frees the sender's
            # buffers.
            sent = self._activation_sends.pop((stage, channel.target, microbatch), None)
            if sent is not None and channel.target in received:
                self._wait(sent)

    def _give_back(self, stage: int, microbatch: int) -> None:
        """Nobody reads any more what came for a microbatch."""
        received = self._gradients.pop((stage, microbatch), {})
        arrived = self._activations.pop((stage, microbatch), {})
        for source, tensors in (*received.items(), *arrived.items()):
            if source not in self._stages:
                self._transport.recycle(tensors)

    def _send(self, index: int, instruction: Send, target: int) -> list[dist.Work]:
        stage, peer, key = instruction.stage, instruction.peer, (self._visit.place, index)
        layouts = self._layouts[stage, peer, instruction.payload]
        if instruction.payload == "activation":
            microbatch = instruction.microbatch + self._visit.microbatches_on
            self._activation_sends[stage, peer, microbatch] = key
            tensors = self._runners[stage].leaving(self._channels[stage, peer], self._outputs)
        else:
            self._gradient_sends.append(key)
            if self._bound_gradient_sends and len(self._gradient_sends) > _MAX_GRADIENT_SENDS:
                self._wait(self._gradient_sends.popleft())
            tensors = self._input_gradients[peer]
        return self._transport.send(tensors, layouts, target)

    def _receive(self, instruction: Receive, source: int) -> list[dist.Work]:
        layouts = self._layouts[instruction.peer, instruction.stage, instruction.payload]
        tensors, works = self._transport.receive(layouts, source)
        inbox = self._activations if instruction.payload == "activation" else self._gradients
        microbatch = instruction.microbatch + self._visit.microbatches_on
        inbox[instruction.stage, microbatch][instruction.peer] = tensors
        return works

    def raise_mark(self, bucket: int) -> None:
        """A bucket is ready: issue its sum if the program lets it leave during the backward."""
        item = self._marked.get(bucket)
        if item is not None:
            self._issue(item, lambda: self._all_reduce(bucket, item.group))

    def _all_reduce(self, bucket: int, group: tuple[int, ...]) -> list[dist.Work]:
        assert self._exchange is not None, "a rank that sums has buckets"
        return self._transport.sum_over(self._exchange.to_sum(bucket), group)


def _last_backwards(program: RankProgram, stages_of: Mapping[int, Collection[int]]) -> dict[int, tuple[int, ...]]:
    """Buckets that are final with a computation, by its index: the last one before an update that adds to them."""
    last: dict[int, int] = {}
    updated: set[int] = set()
    finals: defaultdict[int, list[int]] = defaultdict(list)
    for item in program.computations:
        stage = item.instruction.stage
        if isinstance(item.instruction, OptimizerStep):
            updated.add(stage)
        elif isinstance(item.instruction, Backward | BackwardWeight):
            for bucket in (bucket for bucket, stages in stages_of.items() if stage in stages):
                if bucket in last and stage in updated:
                    finals[last[bucket]].append(bucket)
                last[bucket] = item.index
            updated.discard(stage)
    for bucket, index in last.items():
        finals[index].append(bucket)
    return {index: tuple(buckets) for index, buckets in finals.items()}
