"""The executor: interprets one rank's share of a Program with real tensors on torch.distributed.

One thread issues everything, in the order that `rank_program` worked out: computations run here and now, transfers
and sums are asynchronous, and a computation waits for what it needs. The executor decides nothing: order, partners,
buckets and microbatches come from the program, tensors and parts from the captured graph.
"""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import assert_never

import torch
import torch.distributed as dist

from meshwright.runtime.exchange import BucketExchange
from meshwright.runtime.random_state import microbatch_seed, read_generator, write_generator
from meshwright.runtime.rank_program import Computed, Issued, RankProgram
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
_Visit = tuple[int, int]


class Executor:
    """Runs the body of a program on one rank, step after step.

    ``runners`` run the rank's ``stages``, each at its place; what one hands to another does not travel. ``layouts``
    gives the wire layouts of (source stage, target stage, payload). ``optimizer_step(stage)`` updates and clears its
    parameters. Arguments are what `runtime.session` makes of a plan; use that unless you bring your own parts.
    """

    def __init__(
        self,
        *,
        rank_program: RankProgram,
        stages: Sequence[StageSlice],
        runners: Sequence[StageRunner],
        transport: Transport,
        exchange: BucketExchange | None,
        layouts: dict[tuple[int, int, str], tuple[Layout, ...]],
        optimizer_step: Callable[[int], None],
        recorder: Recorder,
        device: torch.device,
        run_seed: int = 0,
        bound_gradient_sends: bool = True,
    ) -> None:
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
        self._channels = {(channel.source, channel.target): channel for stage in stages for channel in stage.outgoing}
        self._first = [(item, self._bind_issue(item)) for item in rank_program.first]
        self._finals = _last_backwards(rank_program, exchange.stages if exchange is not None else {})
        self._computations = [self._bind(item) for item in rank_program.computations]
        self._marked = {
            item.instruction.bucket: item
            for computation in rank_program.computations
            for item in computation.marked
            if isinstance(item.instruction, AllReduce)
        }
        self._step = 0
        self._inputs: Mapping[int, Inputs] = {}
        self._clear()

    def run_step(self, step: int, inputs: Mapping[int, Inputs]) -> dict[int, list[torch.Tensor]]:
        """Run one step; ``inputs[s][m]`` are the graph inputs that stage s reads of microbatch m, in its order.

        Returns the outputs of the graph that this rank makes, by tensor id: of each its microbatches, detached and in
        the order in which they ran.
        """
        self._step, self._inputs = step, inputs
        draws_random = any(stage.draws_random for stage in self._stages.values())
        saved = read_generator(self._device) if draws_random else None
        for item, issue in self._first:
            self._issue(item, issue)
        for computation, run, then in self._computations:
            for index in computation.awaits:
                self._wait(index)
            if self._recorder.active:
                start = time.perf_counter_ns()
                run()
                self._recorder.add(computation.index, step, start, time.perf_counter_ns())
            else:
                run()
            for item, issue in then:
                self._issue(item, issue)
        for index in list(self._pending):
            self._wait(index)
        if saved is not None:
            write_generator(self._device, saved)
        outputs = self._made
        self._clear()
        return outputs

    def _clear(self) -> None:
        self._pending: dict[int, tuple[list[dist.Work], int]] = {}
        self._gradient_sends: deque[int] = deque()
        self._activation_sends: dict[tuple[int, int, int], int] = {}
        # What a stage has of a microbatch, by the stage that it comes from.
        self._activations: defaultdict[_Visit, dict[int, list[torch.Tensor]]] = defaultdict(dict)
        self._gradients: defaultdict[_Visit, dict[int, list[torch.Tensor]]] = defaultdict(dict)
        self._outputs: dict[int, torch.Tensor] = {}
        self._input_gradients: dict[int, list[torch.Tensor]] = {}
        self._made: defaultdict[int, list[torch.Tensor]] = defaultdict(list)

    # --- binding: instructions become calls, once
    # -------------------------------------------------------------------------

    def _bind(
        self, item: Computed
    ) -> tuple[Computed, Callable[[], None], list[tuple[Issued, Callable[[], list[dist.Work]]]]]:
        then = [(other, self._bind_issue(other)) for other in item.then]
        instruction = item.instruction
        match instruction:
            case Forward(stage=stage, microbatch=microbatch):
                return item, lambda: self._forward(stage, microbatch), then
            case Backward(stage=stage, microbatch=microbatch):
                final = self._finals.get(item.index, ())
                return item, lambda: self._backward(stage, microbatch, final), then
            case BackwardInput(stage=stage, microbatch=microbatch):
                return item, lambda: self._backward_input(stage, microbatch), then
            case BackwardWeight(stage=stage, microbatch=microbatch):
                final = self._finals.get(item.index, ())
                return item, lambda: self._backward_weight(stage, microbatch, final), then
            case OptimizerStep(stage=stage):
                return item, lambda: self._optimizer_step(stage), then
            case Stash() | Drop() | Merge():
                raise ProgramError(
                    f"{instruction} belongs to an asynchronous schedule; the runtime runs schedules that flush. "
                    "Simulate this program, or choose such a schedule to run."
                )
            case Send() | Receive() | AllReduce() | ReduceScatter() | AllGather() | Push() | Sum() | Pull() | Load():
                raise ProgramError(
                    f"{instruction} stands in a compute stream; communication belongs to its own streams."
                )
            case CopyDown() | HostStep() | CopyUp() | ReadStates() | WriteStates():
                raise ProgramError(f"{instruction} stands in a compute stream; what the host does has its own streams.")
            case _:
                assert_never(instruction)

    def _bind_issue(self, item: Issued) -> Callable[[], list[dist.Work]]:
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

    def _issue(self, item: Issued, issue: Callable[[], list[dist.Work]]) -> None:
        start = time.perf_counter_ns()
        self._pending[item.index] = (issue(), start)

    def _wait(self, index: int) -> None:
        if index in self._pending:
            works, start = self._pending.pop(index)
            for work in works:
                work.wait()
            if self._recorder.active:
                self._recorder.add(index, self._step, start, time.perf_counter_ns())

    def _forward(self, stage: int, microbatch: int) -> None:
        runner, facts = self._runners[stage], self._stages[stage]
        self._outputs = runner.forward(
            microbatch,
            self._inputs[stage][microbatch],
            self._activations[stage, microbatch],
            microbatch_seed(self._run_seed, self._step, microbatch),
        )
        for channel in facts.outgoing:
            if channel.target in self._stages:
                handed_on = [value.detach() for value in runner.leaving(channel, self._outputs)]
                self._activations[channel.target, microbatch][stage] = handed_on
        for tensor in facts.outputs:
            value = self._outputs[tensor].detach()
            # With a backward, what was received goes back to a pool, and an output may be a view of it.
            self._made[tensor].append(value.clone() if facts.has_backward else value)
        if not facts.has_backward:
            # Nobody else reads what came; what is handed on or sent is held by those who have it.
            del self._activations[stage, microbatch]

    def _backward(self, stage: int, microbatch: int, final: Collection[int]) -> None:
        received = self._gradients[stage, microbatch]
        with self._filling(final):
            self._input_gradients = self._runners[stage].backward(microbatch, received)
        self._hand_back(stage, microbatch)
        self._give_back(stage, microbatch)

    def _backward_input(self, stage: int, microbatch: int) -> None:
        received = self._gradients[stage, microbatch]
        self._input_gradients = self._runners[stage].backward_input(microbatch, received)
        self._hand_back(stage, microbatch)

    def _backward_weight(self, stage: int, microbatch: int, final: Collection[int]) -> None:
        with self._filling(final):
            self._runners[stage].backward_weight(microbatch)
        self._give_back(stage, microbatch)

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
        stage, peer = instruction.stage, instruction.peer
        layouts = self._layouts[stage, peer, instruction.payload]
        if instruction.payload == "activation":
            self._activation_sends[stage, peer, instruction.microbatch] = index
            tensors = self._runners[stage].leaving(self._channels[stage, peer], self._outputs)
        else:
            self._gradient_sends.append(index)
            if self._bound_gradient_sends and len(self._gradient_sends) > _MAX_GRADIENT_SENDS:
                self._wait(self._gradient_sends.popleft())
            tensors = self._input_gradients[peer]
        return self._transport.send(tensors, layouts, target)

    def _receive(self, instruction: Receive, source: int) -> list[dist.Work]:
        layouts = self._layouts[instruction.peer, instruction.stage, instruction.payload]
        tensors, works = self._transport.receive(layouts, source)
        inbox = self._activations if instruction.payload == "activation" else self._gradients
        inbox[instruction.stage, instruction.microbatch][instruction.peer] = tensors
        return works

    def raise_mark(self, bucket: int) -> None:
        """A bucket is ready: issue its sum if the program lets it leave during the backward."""
        if bucket in self._marked:
            item = self._marked[bucket]
            self._issue(item, lambda: self._all_reduce(bucket, item.group))

    def _all_reduce(self, bucket: int, group: tuple[int, ...]) -> list[dist.Work]:
        assert self._exchange is not None, "a rank that sums has buckets"
        return self._transport.sum_over(self._exchange.flat(bucket), group)


def _last_backwards(program: RankProgram, stages_of: Mapping[int, Collection[int]]) -> dict[int, tuple[int, ...]]:
    """Buckets that are final with a computation, by its index: the last one that adds to gradients in them."""
    found: dict[int, int] = {}
    for item in program.computations:
        if isinstance(item.instruction, Backward | BackwardWeight):
            found |= {bucket: item.index for bucket, stages in stages_of.items() if item.instruction.stage in stages}
    finals: defaultdict[int, list[int]] = defaultdict(list)
    for bucket, index in found.items():
        finals[index].append(bucket)
    return {index: tuple(buckets) for index, buckets in finals.items()}
