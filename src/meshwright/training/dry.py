"""Dry run: one process of a plan runs alone with fake tensors, and its communication is compared with the prediction.

The process group is torch's fake one and tensors have no memory, so the real executor runs the program of a plan for
hundreds of devices in seconds on any machine. Every send, receive and collective that reaches torch is recorded, and
compared with the program and the local graph: instructions of the program in their order, and communication inside
forwards, backwards and updates in its order.

Counted but not compared: messages of at most 8 bytes (the count of targets in a loss, a norm), and messages of rings,
whose backward sends less than is estimated (docs/concepts/split-plans.md).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch._library.fake_class_registry import FakeScriptObject
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from meshwright.capture import Captured, capture_model, flatten_batch
from meshwright.cost.autocast import as_computed
from meshwright.program import gradient_buckets, num_filling_steps
from meshwright.program.collective_expansion import Expansion
from meshwright.runtime import OptimizerArgument, Session, arrange_rank, issue_order, open_session, with_clipping
from meshwright.runtime.rank_program import SectionName
from meshwright.runtime.teams.grid import TeamPosition
from meshwright.runtime.transport import MESSAGES, SUMS
from meshwright.spec import (
    AllGather,
    AllReduce,
    Graph,
    Instruction,
    Plan,
    PlanError,
    Receive,
    ReduceScatter,
    RunError,
    Send,
    check_fit,
)
from meshwright.spec.exchange import Axis
from meshwright.training.job import Job, capture_fake, tile
from meshwright.training.precision import bind_plan, capture_in_precision, recaptures

# The size of a number; a message of this size is not a tensor.
_NUMBER_BYTES = 8
_KINDS = {
    "allreduce_": "all_reduce",
    "_allgather_base_": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "alltoall_base_": "all_to_all",
    "send": "send",
    "recv_": "receive",
}


# The value of ``peer`` for a collective.
EVERYBODY = -1


class Communication(NamedTuple):
    """One communication of a process.

    ``num_processes``: the size of the group. ``peer``: the other process of a transfer, by number; `EVERYBODY` for a
    collective. ``num_bytes``: bytes of the full tensor.
    """

    kind: str
    num_processes: int
    peer: int
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DryRun:
    """The record of one process over ``num_steps`` steps.

    ``instructions``: their number by kind. ``issued``: communication that the program issues. ``inside``: communication
    inside forwards, backwards and updates. ``numbers`` and ``ring_messages`` count what was not compared.
    """

    process: int
    num_processes: int
    stages: tuple[int, ...]
    num_steps: int
    instructions: dict[str, int]
    issued: tuple[Communication, ...]
    inside: tuple[Communication, ...]
    numbers: int
    ring_messages: int

    def rows(self) -> list[dict[str, Any]]:
        """Return rows for a table: calls and total bytes of full tensors, by kind, issuer and number of processes."""
        found: dict[tuple[str, str, int], list[int]] = {}
        for where, calls in (("program", self.issued), ("passes", self.inside)):
            for call in calls:
                found.setdefault((call.kind, where, call.num_processes), []).append(call.num_bytes)
        return [
            {"exchange": kind, "issued_by": where, "processes": count, "calls": len(sizes), "total_bytes": sum(sizes)}
            for (kind, where, count), sizes in found.items()
        ]


class FakeModel(NamedTuple):
    """A model of fake tensors: its capture, a batch (inputs, targets), and the mode of its fake tensors.

    ``planned``: the graph that plans refer to, if the model has another graph in their precision.
    """

    captured: Captured
    batch: tuple[Any, Any]
    mode: FakeTensorMode
    planned: Graph | None = None


def _sgd(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """SGD, which has no states; these would read values of fake tensors in a second step."""
    return torch.optim.SGD(parameters, lr=1.0)


def dry_run(
    job: Job,
    process: int,
    *,
    model: FakeModel | None = None,
    device: torch.device | None = None,
    optimizer: OptimizerArgument = _sgd,
) -> DryRun:
    """Run a step of a plan as its process number ``process``, with fake tensors on ``device`` (by default the CPU).

    ``model``: the plan's model from `fake_model`, made here by default. An asynchronous plan runs the steps that fill
    the pipeline, and one more. Updates of an optimizer do not communicate, so any ``optimizer`` can be given. A fake
    process group is created, and destroyed at the end.

    Raises RunError if the communication differs from the prediction, PlanError for a process that the plan does not
    have, and the errors of opening a session.
    """
    plan = job.read_plan()
    if not isinstance(plan, Plan):
        raise PlanError(
            "A placement of single ops was given, but a dry run needs a plan of stages. Run it without --dry, or plan "
            "with another --method than place."
        )
    plan = with_clipping(plan, job.clip_norm)
    assert isinstance(plan, Plan), "clipping keeps a plan a plan"
    if not 0 <= process < plan.num_devices:
        raise PlanError(
            f"Process {process} was given; expected a number from 0 to {plan.num_devices - 1}, a process of the plan."
        )
    num_steps = num_filling_steps(plan) + 1 if plan.is_asynchronous else 1
    with _fake_processes(process, plan.num_devices):
        captured, batch, mode, planned = model or fake_model(plan, job.seed)
        if planned is not None:
            check_fit(plan, planned)
            plan = bind_plan(plan, planned, captured.graph)
        with mode:
            tensors = _global_batch(captured, batch, plan)
            session = open_session(
                captured,
                plan,
                optimizer,
                run_seed=job.seed,
                clip_norm=job.clip_norm,
                device=device or torch.device("cpu"),
            )
            with _Noting() as noting:
                for step in range(num_steps):
                    session.steps.run_step(step, session.microbatch_inputs(tensors))
                session.finish()
    instructions = _instructions(session)
    issued, inside = _predict(session, instructions)
    _compare("issues communication", noting.issued, issued, process)
    _compare("communicates inside forwards, backwards and updates", noting.inside, inside, process)
    return DryRun(
        process=process,
        num_processes=plan.num_devices,
        stages=tuple(stage.index for stage in session.stages),
        num_steps=num_steps,
        instructions=dict(Counter(type(item).__name__ for item, _ in instructions)),
        issued=tuple(noting.issued),
        inside=tuple(noting.inside),
        numbers=noting.numbers,
        ring_messages=noting.ring_messages,
    )


@contextmanager
def _fake_processes(process: int, count: int) -> Iterator[None]:
    if dist.is_initialized():
        raise RunError(
            "This process already has a process group, but a dry run makes its own. Start the dry run in a process "
            "without one."
        )
    dist.init_process_group("fake", store=FakeStore(), rank=process, world_size=count)
    try:
        yield
    finally:
        dist.destroy_process_group()


def fake_model(plan: Plan, seed: int = 0) -> FakeModel:
    """Return the plan's model with fake tensors, for dry runs of all plans with its workload kind and precision."""
    source, captured = capture_fake(plan, seed)
    mode = next(
        item.fake_mode for item in (*source.model.parameters(), *source.model.buffers()) if isinstance(item, FakeTensor)
    )
    batch = source.inputs, source.targets
    if not recaptures(plan, source.model, captured.graph):
        return FakeModel(captured, batch, mode)
    capture = partial(capture_model, source.model, loss=source.loss, mode=plan.workload.kind, verify=False)
    made, batch = capture_in_precision(plan, source.model, batch, captured, capture)
    return FakeModel(made, batch, mode, captured.graph)


