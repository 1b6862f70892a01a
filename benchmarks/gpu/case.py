"""One case of the GPU check: steps of our session beside those of plain PyTorch, on the same device in one process.

Both arms train the same model on the same microbatch, which is on the device, with the same AdamW (fused on GPUs). A
pair is one step of each, alternated ABBA; each is waited for. Issuing ends when the call returns, before the device is
done. Plain PyTorch is what a user would write:

    amp         float32 weights; forward and loss under autocast to bfloat16
    bfloat16    ``model.bfloat16()``
    mixed       ``model.bfloat16()``; the optimizer updates float32 copies of the weights, which are copied back
    compiled    ``torch.compile(model)``, whole; the loss is not compiled

The prediction is that of `meshwright simulate` from the tables that ship. Everything up to the device is made ready
while other cases are timed (`rows.DeviceLock`).
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import os
import socket
import statistics
import time
from contextlib import closing, nullcontext
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from gpu.rows import REPEATS, Case, DeviceLock, RowFile, choose_cases
from harness import paired_ratios
from torch.profiler import ProfilerActivity, profile
from torch.utils import _pytree as pytree

from meshwright.capture import Captured, capture_model, flatten_batch
from meshwright.host import name_gpu
from meshwright.runtime import join_group, open_session
from meshwright.simulator import simulate_plan
from meshwright.spec import DocumentError, Optimizer, Plan, StagePlan, Workload, load_cluster, write_document
from meshwright.spec.own_code import own_loss
from meshwright.training import make_optimizer
from meshwright.training.precision import bind_plan, capture_in_precision, cast_batch, cast_type, recaptures
from meshwright.zoo import ModelSource, load_model
from meshwright.zoo.source import call_forward

WARM_UP, IN_A_ROW, ROW_STEPS = 5, 8, 8
# Small enough that no loss leaves the range of bfloat16.
LEARNING_RATE = 1e-5


class one_rank:  # noqa: N801 - reads like a function
    """A process group of this process."""

    def __enter__(self) -> None:
        with closing(socket.create_server(("127.0.0.1", 0))) as free:
            port = free.getsockname()[1]
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": "0", "WORLD_SIZE": "1"}

    def __exit__(self, *_: object) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """What a case has before it comes to the device: ``model`` is for plain PyTorch, the other one is captured."""

    source: ModelSource
    model: torch.nn.Module
    captured: Captured
    plan: Plan
    predicted_s: float | None


def runnable(case: Case) -> str:
    """The precision of the plan: a torch whose gradients have the type of their parameters has no float32 ones."""
    has_own_types = hasattr(torch.Tensor, "grad_dtype")
    return "mixed-bf16-gradients" if case.precision == "mixed" and not has_own_types else case.precision


def prepare_case(case: Case, out: Path, device_name: str) -> Prepared:
    """Capture the model, write its plan and graph into ``out``/plans, and predict its step."""
    source = load_model(case.model, batch_size=case.batch)
    model = copy.deepcopy(source.model)
    capture = partial(capture_model, source.model, loss=source.loss, verify=False)
    given = captured = capture(source.inputs, targets=source.targets)
    plan = Plan(
        model=case.model,
        graph_hash=captured.graph.content_hash,
        cluster=f"1x{name_gpu(device_name)}",
        workload=Workload(global_batch=case.batch, precision=runnable(case), optimizer=Optimizer(kind="adamw")),
        stages=(StagePlan(start=0, stop=len(captured.graph.layers), ranks=(0,)),),
        num_microbatches=1,
        compiled=case.compiled,
    )
    folder = out / "plans"
    folder.mkdir(exist_ok=True)
    write_document(plan, folder / f"{case.name}.plan.json")
    write_document(given.graph, folder / f"{case.name}.graph.json")
    try:
        predicted_s = simulate_plan(plan, given.graph, load_cluster(plan.cluster)).step_time_s
    except DocumentError:  # a kind of GPU that does not ship
        predicted_s = None
    if recaptures(plan, source.model, given.graph):
        captured, _ = capture_in_precision(plan, source.model, (source.inputs, source.targets), given, capture)
        plan = bind_plan(plan, given.graph, captured.graph)
    return Prepared(source=source, model=model, captured=captured, plan=plan, predicted_s=predicted_s)


class Arm:
    """A step that is called again and again: seconds until the device is done, and those of issuing beside."""

    def __init__(self, step, device: torch.device) -> None:
        self._step, self._device = step, device
        self.issue_s: list[float] = []

    def wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def __call__(self) -> float:
        start = time.perf_counter()
        self._step()
        self.issue_s.append(time.perf_counter() - start)
        self.wait()
        return time.perf_counter() - start

    def in_a_row(self) -> float:
        """Seconds a step where many are issued without waiting, as a training loop does."""
        start = time.perf_counter()
        for _ in range(IN_A_ROW):
            self._step()
        self.wait()
        return (time.perf_counter() - start) / IN_A_ROW


class PlainStep:
    """A training step in plain PyTorch."""

    def __init__(self, case: Case, prepared: Prepared, device: torch.device) -> None:
        source, self._case = prepared.source, case
        self._model = prepared.model.to(device)
        batch = pytree.tree_map_only(torch.Tensor, lambda item: item.to(device), (source.inputs, source.targets))
        if case.precision != "amp":
            self._model, batch = self._model.bfloat16(), cast_batch(batch, torch.bfloat16)
        self._inputs, self._targets = batch
        self._loss = source.loss
        self._forward = torch.compile(self._model) if case.compiled else self._model
        self._autocast = (
            partial(torch.autocast, device.type, torch.bfloat16) if case.precision == "amp" else nullcontext
        )
        self._parameters = [item for item in self._model.parameters() if item.requires_grad]
        self._masters: list[torch.nn.Parameter] = []
        if case.precision == "mixed":
            self._masters = [torch.nn.Parameter(item.detach().float()) for item in self._parameters]
        self._optimizer = make_optimizer(self._masters or self._parameters, Optimizer(kind="adamw"), LEARNING_RATE)

    def __call__(self, mark=lambda: None) -> None:
        """Train one step; ``mark`` is called before it and behind forward, backward and update."""
        mark()
        with self._autocast():
            # What the model gave lives as long as the step: a training loop has a name for it.
            outputs = call_forward(self._forward, self._inputs)
            loss = own_loss(outputs) if self._loss is None else self._loss(outputs, *self._targets)
        mark()
        loss.backward()
        mark()
        self._update()
        mark()

    def _update(self) -> None:
        if not self._masters:
            self._optimizer.step()
            self._optimizer.zero_grad()
            return
        for master, parameter in zip(self._masters, self._parameters, strict=True):
            master.grad = None if parameter.grad is None else parameter.grad.float()
            parameter.grad = None
        self._optimizer.step()
        self._optimizer.zero_grad()
        with torch.no_grad():
            torch._foreach_copy_(self._parameters, self._masters)


def describe_plain(step: PlainStep, arm: Arm) -> dict[str, float]:
    """What ``steps_cuda.csv`` holds of a row, by the definitions there; by CUDA events and torch's profiler."""
    torch.cuda.reset_peak_memory_stats()
    parts, waited, issued = [], [], []
    for _ in range(ROW_STEPS):
        events = [torch.cuda.Event(enable_timing=True) for _ in range(4)]
        coming = iter(events)
        start = time.perf_counter()
        step(lambda coming=coming: next(coming).record())
        issued.append(time.perf_counter() - start)
        arm.wait()
        waited.append(time.perf_counter() - start)
        parts.append([events[i].elapsed_time(events[i + 1]) / 1e3 for i in range(3)])
    forward_s, backward_s, optimizer_s = (statistics.median(column) for column in zip(*parts, strict=True))
    found = {
        "seconds_in_a_row": arm.in_a_row(),
        "seconds_waited": statistics.median(waited),
        "forward_s": forward_s,
        "backward_s": backward_s,
        "optimizer_s": optimizer_s,
        "issue_s": statistics.median(issued),
        "peak_bytes": torch.cuda.max_memory_allocated(),
        "reserved_bytes": torch.cuda.max_memory_reserved(),
    }
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        step()
        arm.wait()
    of_ops = [row for row in seen.key_averages() if "CPU" in str(row.device_type)]
    named = [row for row in of_ops if not row.key.startswith(("ProfilerStep", "Optimizer"))]
    return {**found, "device_s": sum(row.self_device_time_total for row in named) / 1e6}


