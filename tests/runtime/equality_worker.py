"""The ranks of the equality tests: every case of a world size, compared with a serial loop.

Models are captured once, before the ranks are forked; tests of `training` let every rank capture for itself.

The reference knows nothing of the executor: it is an eager loop over the same microbatches, seeded per microbatch.
Batch-norm statistics are those of replica 0: after a microbatch that another replica of the buffer's stage computes,
they are put back.
"""

from __future__ import annotations

import copy
import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from meshwright.capture import capture_model, flatten_batch
from meshwright.program import with_schedule
from meshwright.runtime import microbatch_seed, open_session
from meshwright.spec import GradientExchange, Plan, StagePlan, Workload, read_recompute, slice_graph, with_branches
from meshwright.training.checkpoint import gather_state
from tests.processes import fork_prepared
from tests.runtime.cases import FEW, MICROBATCH_SIZE, NUM_STEPS, RUN_SEED, all_cases, main_cases, on
from tests.runtime.delayed import call
from tests.runtime.matrix import cases_of_run
from tests.runtime.models import MODELS


def make_optimizer(name, parameters, dtype):
    if name == "adamw":
        return torch.optim.AdamW(parameters, lr=0.01)
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def make_plan(graph, layout):
    count, stages, rank, schedule = len(graph.layers), [], 0, layout.schedule
    for index, item in enumerate(layout.stages):
        start, stop = (count * place // len(layout.stages) for place in (index, index + 1))
        if isinstance(item, on):
            stages.append(StagePlan(start=start, stop=stop, ranks=item.ranks))
            continue
        replicas, shares = (item, ()) if isinstance(item, int) else (len(item), item)
        stages.append(StagePlan(start=start, stop=stop, ranks=tuple(range(rank, rank + replicas)), shares=shares))
        rank += replicas
    own = schedule.removeprefix("own-")
    again = read_recompute(graph, layout.again, [(stage.start, stage.stop) for stage in stages])
    plan = Plan(
        model="test",
        graph_hash=graph.content_hash,
        cluster="test",
        workload=Workload(global_batch=MICROBATCH_SIZE * layout.num_microbatches),
        stages=tuple(stages),
        num_microbatches=layout.num_microbatches,
        recompute=again.ranges,
        keeps=again.keeps,
        exchange=GradientExchange(bucket_bytes=2000, overlap=schedule != "gpipe"),
    )
    plan = with_branches(plan, graph)
    return with_schedule(plan, schedule if own == schedule else f"tests/runtime/schedules.py:{own}")


class SerialLoops:
    """Serial loops of one model over the same batches; cases that differ in the layout only share one."""

    def __init__(self, case, state):
        self.case = case
        self.state = state
        self._batches = {}
        self._known = {}

    def batches(self, num_microbatches, num_steps=NUM_STEPS):
        """The batches of all steps."""
        if num_microbatches not in self._batches:
            torch.manual_seed(99)
            size = MICROBATCH_SIZE * num_microbatches
            self._batches[num_microbatches] = [self.case.make_batch(size) for _ in range(num_steps)]
        return self._batches[num_microbatches]

    def train(self, plan, graph, optimizer_name):
        """The state after training, and the losses."""
        replicas = buffer_replicas(plan, graph)
        count = plan.num_microbatches
        key = optimizer_name, count, tuple(replicas.items())
        if key not in self._known:
            batches = self.batches(count)
            self._known[key] = serial_reference(self.case, self.state, batches, replicas, optimizer_name, count)
        return self._known[key]


def buffer_replicas(plan, graph):
    """By the name of each buffer, the replica of its stage that computes each microbatch."""
    return {
        graph.tensors[buffer].name: plan.stages[stage.index].turns
        for stage in slice_graph(graph, plan.bounds)
        for buffer in stage.buffers
    }


def serial_reference(case, state, batches, replicas, optimizer_name, num_microbatches):
    """Train a fresh copy of the model in one process; returns its state and the losses."""
    model = copy.deepcopy(case.model)
    model.load_state_dict(state)
    model.train()
    optimizer = make_optimizer(optimizer_name, model.parameters(), None)
    losses = []
    for step, (inputs, targets) in enumerate(batches):
        total = 0.0
        for m in range(num_microbatches):
            rows = slice(m * MICROBATCH_SIZE, (m + 1) * MICROBATCH_SIZE)
            before = {name: buffer.clone() for name, buffer in model.named_buffers()}
            torch.manual_seed(microbatch_seed(RUN_SEED, step, m))
            loss = case.loss(call(model, inputs, rows), *(y[rows] for y in targets))
            (loss / num_microbatches).backward()
            for name, buffer in model.named_buffers():
                turns = replicas.get(name, (0,))
                if turns[m % len(turns)]:
                    buffer.copy_(before[name])
            total += loss.item() / num_microbatches
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return model.state_dict(), losses


def relative_error(found, wanted):
    if not wanted.dtype.is_floating_point:
        return float((found != wanted).any())
    scale = wanted.double().norm().item()
    return (found.double() - wanted.double()).norm().item() / (scale or 1.0)


def run_case(captured, loops, layout):
    case, state, graph, optimizer_name = loops.case, loops.state, captured.graph, layout.optimizer
    plan = make_plan(graph, layout)
    case.model.load_state_dict(state)
    session = open_session(
        captured, plan, lambda parameters: make_optimizer(optimizer_name, parameters, None), run_seed=RUN_SEED
    )
    found, losses = train_session(case, captured, session, loops.batches(plan.num_microbatches))
    if found is None:
        return None
    wanted, wanted_losses = loops.train(plan, graph, optimizer_name)
    assert found.keys() == wanted.keys()
    return errors(found, wanted, state, losses, wanted_losses)


def train_session(case, captured, session, batches):
    """Train on all batches and end the session; the state on rank 0 (None on others), and the losses."""
    losses = []
    for step, (inputs, targets) in enumerate(batches):
        tensors = flatten_batch(captured, inputs, targets)
        mine = session.run_step(step, tensors).get(captured.graph.outputs[0], [])
        total = sum((loss.value.double() for loss in mine), torch.zeros((), dtype=torch.float64))
        total /= session.plan.num_microbatches
        dist.all_reduce(total)
        losses.append(total.item())
    found = gather_state(case.model, session)
    session.close()
    for parameter in case.model.parameters():
        parameter.grad = None
    return found, losses


def errors(found, wanted, state, losses, wanted_losses):
    """How far a state is from the one that was wanted, and from where it began."""
    return {
        "tensors": {name: relative_error(found[name], wanted[name]) for name in wanted},
        "moved": max(relative_error(state[name], wanted[name]) for name in wanted),
        "losses": [losses, wanted_losses],
    }


def run_models(models, cases_of, world_size: str, dtype_name: str, out: str, run=run_case) -> None:
    """Train every model in its cases for a world size, ``cases_of(model, size)``; rank 0 writes the results."""
    torch.set_num_threads(1)
    torch.set_default_dtype(getattr(torch, dtype_name))
    # A model without a case is not captured.
    models = {name: make for name, make in models.items() if cases_of(name, int(world_size))}
    fork_prepared(
        int(world_size),
        lambda: {name: capture_case(make) for name, make in models.items()},
        lambda captured: train_all(captured, cases_of, int(world_size), Path(out), run),
    )


def capture_case(make):
    torch.manual_seed(5)
    case = make()
    case.model.train()
    torch.manual_seed(7)
    inputs, targets = case.make_batch(MICROBATCH_SIZE + 1)
    captured = capture_model(case.model, inputs, targets=targets, loss=case.loss, verify=False)
    return captured, SerialLoops(case, {key: value.clone() for key, value in case.model.state_dict().items()})


def train_all(captured_models, cases_of, world_size, out, run):
    dist.init_process_group("gloo")
    results = {}
    for name, (captured, loops) in captured_models.items():
        for layout in cases_of(name, world_size):
            result = run(captured, loops, layout)
            if result is not None:
                results[f"{name}/{layout.key}"] = result
    if dist.get_rank() == 0:
        out.write_text(json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    size, which, *others = sys.argv[1:]
    run_models(MODELS, cases_of_run(which, main_cases, all_cases, FEW), size, *others)
