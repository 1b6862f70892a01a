"""Build the session of one rank from a plan (or a placement) and a captured model (`open_session`).

It makes the program (the same that the simulator reads), the modules of this rank's stages, their parameters on the
device, the process groups, the gradient buckets, the optimizer updates, and the executor. `WaveExchange` sums the
changes of weights under the asynchronous schedule hetpipe.

A placement must keep ops that write to the same memory in one stage (`check_placed_writes`). The planner recognises
such ops by their names (`planner.placing.op_tasks`), as a graph does not list the writes of an op. A captured model
lists them (`capture.call_facts`). If a block of memory is written, all ops that use it must be in one stage, from the
first use to the last write. If it holds a parameter, buffer, input or constant, later readers must be in that stage,
too. A placement that breaks this rule would compute other numbers than one process, so it is refused.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from meshwright import __version__
from meshwright.capture import Captured
from meshwright.program import (
    Bucket,
    build_program,
    exchange_of,
    gradient_buckets,
    minibatches_per_update,
    num_filling_steps,
)
from meshwright.program.buckets import cut_parts
from meshwright.runtime.checkpointing import RecomputedRange
from meshwright.runtime.compile_ahead import compile_ahead
from meshwright.runtime.devices import choose_device
from meshwright.runtime.executor import Executor
from meshwright.runtime.fully_sharded import own_part
from meshwright.runtime.gradient_reduction import BucketBuffer, BucketExchange, Exchange
from meshwright.runtime.holding import Holding, arrange_sections, take_holding
from meshwright.runtime.offload import (
    Hosted,
    HostedValues,
    Hosting,
    HostSteps,
    choose_folder,
    find_partial,
    keep_saved,
    take_to_host,
)
from meshwright.runtime.optimizer_steps import (
    LossScale,
    NormClip,
    Repair,
    ShardedBucket,
    ShardedBuckets,
    check_elementwise,
    check_repair,
    count_holders,
    find_staleness,
    with_clipping,
)
from meshwright.runtime.position import Position
from meshwright.runtime.precisions import Masters, autocast_type, check_precision, set_gradient_types
from meshwright.runtime.rank_program import RankProgram, SectionName
from meshwright.runtime.recorder import Recorder
from meshwright.runtime.replica_broadcast import begin_alike
from meshwright.runtime.session import EndlessSteps, FlushingSteps, Session, Steps, check_runnable, join_group
from meshwright.runtime.stage_layouts import channel_layouts, takes_channels_last
from meshwright.runtime.stage_module import Part, SplitPart, StageRunner
from meshwright.runtime.stage_steps import OptimizerArgument, StageSteps, own_optimizer
from meshwright.runtime.teams.grid import TeamPosition, make_grid
from meshwright.runtime.transport import Transport
from meshwright.runtime.versions import VersionedPart
from meshwright.spec import (
    BackwardInput,
    EventSink,
    Instruction,
    NullSink,
    OptimizerStep,
    Placement,
    Plan,
    PlanError,
    Program,
    RunError,
    Stash,
    check_placement,
    check_plan,
)
from meshwright.spec.exchange import WAVES
from meshwright.spec.sharding import UNSHARDED


class _WaveBucket:
    """Parameters that are summed together; ``begun`` are their values at the start of the wave."""

    def __init__(self, bucket: Bucket, parameters: Sequence[torch.nn.Parameter]) -> None:
        self.index = bucket.index
        self.parameters = list(parameters)
        self.sizes = [parameter.numel() for parameter in parameters]
        self.begun = self.flatten()
        # For the waves that are not merged yet: this replica's change, and the sum over all.
        self.waves: deque[tuple[torch.Tensor, torch.Tensor]] = deque()

    def flatten(self) -> torch.Tensor:
        return torch.cat([parameter.detach().reshape(-1) for parameter in self.parameters])

    def end_wave(self) -> torch.Tensor:
        now = self.flatten()
        own = now - self.begun
        self.begun = now
        self.waves.append((own, own.clone()))
        return self.waves[-1][1]

    def merge(self) -> None:
        own, total = self.waves.popleft()
        others = (total - own).split(self.sizes)
        for parameter, change in zip(self.parameters, others, strict=True):
            parameter.data.add_(change.view_as(parameter))
        self.begun = self.flatten()


# Under virtual workers each replica of a stage updates its own weights. The changes of the replicas in a wave of
# minibatches are summed, and merged later. The change of a replica is d = w - w' at the end of a wave, with w' the
# weights at its start. The sum over all replicas minus its own d is the change of the others, which a merge adds to the
# weights (`program.schedules.asynchronous`; Park et al., HetPipe, ATC 2020).
class WaveExchange:
    """The buckets of a rank whose changes of weights, not gradients, are summed after each wave of minibatches."""

    def __init__(self, buckets: Sequence[tuple[Bucket, Sequence[torch.nn.Parameter]]]) -> None:
        self._buckets = {bucket.index: _WaveBucket(bucket, parameters) for bucket, parameters in buckets}

    @property
    def buffers(self) -> list[torch.Tensor]:
        """The weights of the buckets at the start of the current wave, as flat tensors."""
        return [bucket.begun for bucket in self._buckets.values()]

    @property
    def stages(self) -> Mapping[int, Collection[int]]:
        """Empty: no gradients are summed."""
        return {}

    def begin(self, buckets: Collection[int], on_ready: Callable[[int], None]) -> None:
        """Do nothing: no gradients are summed."""

    def finish(self) -> None:
        """Do nothing: no gradients are summed."""

    def to_sum(self, part: int) -> torch.Tensor:
        """End the wave; return this replica's change of the bucket's weights, to be summed over all replicas in place.

        ``part`` is the index of the bucket, as buckets are not cut into parts.
        """
        return self._buckets[part].end_wave()

    def merge(self) -> None:
        """Add the other replicas' changes of the oldest summed wave to the weights."""
        for bucket in self._buckets.values():
            bucket.merge()

    def restart(self) -> None:
        """Drop the waves that were not merged; the current weights are the start of the next wave."""
        for bucket in self._buckets.values():
            bucket.waves.clear()
            bucket.begun = bucket.flatten()

    def close(self) -> None:
        """Do nothing: this exchange has no hooks."""


