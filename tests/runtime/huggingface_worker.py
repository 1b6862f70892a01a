"""The ranks of the equality tests of Hugging Face models; see `equality_worker` for what is compared with what."""

import sys
from pathlib import Path

import torch

from meshwright.zoo import load_model
from tests.runtime.cases import CASES
from tests.runtime.equality_worker import run_models
from tests.runtime.models import Case

CONFIGS = Path(__file__).resolve().parents[1] / "zoo" / "configs"
NUM_SAMPLES = 60


def load(name, length=None):
    """A case whose batches are samples of one large batch, other ones for every call."""
    sizes = {} if length is None else {"sequence_length": length}
    source = load_model(str(CONFIGS / f"{name}.json"), batch_size=NUM_SAMPLES, **sizes)

    def make_batch(num_samples):
        rows = torch.randperm(NUM_SAMPLES)[:num_samples]
        return {key: value[rows] for key, value in source.inputs.items()}, tuple(y[rows] for y in source.targets)

    return Case(source.model, source.loss, make_batch)


# Tied embeddings and dropout; two stacks and one embedding for both; grouped keys; images.
MODELS = {
    "gpt2": lambda: load("gpt2", 8),
    "t5": lambda: load("t5", 6),
    "llama": lambda: load("llama", 8),
    "vit": lambda: load("vit"),
}
# Two stages on two ranks.
PIPELINES = [case for case in CASES[2] if case.key in ("1-1/gpipe/sgd", "1-1/1f1b/adamw")]


if __name__ == "__main__":
    run_models(MODELS, lambda *_: PIPELINES, *sys.argv[1:])
