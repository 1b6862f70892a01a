"""The ranks of the zoo's equality test: every tiny model in two stages and in two replicas against a serial loop."""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import partial

import torch

from meshwright.zoo import load_shape
from tests.runtime.cases import Layout
from tests.runtime.equality_worker import run_models
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


def load_case(name: str) -> Case:
    """The model with noise on what starts at zero, and batches of any size."""
    shape = replace(load_shape(name), **SIZES[name])
    model = shape.build()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    return Case(model, shape.loss, lambda size: replace(shape, batch_size=size).batch())


MODELS = {name: partial(load_case, name) for name in SIZES}
CASES = [Layout(stages, "1f1b", "sgd") for stages in ((1, 1), (2,))]


if __name__ == "__main__":
    run_models(MODELS, lambda *_: CASES, *sys.argv[1:])