def open_session(
    captured: Captured,
    plan: Plan | Placement,
    optimizer: OptimizerArgument,
    *,
    run_seed: int = 0,
    repair: Repair | None = None,
    clip_norm: float | None = None,
    device: torch.device | None = None,
    events: EventSink | None = None,
    offload_folder: Path | None = None,
    position: Position | None = None,
) -> Session:
    """Return a session in which this rank can execute ``plan``. All ranks of the process group call it together.

    ``optimizer``: an optimizer over the model's parameters, or a function that makes one from the parameters of the
    rank's stages. ``run_seed``: the seed of random ops (`random_state`). ``repair``: the remedy for stale gradients of
    an asynchronous plan. ``clip_norm``: the largest norm of all gradients together (None: no clipping). ``device``: the
    device to compute on; by default that of the plan's cluster, and the process group is joined. ``events`` receives
    the progress of compiling. ``offload_folder``: the folder for states on drives, by default that of temporary
    files. ``position`` follows the instructions. A plan in ``mixed`` or ``bfloat16`` is for the graph of the cast
    model (`training.precision`). Raises PlanError if the plan does not match the graph, these arguments or the
    number of processes, if it splits ops that cannot be sharded, or separates ops that write to the same memory.
    Raises RunError if a host lacks GPUs or memory, or if ranks run different versions.
    """
    check_repair(plan, repair)
    plan = with_clipping(plan, clip_norm)
    _check_fit(captured, plan)
    if device is None:
        _, device = join_group(choose_device(plan))
    check_precision(plan, device)
    numbers, autocast = plan.workload.numbers, autocast_type(plan)
    grid = _take_place(plan)
    begin_alike(captured, device)
    share = take_holding(captured, plan, grid, device)
    transport, recorder = Transport(share.program, device, grid), Recorder(device)
    if captured.graph.mode == "training":
        set_gradient_types(share.parameters, numbers)
    exchange = _make_exchange(share, grid)
    updated = exchange.pieces(share.parameters) if isinstance(exchange, ShardedBuckets) else share.parameters
    folder = choose_folder(offload_folder)
    hosted = take_to_host(
        share, exchange, updated, partial(_complete_gradients, share, updated, device), device, folder, grid.rank
    )
    keeping = keep_saved(share, hosted, device, grid.rank)
    scale, clip = _make_agreements(share, updated, clip_norm, grid, transport, device, hosted)
    stale = find_staleness(share.arranged["body"]) if repair is not None else {}
    parts = _make_parts(share, stale if repair is not None and repair.kind == "predict" else {})
    updates = _make_updates(share, updated, optimizer, repair, stale, clip, scale, hosted)
    hosting, kept, saved = None, hosted or keeping, keeping.layers if keeping is not None else {}
    if kept is not None:
        pieces = hosted.pieces if hosted is not None else ()
        hosting = Hosting(
            pieces, updates if isinstance(updates, HostSteps) else None, kept.readiness, kept.memory, saved
        )
    graph, size = share.model.graph, share.model.plan.microbatch_size
    channels_last = bool(graph.compiled) and takes_channels_last(graph, share.model.stand_in, size, device, autocast)
    runners = tuple(
        StageRunner(part, graph, stage, device, autocast, channels_last=channels_last, saved=saved.get(stage.index))
        for stage, part in zip(share.stages, parts, strict=True)
    )
    layouts = channel_layouts(
        graph, share.model.stand_in, share.all_stages, size, device, autocast, channels_last=channels_last
    )
    if share.model.graph.compiled:
        compile_ahead(share, runners, layouts, device, events or NullSink())

    def make_executor(
        arranged: Mapping[SectionName, RankProgram], num_microbatches: int, recorder: Recorder
    ) -> Executor:
        return Executor(
            rank_programs=arranged,
            num_microbatches=num_microbatches,
            # If stages update at different times, each computes the mean itself (`_make_updates`).
            loss_scale=1.0 if _updates_by_stage(plan) else 1.0 / num_microbatches,
            stages=share.stages,
            runners=runners,
            transport=transport,
            exchange=exchange,
            layouts=layouts,
            optimizer_step=updates,
            recorder=recorder,
            device=device,
            run_seed=run_seed,
            bound_gradient_sends=isinstance(plan, Plan) and not plan.has_own_schedule,
            agreements={item.index: item for item in (scale, clip) if item is not None},
            scale=scale,
            hosting=hosting,
            position=position,
        )

    def make_shorter(count: int) -> Steps:
        shorter = _shorten(plan, count)
        program = build_program(shorter, captured.graph)
        return FlushingSteps(make_executor(arrange_sections(program, grid.rank), count, Recorder(device)))

    executor = make_executor(share.arranged, plan.num_microbatches, recorder)
    return Session(
        grid=grid,
        plan=plan,
        model=share.model,
        program=share.program,
        stages=share.stages,
        steps=_make_steps(executor, plan, share.program, grid.rank),
        recorder=recorder,
        exchange=exchange,
        updates=updates,
        modules=share.modules,
        parts=parts,
        parameters=share.parameters,
        device=device,
        sync_buffers=share.sync_buffers,
        make_shorter=make_shorter,
        hosting=hosting,
    )