def _global_batch(captured: Captured, batch: tuple[Any, Any], plan: Plan) -> Sequence[torch.Tensor]:
    count = plan.workload.global_batch
    inputs, targets = pytree.tree_map_only(torch.Tensor, lambda item: tile(item, count), batch)
    return flatten_batch(captured, inputs, targets)


class _Noting(TorchDispatchMode):
    """Records the calls of torch's process groups: ``issued`` by the program, or ``inside`` of its spans."""

    def __init__(self) -> None:
        super().__init__()
        self.issued: list[Communication] = []
        self.inside: list[Communication] = []
        self.numbers = self.ring_messages = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Record a call, then execute it."""
        if func.namespace == "c10d" and (kind := _KINDS.get(func._schema.name.split("::")[1])) is not None:
            self._note(kind, args)
        return func(*args, **(kwargs or {}))

    def _note(self, kind: str, args: tuple[Any, ...]) -> None:
        leaves = pytree.tree_leaves(args)
        num_bytes = max(item.nbytes for item in leaves if isinstance(item, torch.Tensor))
        group = next(
            dist.ProcessGroup.unbox(item)  # type: ignore[arg-type]  # the fake one wraps the real one
            for item in leaves
            if isinstance(item, torch.ScriptObject | FakeScriptObject)
        )
        if kind in ("send", "receive"):
            # The argument after the tensors and the group: the peer's rank in the group.
            peer = next(item for item in leaves if isinstance(item, int) and not isinstance(item, bool))
            ranks = dist.get_process_group_ranks(group)
            if group.group_desc in ("default_pg", MESSAGES):
                self.issued.append(Communication(kind, 2, ranks[peer], num_bytes))
            else:
                self.ring_messages += 1
        elif num_bytes <= _NUMBER_BYTES:
            self.numbers += 1
        else:
            # In an all-to-all the size is that of a process's input.
            full = num_bytes * group.size() if kind == "all_to_all" else num_bytes
            call = Communication(kind, group.size(), EVERYBODY, full)
            (self.issued if group.group_desc in ("default_pg", SUMS) else self.inside).append(call)


def _instructions(session: Session) -> list[tuple[Instruction, tuple[int, ...]]]:
    """The instructions that a process issues, with the ranks that take part, in order."""
    program = session.program
    names: tuple[SectionName, ...] = ("prologue", "body", "epilogue") if program.advance else ("body",)
    found: list[tuple[Instruction, tuple[int, ...]]] = []
    for name in names:
        section = getattr(program, name)
        for index in issue_order(arrange_rank(program, section, session.grid.rank)).tolist():
            group = int(section.group[index])
            found.append((section.instruction(index), program.groups[group] if group >= 0 else ()))
    return found


def _predict(
    session: Session, instructions: Iterable[tuple[Instruction, tuple[int, ...]]]
) -> tuple[list[Communication], list[Communication]]:
    """The calls of communication instructions, and of those inside of others."""
    plan, grid = session.model.plan, session.grid
    assert isinstance(plan, Plan), "dry runs are of plans"
    graph = as_computed(session.graph, plan.workload.numbers)
    expansion = Expansion(plan, graph, session.stages, grid.rank)
    channels = {(item.source, item.target): item for stage in session.stages for item in stage.outgoing}
    channels |= {(item.source, item.target): item for stage in session.stages for item in stage.incoming}
    buckets = {bucket.index: bucket for bucket in gradient_buckets(graph, plan)}
    issued: list[Communication] = []
    inside: list[Communication] = []

    def messages(item: Send | Receive, kind: str, other: int) -> Iterator[Communication]:
        is_forward = item.payload == "activation"
        there, back = (item.stage, item.peer) if kind == "send" else (item.peer, item.stage)
        channel = channels[(there, back) if is_forward else (back, there)]
        for tensor in channel.tensors if is_forward else channel.gradients:
            yield Communication(kind, 2, grid.process_of(other), graph.tensors[tensor].num_bytes(plan.microbatch_size))
        if is_forward and channel.carries_rng:
            yield Communication(kind, 2, grid.process_of(other), torch.get_rng_state().nbytes)

    for item, ranks in instructions:
        match item:
            case Send():
                issued.extend(messages(item, "send", ranks[1]))
            case Receive():
                issued.extend(messages(item, "receive", ranks[0]))
            case AllReduce(bucket=number) | ReduceScatter(bucket=number) | AllGather(bucket=number):
                if number not in buckets or not buckets[number].parameters:
                    continue
                count = len(ranks)
                elements = sum(graph.tensors[i].num_elements(0) for i in buckets[number].parameters)
                numbers = plan.workload.numbers
                width = numbers.value_bytes if isinstance(item, AllGather) else numbers.gradient_bytes
                if not isinstance(item, AllReduce):
                    total = -(-elements // count) * count
                else:
                    # Groups that shard states sum the shards of each of their members.
                    total = -(-elements // (plan.exchange.shard_size if plan.exchange.shard_optimizer else 1))
                kind = {AllReduce: "all_reduce", ReduceScatter: "reduce_scatter", AllGather: "all_gather"}[type(item)]
                issued.append(Communication(kind, count, EVERYBODY, total * width))
            case _:
                for each in expansion.expand(item):
                    size = _num_processes(plan, item.stage, each.axis, grid)
                    if each.kind != "send":
                        inside.append(Communication(each.kind, size, EVERYBODY, each.num_bytes))
    return issued, inside


def _num_processes(plan: Plan, stage: int, axis: Axis | Literal["replicas", "across"], grid: TeamPosition) -> int:
    """The number of processes that communicate on an axis."""
    if axis != "replicas" and axis != "across":
        return grid.axes[axis].size
    groups = plan.exchange.shard_groups(plan.stages[stage].ranks)
    return len(groups[0]) if axis == "replicas" else len(groups)


def _compare(what: str, found: list[Communication], wanted: list[Communication], process: int) -> None:
    """Raise RunError at the first difference."""
    if found == wanted:
        return
    place = next((i for i, pair in enumerate(zip(found, wanted, strict=False)) if pair[0] != pair[1]), None)
    place = min(len(found), len(wanted)) if place is None else place
    first, predicted = (items[place] if place < len(items) else None for items in (found, wanted))
    raise RunError(
        f"Process {process} {what} {len(found)} times, but {len(wanted)} were predicted; number {place} is "
        f"{first} instead of {predicted}. The plan would run, but not as it was estimated. Please report it with the "
        "plan."
    )
