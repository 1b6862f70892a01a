"""The ranks of the tests of Hugging Face mixtures whose experts are laid out; `team_worker` says what is compared."""

import json
import sys
import tempfile
from pathlib import Path

import torch

from tests.runtime.cases import OPTIMIZERS
from tests.runtime.equality_worker import run_models
from tests.runtime.huggingface_worker import CONFIGS, load
from tests.runtime.team_cases import ZERO, TeamLayout
from tests.runtime.team_worker import train

LENGTH = 6
# Two layers of experts each; the first layer of DeepSeek has none.
_CHANGES = {
    "mixtral": {"num_hidden_layers": 2},
    "qwen2-moe": {"num_hidden_layers": 2},
    "qwen3-moe": {"num_hidden_layers": 2, "output_router_logits": True},
    "deepseek-v3": {"num_hidden_layers": 3},
    "gpt-oss": {"num_hidden_layers": 2},
}
# On four ranks: all on the expert axis, with replicas, in a pipeline, with another axis, with states shared out.
_LAYOUTS = (
    ((1,), "expert4"),
    ((2,), "expert"),
    ((1, 1), "expert"),
    ((1,), "expert-tensor"),
    ((2,), f"expert{ZERO}3"),
)
CASES = [TeamLayout(stages, "1f1b", split, optimizer) for stages, split in _LAYOUTS for optimizer in sorted(OPTIMIZERS)]
# Always tried: every layout of one model or another.
MAIN = {
    "mixtral": CASES[0::2],
    "qwen2-moe": CASES[3:4],
    "qwen3-moe": (CASES[1], CASES[4]),
    "deepseek-v3": (CASES[1], CASES[4]),
    "gpt-oss": (CASES[1], CASES[5]),
}


class Exact:
    """torch to a model's own code, with double precision where that asks for single: routers and norms do."""

    float32 = torch.float64

    def __getattr__(self, name):
        return getattr(torch, name)


def load_changed(name):
    """The model of a configuration with some numbers changed, in double precision throughout."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"{name}.json"
        path.write_text(json.dumps(json.loads((CONFIGS / f"{name}.json").read_text()) | _CHANGES[name]))
        case = load(str(path.with_suffix("")), LENGTH)
    for module in {type(module).__module__ for module in case.model.modules()}:
        if module.startswith("transformers.models."):
            sys.modules[module].torch = Exact()
    torch.Tensor.float = torch.Tensor.double
    return case


MODELS = {name: (lambda name=name: load_changed(name)) for name in _CHANGES}


def cases_of(which):
    """``cases(model, world size)`` of a run."""
    return lambda model, _: MAIN[model] if which == "main" else CASES


def train_mixture(captured, loops, layout):
    """As others are; the reference loops over the experts, as transformers does eagerly, in any precision."""
    loops.case.model.config._experts_implementation = "eager"
    return train(captured, loops, layout)


if __name__ == "__main__":
    world, which, *others = sys.argv[1:]
    run_models(MODELS, cases_of(which), world, *others, run=train_mixture)