def _check_fit(captured: Captured, plan: Plan | Placement) -> None:
    if isinstance(plan, Plan):
        check_plan(plan, captured.graph)
        check_runnable(plan)
    else:
        check_placed_writes(captured, plan)


def _take_place(plan: Plan | Placement) -> TeamPosition:
    """This process's place in the plan. Raises PlanError unless one process was started for each of its devices."""
    sharding = plan.sharding if isinstance(plan, Plan) else UNSHARDED
    num_processes = plan.num_ranks * sharding.width
    if num_processes != dist.get_world_size():
        raise PlanError(
            f"The plan is for {num_processes} ranks, but {dist.get_world_size()} processes were started. "
            f"Start it with `torchrun --nproc-per-node {num_processes}` or `meshwright run`."
        )
    _check_software()
    return make_grid(sharding, dist.get_rank(), plan.num_ranks)


def _check_software() -> None:
    """Raise RunError unless all processes run the same torch and the same Meshwright."""
    if dist.get_backend() == "fake":
        return
    found: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(found, f"torch {torch.__version__}, meshwright {__version__}")
    for process, other in enumerate(found):
        if other != found[0]:
            raise RunError(
                f"Rank {process} runs {other}, rank 0 runs {found[0]}; expected equal versions on all ranks. "
                "Install the same versions on all hosts (constraints.txt has those that are tested)."
            )


def _shorten(plan: Plan | Placement, count: int) -> Plan:
    """The plan with fewer microbatches of the same size. Raises PlanError if that is not possible."""
    whole = plan.num_microbatches
    advice = f"Give batches of {plan.workload.global_batch} samples only (DataLoader: drop_last=True)."
    if isinstance(plan, Placement) or plan.is_asynchronous or any(stage.shares for stage in plan.stages):
        raise PlanError(
            f"A batch of {count} microbatches was given; expected {whole}, as planned: placements, asynchronous "
            f"schedules and unequal shares cannot run shorter batches. {advice}"
        )
    size = plan.workload.global_batch // whole
    try:
        shorter = replace(plan, num_microbatches=count, workload=replace(plan.workload, global_batch=size * count))
        check_runnable(shorter)
    except PlanError as error:
        raise PlanError(
            f"A batch of {count} microbatches was given, but the plan has {whole}: {error} {advice}"
        ) from None
    return shorter


