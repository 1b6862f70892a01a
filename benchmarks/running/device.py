"""One CUDA device: our step against plain PyTorch's and against its prediction, forwards in bfloat16 by autocast.

Both arms run the same model on the same microbatches with the same AdamW; a pair is one step of each, alternated ABBA,
timed until the device has done all. Beside it plain PyTorch against itself, in as many pairs: no ratio says more than
that. Microbatches are so large that the device is the slower side, not the host. The prediction is that of `meshwright
simulate` from the tables that ship: nothing is measured before.
"""

from __future__ import annotations

import copy
import os
import socket
import time
from contextlib import closing

import numpy as np
import torch
import torch.distributed as dist
from harness import make_row, paired_ratios, prediction_row, ratio_row

from meshwright.capture import capture_model, flatten_batch
from meshwright.records.importing.public import DEVICES
from meshwright.runtime import join_group, open_session
from meshwright.simulator import simulate_plan
from meshwright.spec import Plan, StagePlan, Workload, load_cluster
from meshwright.zoo import load_model

PAIRS, QUICK_PAIRS, WARM_UP = 40, 6, 5
NUM_MICROBATCHES = 4
TARGET, PREDICTION_TARGET = 1.03, 0.10
MODELS = {
    "gpt2-small": 8,
    "gpt2-medium": 8,
    "gpt2-large": 4,
    "bert-base": 32,
    "resnet18": 256,
    "resnet50": 128,
    "vgg16": 64,
}


def rows(quick: bool):
    """Rows of each model; none without a device."""
    if not torch.cuda.is_available():
        return []
    kind = DEVICES.get(torch.cuda.get_device_name())
    found = []
    with one_rank():
        _, device = join_group("cuda")
        for name, microbatch in MODELS.items():
            try:
                found += compare(name, microbatch, device, kind, QUICK_PAIRS if quick else PAIRS)
            except torch.OutOfMemoryError:
                print(f"{name}: left out, it does not fit into this GPU's memory", flush=True)
            torch.cuda.empty_cache()
    return found


class one_rank:  # noqa: N801 - reads like a function
    """A process group of this process."""

    def __enter__(self) -> None:
        with closing(socket.create_server(("127.0.0.1", 0))) as free:
            port = free.getsockname()[1]
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": "0", "WORLD_SIZE": "1"}

    def __exit__(self, *_: object) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()


def compare(name: str, microbatch: int, device: torch.device, kind: str | None, pairs: int):
    """Rows of one model; that of its prediction only for a known kind of device."""
    source = load_model(name, batch_size=NUM_MICROBATCHES * microbatch)
    model = copy.deepcopy(source.model).to(device)
    captured = capture_model(source.model, source.inputs, targets=source.targets, loss=source.loss, verify=False)
    tensors = flatten_batch(captured, source.inputs, source.targets)
    cluster = f"1x{kind or 'cpu'}"
    plan = Plan(
        model=name,
        graph_hash=captured.graph.content_hash,
        cluster=cluster,
        workload=Workload(global_batch=NUM_MICROBATCHES * microbatch, precision="amp"),
        stages=(StagePlan(start=0, stop=len(captured.graph.layers), ranks=(0,)),),
        num_microbatches=NUM_MICROBATCHES,
    )
    session = open_session(captured, plan, torch.optim.AdamW, device=device)
    optimizer, steps = torch.optim.AdamW(model.parameters()), [0]

    def ours() -> None:
        session.run_step(steps[0], tensors)
        steps[0] += 1

    def theirs() -> None:
        parts = zip(*(item.to(device).split(microbatch) for item in (*source.inputs, *source.targets)), strict=True)
        for part in parts:
            inputs, targets = part[: len(source.inputs)], part[len(source.inputs) :]
            with torch.autocast(device.type, torch.bfloat16):
                loss = source.loss(model(*inputs), *targets) / NUM_MICROBATCHES
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    def timed(step) -> float:
        start = time.perf_counter()
        step()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - start

    for _ in range(WARM_UP):
        timed(ours), timed(theirs)
    own, plain = paired_ratios(lambda: timed(ours), lambda: timed(theirs), pairs)
    session.close()
    one, other = paired_ratios(lambda: timed(theirs), lambda: timed(theirs), pairs)
    found = [
        ratio_row(f"{name}, step against plain PyTorch", own, plain, target=TARGET),
        ratio_row(f"{name}, plain PyTorch against itself", one, other),
    ]
    if kind is not None:
        predicted = simulate_plan(plan, captured.graph, load_cluster(cluster)).step_time_s
        off = abs(predicted / float(np.median(own)) - 1)
        found.append(prediction_row(f"{name}, predicted", predicted, own))
        found.append(make_row(f"{name}, relative error", off, "", target=PREDICTION_TARGET))
    return found


NOTES = f"One {torch.cuda.get_device_name()}." if torch.cuda.is_available() else "One GPU: **not run**, none was there."