def run_case(case: Case, out: Path, kind: str, rows: RowFile) -> None:
    """Prepare a case, wait for the device, and time the repeats that the file lacks."""
    begin = time.perf_counter()
    lock = DeviceLock(out)
    prepared = prepare_case(case, out, str(rows.here["device"]))
    prepared_s = time.perf_counter() - begin
    # Compiling takes long and is not timed: the compiled cases do it together, beside the tests.
    lock.share() if case.compiled else lock.take()
    turn = time.perf_counter()
    with one_rank():
        _, device = join_group(kind)
        step = PlainStep(case, prepared, device)
        plain = Arm(step, device)
        for _ in range(WARM_UP):
            plain()
        # Of plain PyTorch alone, before ours holds memory.
        facts = describe_plain(step, plain) if device.type == "cuda" and not case.compiled else {}
        captured, source = prepared.captured, prepared.source
        optimizer = partial(make_optimizer, optimizer=Optimizer(kind="adamw"), lr=LEARNING_RATE)
        session = open_session(captured, prepared.plan, optimizer, device=device)
        dtype = cast_type(prepared.plan)
        tensors = [item.to(device) for item in flatten_batch(captured, source.inputs, source.targets)]
        tensors = tensors if dtype is None else cast_batch(tensors, dtype)
        numbers = iter(range(10**9))
        own = Arm(lambda: session.run_step(next(numbers), tensors), device)
        for _ in range(WARM_UP):
            own(), plain()
        lock.take()
        held = {row["repeat"] for row in rows.of_job("repeat", case.name)}
        for repeat in sorted(set(range(REPEATS)) - held):
            time_repeat(case, repeat, own, plain, rows)
        compilation = session.model.compilation
        rows.add(
            "done",
            case.name,
            **vars(case),
            plan_precision=prepared.plan.workload.precision,
            predicted_s=prepared.predicted_s,
            plain=facts,
            compiled_units=compilation.num_units,
            left_out=dict(compilation.left_out) | ({compilation.refused: 1} if compilation.refused else {}),
            prepared_s=round(prepared_s, 3),
            seconds=round(time.perf_counter() - turn, 3),
            date=datetime.now(UTC).strftime("%Y-%m-%d"),
        )
        # The next one comes to the device while this one leaves it.
        lock.give_back()
        session.close()


def time_repeat(case: Case, repeat: int, own: Arm, plain: Arm, rows: RowFile) -> None:
    """A fresh set of pairs, and steps of ours in a row."""
    gc.collect()
    began = time.time()
    own.issue_s, plain.issue_s = [], []
    own_s, plain_s = paired_ratios(own, plain, int(rows.here["pairs"]))
    columns = {
        "own_s": own_s.tolist(),
        "plain_s": plain_s.tolist(),
        "own_issue_s": own.issue_s,
        "plain_issue_s": plain.issue_s,
    }
    rounded = {name: [round(value, 7) for value in values] for name, values in columns.items()}
    in_a_row_s = own.in_a_row()
    seconds = time.time() - began
    rows.add("repeat", case.name, repeat=repeat, began=began, seconds=seconds, in_a_row_s=in_a_row_s, **rounded)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("case")
    parser.add_argument("--device", choices=("cuda", "cpu"), required=True)
    parser.add_argument("--here", type=json.loads, required=True)
    options = parser.parse_args()
    cases = {case.name: case for quick in (False, True) for case in choose_cases(quick)}
    run_case(cases[options.case], options.out, options.device, RowFile(options.out, options.here))


if __name__ == "__main__":
    main()
