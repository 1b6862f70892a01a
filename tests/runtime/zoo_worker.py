"""One rank of the zoo's equality test: every tiny model in two stages and in two replicas against a serial loop."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from meshwright.capture import capture_model
from meshwright.zoo import load_shape
from tests.runtime.equality_worker import MICROBATCH_SIZE, SerialLoops, run_case
from tests.runtime.models import Case

# Sequences of other lengths than the shapes' own, so that the test stays quick.
SIZES = {
    "bert-tiny": {"sequence_length": 24},
    "ddpm-tiny": {},
    "dlrm-tiny": {},
    "gnmt-tiny": {"sequence_length": 6},
    "llama-lora-tiny": {"sequence_length": 16},
    "mixtral-tiny": {"sequence_length": 16},
    "t5-tiny": {"sequence_length": 16, "target_length": 8},
}
LAYOUTS = ((1, 1), (2,))


def load_case(name: str) -> Case:
    """The model with noise on what starts at zero, and batches of any size."""
    shape = replace(load_shape(name), **SIZES[name])
    model = shape.build()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    return Case(model, shape.loss, lambda size: replace(shape, batch_size=size).batch())


def main(out: str) -> None:
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    results = {}
    for name in SIZES:
        torch.manual_seed(5)
        case = load_case(name)
        inputs, targets = case.make_batch(MICROBATCH_SIZE + 1)
        captured = capture_model(case.model, inputs, targets=targets, loss=case.loss, verify=False)
        loops = SerialLoops(case, {key: value.clone() for key, value in case.model.state_dict().items()})
        for layout in LAYOUTS:
            result = run_case(captured, loops, layout, "1f1b", "sgd")
            if result is not None:
                results[f"{name}/{'-'.join(map(str, layout))}"] = result
    if dist.get_rank() == 0:
        Path(out).write_text(json.dumps(results), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