def _make_steps(executor: Executor, plan: Plan | Placement, program: Program, rank: int) -> Steps:
    if isinstance(plan, Plan) and plan.is_asynchronous:
        return EndlessSteps(executor, program, rank, num_filling_steps(plan))
    return FlushingSteps(executor)


def _make_exchange(share: Holding, grid: TeamPosition) -> Exchange | None:
    """The buckets that this rank sums with others; None if it has none."""
    plan, held = share.plan, {stage.index for stage in share.stages}
    every = gradient_buckets(share.model.graph, plan)
    buckets = [
        (bucket, [share.parameters[tensor] for tensor in bucket.parameters])
        for bucket in every
        if held.intersection(bucket.stages)
    ]
    if not buckets:
        return None
    if isinstance(plan, Plan) and plan.schedule == WAVES:
        return WaveExchange(buckets)
    exchange = exchange_of(plan)
    parts = cut_parts(every, exchange)
    if exchange.shard_optimizer:
        sharded = []
        for bucket, parameters in buckets:
            sharing = exchange.shard_group_of(grid.rank, bucket.ranks)
            sharded.append(ShardedBucket(bucket, parameters, sharing.index(grid.rank), len(sharing)))
        return ShardedBuckets(sharded, parts)
    return BucketExchange([BucketBuffer(bucket, parameters) for bucket, parameters in buckets], parts)


def _make_agreements(
    share: Holding,
    updated: Mapping[int, torch.nn.Parameter],
    max_norm: float | None,
    grid: TeamPosition,
    transport: Transport,
    device: torch.device,
    hosted: Hosted | None,
) -> tuple[LossScale | None, NormClip | None]:
    """The numbers on which all ranks agree before an update: the scale of the loss, and the norm of all gradients."""
    plan = share.plan
    if not isinstance(plan, Plan):
        return None, None
    complete_gradients: Callable[[], None] = partial(_complete_gradients, share, updated, device)
    if hosted is not None:
        complete_gradients = hosted.readiness.complete
    index = len(cut_parts(gradient_buckets(share.model.graph, plan), plan.exchange).bucket)
    scale = None
    if plan.scales_loss:
        scale = LossScale(index, updated, complete_gradients, grid, transport, device, unscales=hosted is None)
    if max_norm is None:
        return scale, None
    shared_out = {i for i, own in updated.items() if own is not share.cut[i]}
    holders = count_holders(share.all_stages, plan, share.model.alike, shared_out)
    # Gradients are completed once.
    complete, index = (complete_gradients, index) if scale is None else (lambda: None, index + 1)
    inverse = (lambda: 1.0) if scale is None else (lambda: scale.inverse)
    return scale, NormClip(index, max_norm, updated, holders, complete, grid, transport, device, inverse)


def _complete_gradients(share: Holding, updated: Mapping[int, torch.nn.Parameter], device: torch.device) -> None:
    """Sum, on the device, the gradients of which the processes of a team have parts."""
    own, partial_ones = _gradients(updated), find_partial(share.model.graph)
    for stage in share.stages:
        here = {i: own[i].to(device) for i in stage.parameters if i in own and i in partial_ones}
        share.model.sum_parts(stage, here)
        for i in (i for i, item in here.items() if item is not own[i]):
            own[i].copy_(here[i])


def _gradients(parameters: Mapping[int, torch.nn.Parameter]) -> dict[int, torch.Tensor]:
    """This process's parts of the existing gradients, by parameter."""
    return {i: own_part(item.grad) for i, item in parameters.items() if item.grad is not None}


def _make_parts(share: Holding, ahead: Mapping[int, int]) -> tuple[Part, ...]:
    """Each stage's module as its program calls it: with backwards in two parts, or weights of several versions."""
    doing = _stages_doing(share.arranged)
    found: list[Part] = []
    for stage, module in zip(share.stages, share.modules, strict=True):
        if stage.index in doing[BackwardInput]:
            if any(isinstance(item, RecomputedRange) for item in module.modules()):
                raise PlanError(
                    "The plan recomputes layers under a schedule with split backwards (input and weight gradients "
                    "apart), both of which would recompute them; such a plan can only be simulated. Choose 1f1b, or "
                    "recompute nothing."
                )
            if isinstance(module, FSDPModule):
                raise PlanError(
                    "The plan shards gradients (ZeRO 2 or 3) under a schedule with split backwards (input and weight "
                    "gradients apart), which FSDP2 does not support; such a plan can only be simulated. Choose 1f1b, "
                    "or --zero 1 or 0."
                )
            found.append(SplitPart(module))
        elif stage.index in doing[Stash]:
            found.append(VersionedPart(module, ahead.get(stage.index, 0)))
        else:
            found.append(module)
    return tuple(found)


