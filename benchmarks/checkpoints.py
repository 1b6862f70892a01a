"""What a checkpoint costs a run of two ranks (gloo, one thread each): 20 steps with one and without, alternated.

    background    `save_checkpoint(in_background=True)` after the first of the 20 steps, as `meshwright run` saves
    blocking      `save_checkpoint`, which returns when the checkpoint is written
    dcp           torch.distributed.checkpoint.async_save of the whole model and optimizer under DDP, with its defaults

Models of two sizes under data parallelism, ZeRO 1 and a pipeline. The ratio is that of the times of a block of 20
steps with a checkpoint and of the block without one beside it. Folders are on the disk of temporary files.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from harness import Row, publish_sections, ratio_row

STEPS, TARGET, TIMEOUT_S = 20, 1.03, 1500
MODELS = {"gpt-tiny": {"batch_size": 16}, "resnet-tiny": {"batch_size": 32}}
LAYOUTS = ("DDP", "ZeRO 1", "pipeline")
BLOCKS = {True: 3, False: 6}


def run_rank(model: str, layout: str, blocks: int, folder: Path) -> None:
    """As a rank: train blocks of 20 steps, each with another arm; rank 0 prints the seconds of all."""
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict

    from meshwright import prepare
    from meshwright.capture import capture_model
    from meshwright.spec import GradientExchange, Plan, StagePlan, Workload
    from meshwright.training.job import make_batches
    from meshwright.zoo import load_model

    torch.set_num_threads(1)
    source = load_model(model, **MODELS[model])
    batch = (source.inputs, source.targets)
    captured = capture_model(source.model, source.inputs, targets=source.targets, loss=source.loss, verify=False)
    count, size = len(captured.graph.layers), MODELS[model]["batch_size"]
    bounds = [(0, count // 2, (0,)), (count // 2, count, (1,))] if layout == "pipeline" else [(0, count, (0, 1))]
    plan = Plan(
        model=model,
        graph_hash=captured.graph.content_hash,
        cluster="2xcpu",
        workload=Workload(global_batch=size),
        stages=tuple(StagePlan(start=start, stop=stop, ranks=ranks) for start, stop, ranks in bounds),
        num_microbatches=4,
        exchange=GradientExchange(zero=int(layout == "ZeRO 1")),
    )
    trainer = prepare(
        source.model,
        source.loss,
        lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
        batch,
        plan=plan,
        verify=False,
    )
    batches = make_batches(source, size)
    for _ in range(3):
        trainer.step(*next(batches))
    trainer.save_checkpoint(folder / "first")
    own = torch.optim.AdamW(source.model.parameters())
    arms = ["none", "background", "blocking", *(["dcp"] if layout == "DDP" else [])]
    gloo, number = dist.new_group(backend="gloo"), 0

    def block(arm: str) -> float:
        nonlocal number
        dist.barrier()
        start, response = time.perf_counter(), None
        for step in range(STEPS):
            trainer.step(*next(batches))
            if step == 0 and arm in ("background", "blocking"):
                trainer.save_checkpoint(folder / "kept", keep=1, in_background=arm == "background")
            if step == 0 and arm == "dcp":
                number += 1
                weights, states = get_state_dict(source.model, own)
                response = dcp.async_save(
                    {"model": weights, "optimizer": states}, checkpoint_id=folder / f"dcp-{number}", process_group=gloo
                )
        dist.barrier()
        seconds = time.perf_counter() - start
        trainer.wait_for_checkpoint()
        if response is not None:
            response.result()
            if dist.get_rank() == 0:
                shutil.rmtree(folder / f"dcp-{number}")
        return seconds

    # The optimizer of the arm dcp needs states of the same size as the run's.
    for parameter in source.model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    own.step()
    own.zero_grad()
    seconds: dict[str, list[float]] = {arm: [] for arm in arms}
    for place in range(blocks):
        for arm in arms if place % 2 == 0 else reversed(arms):
            seconds[arm].append(block(arm))
    if dist.get_rank() == 0:
        parts = sum(path.stat().st_size for path in (folder / "first").rglob("*.safetensors"))
        print(json.dumps({"seconds": seconds, "bytes": parts}), flush=True)
    trainer.close()
    dist.barrier()


def measure(model: str, layout: str, blocks: int) -> dict[str, object]:
    """Start the two ranks; what rank 0 printed."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [*command, __file__, "rank", model, layout, str(blocks), folder],
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            check=False,
        )
    if done.returncode:
        raise SystemExit(done.stderr[-4000:])
    return json.loads(done.stdout.strip().splitlines()[-1])


def cost(quick: bool) -> list[Row]:
    """The ratios of all models and layouts."""
    rows = []
    for model in MODELS:
        for layout in LAYOUTS:
            found = measure(model, layout, BLOCKS[quick])
            seconds = {arm: np.array(values) for arm, values in found["seconds"].items()}
            step_ms = 1e3 * statistics.median(seconds["none"]) / STEPS
            name = f"{model}, {layout}, {found['bytes'] / 1e6:.1f} MB, step {step_ms:.0f} ms"
            for arm in seconds:
                if arm != "none":
                    target = TARGET if arm == "background" else None
                    rows.append(ratio_row(f"{name}: {arm}", seconds[arm], seconds["none"], target))
    return rows


if __name__ == "__main__":
    if sys.argv[1:2] == ["rank"]:
        run_rank(sys.argv[2], sys.argv[3], int(sys.argv[4]), Path(sys.argv[5]))
    else:
        sys.exit(publish_sections("checkpoints", str(__doc__), {"cost": cost}))
