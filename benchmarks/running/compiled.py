"""Compiled layers against torch.compile as its users write it: under DDP, and block by block under FSDP2.

As in `speed`: two ranks, one pinned thread each, the same SGD and microbatches, pairs alternated ABBA, the slower
rank's time, an A/A pair beside. DDP's module is compiled as a whole, which torch cuts where buckets end. Beside them
the same plan without compiling, and how long compiling took.
"""

from __future__ import annotations

import numpy as np
import torch
import torch._dynamo
from harness import make_row, paired_ratios, ratio_row
from running.speed import (
    BY_BLOCKS,
    MODELS,
    PAIRS,
    QUICK_PAIRS,
    capture_zoo,
    ddp_step,
    fsdp_step,
    make_plan,
    our_step,
    plans_of,
    timed,
)

from meshwright.measurement import run_ranks

TARGET = 1.05
NOTES = ""


def compare(_context, name, pairs):
    """Ratios of one model, on one rank, and seconds of compiling."""
    captured, tensors = capture_zoo(name)
    _, everything = plans_of(captured.graph)
    found, seconds = {}, {}
    arms = [("DDP", 0, lambda: ddp_step(captured, tensors, 25, compiled=True))]
    if name in BY_BLOCKS:
        arms.append(("FSDP2", 3, lambda: fsdp_step(name, 3, compiled=True)))
    for label, zero, make_theirs in arms:
        theirs = timed(make_theirs())
        plan = make_plan(captured.graph, everything, "1f1b", zero)
        # Each session has hooks on its model's parameters.
        eager_step, eager = our_step(capture_zoo(name)[0], plan, tensors)
        ours_step, session = our_step(
            captured, make_plan(captured.graph, everything, "1f1b", zero, compiled=True), tensors
        )
        compilation = session.model.compilation
        assert not compilation.left_out, compilation.left_out
        seconds[f"{name}, {label}"] = compilation.seconds
        ours = timed(ours_step)
        for warm in (ours, theirs, ours, theirs, ours, theirs):
            warm()
        found[f"{name}, compiled, against torch.compile under {label}"] = paired_ratios(ours, theirs, pairs)
        found[f"{name}, A/A (torch.compile under {label})"] = paired_ratios(theirs, theirs, pairs)
        plain = timed(eager_step)
        plain(), plain()
        found[f"{name}, compiled against not compiled, {label}'s layout"] = paired_ratios(ours, plain, pairs)
        session.close()
        eager.close()
        torch._dynamo.reset()
    return found, seconds


def rows(quick: bool):
    """One row per comparison."""
    found = []
    for name in MODELS:
        results, seconds = run_ranks(compare, name, QUICK_PAIRS if quick else PAIRS, num_ranks=2, timeout_s=1500)[0]
        for label, (ours, theirs) in results.items():
            target = TARGET if "against torch" in label else None
            found.append(ratio_row(label, ours, theirs, target))
        found += [
            make_row(f"{label}: seconds of compiling", float(np.float64(each)), "s") for label, each in seconds.items()
        ]
    return found