def _make_updates(
    share: Holding,
    updated: Mapping[int, torch.nn.Parameter],
    optimizer: OptimizerArgument,
    repair: Repair | None,
    stale: Mapping[int, int],
    clip: NormClip | None,
    scale: LossScale | None,
    hosted: Hosted | None,
) -> StageSteps:
    plan, model = share.plan, share.model
    scales: dict[int, float] = {}
    if isinstance(plan, Plan) and _updates_by_stage(plan):
        scales = {stage.index: 1.0 / minibatches_per_update(plan, stage.index) for stage in share.stages}
    masters = Masters(updated, plan.workload.numbers) if hosted is None else HostedValues(updated, hosted.pieces)
    trainable = [parameter for parameter in masters.updated.values() if parameter.requires_grad]
    shards_optimizer = isinstance(plan, Plan) and plan.exchange.shard_optimizer
    if shards_optimizer and not isinstance(optimizer, torch.optim.Optimizer):
        # Functions may use properties of parameters, such as their number of dims, which pieces do not have.
        optimizer = optimizer([item for item in share.cut.values() if item.requires_grad]) or optimizer
    own = own_optimizer(optimizer, trainable, share.replaced(masters.updated))
    if shards_optimizer:
        check_elementwise(own)
    steps: Callable[..., StageSteps] = StageSteps
    if hosted is not None:
        steps = partial(HostSteps, pieces=hosted.pieces, make_states=hosted.make_states)
    return steps(
        own,
        updated,
        share.stages,
        _stages_doing(share.arranged)[OptimizerStep],
        scales,
        rate=lambda stage, updates: repair.rate(stale.get(stage, 0), updates) if repair is not None else 1.0,
        # All gradients are completed before all ranks agree on a number.
        sum_parts=lambda stage: (
            model.sum_parts(share.all_stages[stage], _gradients(updated)) if clip is None and scale is None else None
        ),
        clip=clip.coefficient if clip is not None else None,
        masters=masters,
        scale=scale,
    )


def _updates_by_stage(plan: Plan | Placement) -> bool:
    return isinstance(plan, Plan) and plan.is_asynchronous


def _stages_doing(arranged: Mapping[SectionName, RankProgram]) -> Mapping[type[Instruction], tuple[int, ...]]:
    """The stages for which a rank executes some kind of instruction, in the order of execution."""
    found: defaultdict[type[Instruction], dict[int, None]] = defaultdict(dict)
    for section in arranged.values():
        for item in section.computations:
            found[type(item.instruction)][item.instruction.stage] = None
    return defaultdict(tuple, {kind: tuple(stages) for kind, stages in found.items()})


_HELD = ("input", "parameter", "buffer", "constant")


def check_placed_writes(captured: Captured, placement: Placement) -> None:
    """Raise PlanError if the placement does not match the graph, or separates ops that write to the same memory."""
    check_placement(placement, captured.graph)
    table = captured.table
    memory = [row.slot.storage if row.slot.storage >= 0 else -2 - i for i, row in enumerate(table.tensors)]
    stage_of = {op: index for index, stage in enumerate(placement.stages) for op in stage.ops}
    touching: dict[int, list[int]] = defaultdict(list)
    last_write: dict[int, int] = {}
    for op, row in enumerate(table.ops):
        for piece in dict.fromkeys(memory[i] for i in (*row.inputs, *row.outputs)):
            touching[piece].append(op)
        last_write.update((memory[i], op) for i in row.written)
    held = {memory[i] for i, row in enumerate(table.tensors) if row.role in _HELD}
    for piece, last in last_write.items():
        ops = [op for op in touching[piece] if op in stage_of and (piece in held or op <= last)]
        stages = sorted({stage_of[op] for op in ops})
        if len(stages) > 1:
            first, other = (next(op for op in ops if stage_of[op] == stage) for stage in stages[:2])
            names = captured.graph.ops[first].name, captured.graph.ops[other].name, captured.graph.ops[last].name
            raise PlanError(
                f"The placement has {names[0]!r} in stage {stages[0]} and {names[1]!r} in stage {stages[1]}, but both "
                f"use memory that {names[2]!r} writes in place, so one of them would read an old value. Place the "
                "graph again; if an operator of your own writes to its arguments, end its name with an underscore, or "
                "plan by layers with `meshwright plan`."
            )
