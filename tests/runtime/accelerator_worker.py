"""Plans of models, run dry on an accelerator that this machine does not have: an op that mixes devices fails.

``python -m tests.runtime.accelerator_worker MODEL...`` prints, for each model, layout and kind of step, a line of JSON
with what came of it. ``--unbound`` tries each once more with parts that keep the devices of the example batch.

Fake tensors on "cuda" need a build of torch with CUDA and a GPU. A Python backend for PrivateUse1 needs neither; it is
for the whole process. Its autocast casts nothing, so precisions are not tested here.
"""

from __future__ import annotations

import argparse
import itertools
import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.utils.backend_registration import _DummyBackendModule, _setup_privateuseone_for_python_backend

from meshwright.capture import capture_model
from meshwright.capture.module_devices import takes_device
from meshwright.spec import (
    GradientExchange,
    Graph,
    GraphError,
    Plan,
    PlanError,
    Sharding,
    StagePlan,
    Workload,
    write_document,
)
from meshwright.training import FakeModel, Job, dry_run
from meshwright.zoo import load_model

ONE, TWO, FOUR = ((0,),), ((0,), (1,)), ((0,), (1,), (2,), (3,))
# The ranks of each stage, and options of the plan.
LAYOUTS: dict[str, tuple[tuple[tuple[int, ...], ...], dict[str, Any]]] = {
    "1": (ONE, {}),
    "2": (TWO, {}),
    "4": (FOUR, {}),
    "tensor": (ONE, {"sharding": Sharding(tensor=2)}),
    "zero": (((0, 1),), {"exchange": GradientExchange(zero=3)}),
}
STEPS = {"forward": "1f1b", "whole": "1f1b", "parts": "zb-h1"}
# What it registers ends with it.
_AUTOCAST = torch.library.Library("_", "IMPL", "AutocastPrivateUse1")


class _Backend(_DummyBackendModule):
    """What FSDP2 asks of a device; streams and events of the CPU do nothing."""

    Stream, Event = torch.cpu.Stream, torch.cpu.Event
    stream, current_stream = staticmethod(torch.cpu.stream), staticmethod(torch.cpu.current_stream)


def make_device() -> torch.device:
    """Register the backend with torch and its fake process groups."""
    _setup_privateuseone_for_python_backend("accel", _Backend())
    _AUTOCAST.fallback(torch.library.fallthrough_kernel)
    dist.Backend.backend_capability["fake"].append("accel")
    return torch.device("accel:0")


def fake_model(reference: str, kind: Any) -> FakeModel:
    """The model captured without memory, for training or inference."""
    source = load_model(reference, fake=True)
    targets, loss = (source.targets, source.loss) if kind == "training" else ((), None)
    captured = capture_model(source.model, source.inputs, targets=targets, loss=loss, mode=kind, verify=False)
    mode = next(iter(source.model.parameters())).fake_mode  # type: ignore[attr-defined]
    return FakeModel(captured, (source.inputs, targets), mode)


def run_all(
    model: str, layouts: list[str], steps: list[str], folder: Path, device: torch.device, *, unbound: bool
) -> Iterator[dict[str, Any]]:
    """What came of each layout and kind of step; ``unbound``: once more with parts that keep the example's devices."""
    kinds = {step: "inference" if step == "forward" else "training" for step in steps}
    models = {kind: fake_model(model, kind) for kind in dict.fromkeys(kinds.values())}
    for layout, step in itertools.product(layouts, steps):
        fake = models[kinds[step]]
        plan = make_plan(model, fake.captured.graph, kinds[step], layout, STEPS[step])
        if plan is None:
            continue
        write_document(plan, folder / "plan.json")
        facts = {"model": model, "layout": layout, "step": step, "factories": count_factories(fake)}
        yield {**facts, "bound": True, **run_plan(folder / "plan.json", plan.num_devices, fake, device)}
        if unbound:
            with example_devices():
                yield {**facts, "bound": False, **run_plan(folder / "plan.json", plan.num_devices, fake, device)}


def make_plan(model: str, graph: Graph, kind: Any, layout: str, schedule: str) -> Plan | None:
    """The plan of two microbatches per replica; None if the model has fewer layers than stages."""
    ranks, options = LAYOUTS[layout]
    count, size = len(graph.layers), graph.batch_size or 1
    if count < len(ranks):
        return None
    bounds = [count * place // len(ranks) for place in range(len(ranks) + 1)]
    return Plan(
        model=model,
        graph_hash=graph.content_hash,
        cluster="",
        workload=Workload(kind=kind, global_batch=2 * size * len(ranks[0])),
        stages=tuple(
            StagePlan(start=start, stop=stop, ranks=own)
            for start, stop, own in zip(bounds[:-1], bounds[1:], ranks, strict=True)
        ),
        num_microbatches=2 * len(ranks[0]),
        schedule=schedule,
        **options,
    )


def run_plan(path: Path, num_processes: int, model: FakeModel, device: torch.device) -> dict[str, str]:
    """Whether all processes of a plan ran, or what the first that did not says."""
    try:
        for process in range(num_processes):
            dry_run(Job(plan=str(path), num_steps=1), process, model=model, device=device, optimizer=adamw)
    except (PlanError, GraphError) as refused:
        return {"found": "refused", "error": str(refused)}
    except Exception as failed:
        return {"found": "failed", "error": f"{type(failed).__name__}: {failed}"[:400]}
    return {"found": "ran", "error": ""}


def count_factories(model: FakeModel) -> int:
    """Ops that make tensors from numbers alone."""
    return sum(takes_device(row.node.target) for row in model.captured.table.ops)


@contextmanager
def example_devices() -> Iterator[None]:
    """Parts keep the devices that the example batch had."""
    with (
        patch("meshwright.capture.module_parts.bind_call", lambda _target, args, kwargs, _device: (args, kwargs)),
        patch("meshwright.capture.module_parts.takes_device", lambda _function: False),
    ):
        yield


def adamw(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer | None:
    """As `make_optimizer` makes it on a CUDA device, but for the kernel."""
    return torch.optim.AdamW(parameters, lr=1e-3) if parameters else None


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("models", nargs="+")
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=list(LAYOUTS))
    parser.add_argument("--steps", nargs="+", choices=STEPS, default=list(STEPS))
    parser.add_argument("--unbound", action="store_true")
    given = parser.parse_args()
    device = make_device()
    with tempfile.TemporaryDirectory() as folder:
        for model in given.models:
            for found in run_all(model, given.layouts, given.steps, Path(folder), device, unbound=given.unbound):
                print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
