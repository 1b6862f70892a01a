"""Recomputed parts: against torch's own checkpointing, and steps as predicted and as measured.

Speed: as in `speed`, two ranks with one pinned thread each, the same SGD and microbatches, pairs alternated ABBA, the
slower rank's time, an A/A pair beside. Theirs is the plain model under DDP whose blocks run under torch's checkpoint,
for ``op`` with `create_selective_checkpoint_contexts` and the policy of torchtitan; ours is a plan of two replicas.
Predictions: as in `predictions`, of plans that compute parts again.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import partial

import torch
from harness import paired_ratios, prediction_row, ratio_row, score_row
from running import predictions
from running.predictions import Configuration
from running.speed import (
    MICROBATCH_SIZE,
    MODELS,
    NUM_MICROBATCHES,
    PAIRS,
    QUICK_PAIRS,
    capture_zoo,
    make_plan,
    make_sgd,
    our_step,
    plans_of,
    timed,
)
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts, noop_context_fn

from meshwright.measurement import run_ranks
from meshwright.spec import load_shipped_graph, read_recompute
from meshwright.zoo import load_model

TARGET = 1.03
NAME = "llama"
PREDICTED_TARGET = 0.10
NOTES = "Predictions: value = predicted, baseline = measured (median)."
PREDICTED = [
    ("gpt-tiny", "data", "op"),
    ("gpt-tiny", "1f1b", "op"),
    ("gpt-tiny", "1f1b", "full@0,none@1"),
    ("llama-tiny", "data", "op"),
    ("llama-tiny", "1f1b", "op"),
    ("llama-tiny", "data", "every-2"),
    ("llama-tiny", "1f1b", "attention"),
]
_aten = torch.ops.aten
_SAVED = {
    _aten.mm.default,
    _aten.addmm.default,
    _aten.bmm.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
}


def every_second_product():
    """What torchtitan's policy saves (torchtitan/distributed/activation_checkpoint.py, SelectiveAC)."""
    count = {False: 0, True: 0}

    def policy(context, kernel, *_, **__):
        is_product = kernel == _aten.mm.default
        count[context.is_recompute] += is_product
        saves = kernel in _SAVED and not (is_product and count[context.is_recompute] % 2 == 0)
        return CheckpointPolicy.MUST_SAVE if saves else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


CONTEXTS = {"op": every_second_product, "full": noop_context_fn}


def torch_step(word):
    """DDP as its users write it, its blocks under checkpoint."""
    reference, sizes = MODELS[NAME]
    source = load_model(reference, batch_size=NUM_MICROBATCHES * MICROBATCH_SIZE, **sizes)
    for block in source.model.blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False, context_fn=CONTEXTS[word])
    wrapped = DistributedDataParallel(source.model, bucket_cap_mb=25, gradient_as_bucket_view=True)
    optimizer = make_sgd(wrapped.parameters())
    tensors = (source.inputs[0], source.targets[0])
    rows = [
        [tensor[m * MICROBATCH_SIZE : (m + 1) * MICROBATCH_SIZE] for tensor in tensors]
        for m in range(torch.distributed.get_rank(), NUM_MICROBATCHES, 2)
    ]

    def step():
        for inputs, targets in rows[:-1]:
            with wrapped.no_sync():
                (source.loss(wrapped(inputs), targets) / len(rows)).backward()
        inputs, targets = rows[-1]
        (source.loss(wrapped(inputs), targets) / len(rows)).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def compare(_context, pairs):
    """Ratios of all words, on one rank."""
    found = {}
    for word in CONTEXTS:
        captured, tensors = capture_zoo(NAME)
        again = read_recompute(captured.graph, word)
        plan = make_plan(captured.graph, plans_of(captured.graph)[1], "1f1b")
        ours_step, session = our_step(captured, replace(plan, recompute=again.ranges, keeps=again.keeps), tensors)
        ours, theirs = timed(ours_step), timed(torch_step(word))
        for warm in (ours, theirs, ours, theirs):
            warm()
        found[f"{NAME}, {word}, against torch's checkpoint under DDP"] = paired_ratios(ours, theirs, pairs)
        found[f"{NAME}, {word}, A/A (torch's checkpoint)"] = paired_ratios(theirs, theirs, pairs)
        session.close()
    return found


def rows(quick: bool):
    """Ratios, one row per prediction, and their score."""
    results = run_ranks(compare, QUICK_PAIRS if quick else PAIRS, num_ranks=2, timeout_s=1500)[0]
    found = [
        ratio_row(label, ours, theirs, TARGET if "against torch" in label else None)
        for label, (ours, theirs) in results.items()
    ]
    steps, scored = predictions.QUICK_STEPS if quick else predictions.NUM_STEPS, []
    for model, kind, word in PREDICTED:
        graph, configuration = load_shipped_graph(model), Configuration(model=model, kind=kind, microbatch=8)
        plan = predictions.make_plan(configuration, graph)
        again = read_recompute(graph, word, plan.bounds)
        plan = replace(plan, recompute=again.ranges, keeps=again.keeps)
        before, _ = predictions.measure(plan, steps // 2)
        predicted = predictions.predict(configuration, plan, graph).step_time_s
        after, _ = predictions.measure(plan, steps // 2)
        seconds = torch.tensor([before, after])[:, predictions.WARM_UP :].flatten().numpy()
        scored.append(prediction_row(f"{configuration.name}, {word}", predicted, seconds))
        print(f"{scored[-1].name}: predicted {predicted:.4f} s, measured {scored[-1].baseline:.4f} s", file=sys.stderr)
    return [*found, *scored, score_row(scored, PREDICTED_TARGET)]
