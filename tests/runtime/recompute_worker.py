"""The ranks of tests that compute parts again by all policies; see `equality_worker` for what is compared."""

import sys
from itertools import product

from tests.runtime.cases import OPTIMIZERS, Layout
from tests.runtime.equality_worker import run_models
from tests.runtime.huggingface_worker import load
from tests.runtime.models import MODELS as SMALL
from tests.runtime.team_models import zoo


def mixtral():
    """Its products of groups have no kernel for float64; products of batches do."""
    case = load("mixtral", 8)
    case.model.set_experts_implementation("batched_mm")
    return case


# With dropout; with rotary positions and grouped keys; with batch norms; of Hugging Face, with experts.
MODELS = {
    "gpt": SMALL["gpt"],
    "llama": zoo("llama-tiny"),
    "resnet": SMALL["resnet"],
    "mixtral": mixtral,
}
WORDS = ("none", "op", "attention", "every-2", "full", "keep=", "full@0,op@1", "1:2")
# Two stages of two replicas each.
CASES = {4: [Layout((2, 2), "1f1b", optimizer, word) for word, optimizer in product(WORDS, OPTIMIZERS)]}


def all_cases(model, world):
    """The layouts of a model, whose kept ops are its own; without attention none is computed again."""
    own = "aten.conv2d" if model == "resnet" else "aten.linear"
    found = [case._replace(again=f"keep={own}") if case.again.startswith("keep") else case for case in CASES[world]]
    return [case for case in found if model != "resnet" or case.again != "attention"]


def main_cases(model, world):
    """Every word with one optimizer."""
    place = list(MODELS).index(model)
    return [case for index, case in enumerate(all_cases(model, world)) if (index + index // 2 + place) % 2]


if __name__ == "__main__":
    world, which, *others = sys.argv[1:]
    run_models(MODELS, main_cases if which == "main" else all_cases, world, *others)
