"""Measure what calls take on this CPU, in loops and inside of models; print tables of host_issue.toml.

    .venv/bin/python scripts/measure_host_issue.py [--compiled]

Models have layers of width 8, so that a forward and a backward are nothing but calls. Each is timed with and without
autocast; the figures of a call forward and of a node backward are geometric means over them. With ``--compiled`` the
table is that of units compiled by inductor, chains of products with and without sines between: what a unit takes is
what further units add, what a kernel takes is what further kernels add.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import transformers
from torch import fx, nn

from meshwright.capture import capture_model
from meshwright.cost.host_issue import count_issued
from meshwright.cost.work import key_in
from meshwright.spec.precision import numbers_of
from meshwright.zoo import BERTShape, LlamaShape, ModelSource

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

LAYERS, WIDTH, HEADS, VOCABULARY = 8, 8, 2, 16
TOKENS = torch.randint(2, VOCABULARY, (2, 4), generator=torch.Generator().manual_seed(0))


def models() -> Iterator[ModelSource]:
    """Models of the zoo, of torch and of transformers; none whose step in ``steps_cuda.csv`` a host bounds."""
    sizes: dict[str, Any] = {"source": "own", "num_layers": LAYERS, "width": WIDTH, "num_heads": HEADS}
    sizes |= {"vocabulary": VOCABULARY, "context": 8, "batch_size": 2, "sequence_length": 8}
    bert, llama = BERTShape(**sizes), LlamaShape(**sizes, num_key_value_heads=2, hidden_width=WIDTH, rope_base=1e4)
    for name, shape in (("bert", bert), ("llama", llama)):
        model: nn.Module = shape.build()
        inputs, targets = shape.batch()
        yield ModelSource(name=name, model=model, inputs=inputs, targets=targets, loss=shape.loss)
    values = torch.randn(2, 4, WIDTH)
    linear = [layer for _ in range(40) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(WIDTH, HEADS, WIDTH, batch_first=True), LAYERS)
    for name, model in (("linear layers", nn.Sequential(*linear)), ("torch encoder", encoder)):
        yield ModelSource(name=name, model=model, inputs=(values,), targets=(values,), loss=nn.functional.mse_loss)
    layers: dict[str, Any] = {
        "hidden_size": WIDTH,
        "intermediate_size": WIDTH,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
    }
    texts = {"vocab_size": VOCABULARY, "max_position_embeddings": 16}
    words: dict[str, Any] = {"input_ids": TOKENS, "labels": TOKENS}
    more: dict[str, Any]
    for kind, more in (
        ("GPTNeoXForCausalLM", {}),
        ("LlamaForCausalLM", {"num_key_value_heads": HEADS}),
        ("Qwen2ForCausalLM", {"num_key_value_heads": HEADS}),
        ("OPTForCausalLM", {"ffn_dim": WIDTH, "word_embed_proj_dim": WIDTH}),
        ("BertForMaskedLM", {}),
        ("RobertaForMaskedLM", {"pad_token_id": 1}),
    ):
        model_class = getattr(transformers, kind)
        model = model_class(model_class.config_class(**layers, **texts, **more))
        yield ModelSource(name=kind, model=model, inputs=words | {"use_cache": False} if "Causal" in kind else words)
    vision = transformers.ViTConfig(**layers, image_size=16, patch_size=8)
    images = {"pixel_values": torch.randn(2, 3, 16, 16), "labels": torch.zeros(2, dtype=torch.long)}
    yield ModelSource(name="ViT", model=transformers.ViTForImageClassification(vision), inputs=images)


def loop_seconds(call: Callable[[], object], number: int) -> float:
    """The least of ten loops: what else runs only adds."""
    times = []
    for _ in range(10):
        start = time.perf_counter()
        for _ in range(number):
            call()
        times.append((time.perf_counter() - start) / number)
    return min(times)


def passes(source: ModelSource, autocast: bool) -> tuple[float, float]:
    """Median seconds of forward and backward; gradients are made anew, as by `zero_grad`."""
    forward, backward = [], []
    for _ in range(40):
        source.model.zero_grad()
        begun = time.perf_counter()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = source.compute_loss()
        between = time.perf_counter()
        torch.autograd.backward(loss)
        forward.append(between - begun)
        backward.append(time.perf_counter() - between)
    return statistics.median(forward[5:]), statistics.median(backward[5:])


def counted(source: ModelSource, autocast: bool) -> tuple[int, int]:
    """Calls forward and nodes backward."""
    graph = capture_model(
        source.model,
        source.inputs,
        targets=source.targets,
        loss=source.loss,
        verify=False,
        autocast=torch.bfloat16 if autocast else None,
    ).graph
    numbers, size = numbers_of("amp" if autocast else "float32"), source.batch_size
    issued = [
        count_issued(graph, op, size, numbers.compute, key_in(numbers.compute, graph, op, size), numbers)
        for op in graph.ops
    ]
    return sum(item.calls for item in issued), sum(item.nodes for item in issued)


def mean_of(seconds: list[float], counts: list[int]) -> float:
    """The geometric mean of seconds per count."""
    return statistics.geometric_mean([took / count for took, count in zip(seconds, counts, strict=True)])


class Chain(nn.Module):
    """Products of square matrices, each with a sine behind it or without."""

    def __init__(self, length: int, *, sines: bool) -> None:
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(torch.randn(WIDTH, WIDTH)) for _ in range(length)])
        self.sines = sines

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        for weight in self.weights:
            values = values @ weight
            values = torch.sin(values) if self.sines else values
        return values


def compiled_passes(units: int, length: int, *, sines: bool) -> tuple[float, float]:
    """Least seconds of forward and backward through compiled chains, each with code of its own."""
    chains = [fx.symbolic_trace(Chain(length, sines=sines)) for _ in range(units)]
    compiled = [torch.compile(chain, fullgraph=True, dynamic=False) for chain in chains]
    parameters = [weight for chain in chains for weight in chain.parameters()]
    given = torch.randn(WIDTH, WIDTH, requires_grad=True)
    gradient = torch.ones(WIDTH, WIDTH)
    forward, backward = [], []
    for _ in range(2000):
        for weight in parameters:
            weight.grad = None
        begun = time.perf_counter()
        values = given
        for call in compiled:
            values = call(values)
        between = time.perf_counter()
        torch.autograd.backward(values, gradient)
        forward.append(between - begun)
        backward.append(time.perf_counter() - between)
    return min(forward[500:]), min(backward[500:])


def compiled_calls() -> dict[str, float]:
    """Seconds of a unit, and of kernels that are called and generated, forward and backward."""
    few, many, short, long = 1, 7, 2, 12
    took = {
        (units, length, sines): compiled_passes(units, length, sines=sines)
        for units in (few, many)
        for length in (short, long)
        for sines in (False, True)
    }

    def per_unit(length: int, sines: bool, part: int) -> float:
        return (took[many, length, sines][part] - took[few, length, sines][part]) / (many - few)

    steps = long - short
    called = [(per_unit(long, False, part) - per_unit(short, False, part)) / steps for part in (0, 1)]
    both = [(per_unit(long, True, part) - per_unit(short, True, part)) / steps for part in (0, 1)]
    return {
        "unit_s": per_unit(short, False, 0) - short * called[0],
        "unit_backward_s": per_unit(short, False, 1) - short * called[1],
        "extern_s": called[0],
        # A product and the gradient of its weight.
        "extern_backward_s": called[1] / 2,
        "generated_s": statistics.mean(together - alone for together, alone in zip(both, called, strict=True)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="What calls take on this CPU.")
    parser.add_argument("--compiled", action="store_true", help="print the table of compiled units")
    wants_compiled = parser.parse_args().compiled
    logging.getLogger("transformers").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    values, layer = torch.randn(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
    loops = {
        "call_s": loop_seconds(lambda: values + values, 5000),
        "linear_s": loop_seconds(lambda: layer(values), 5000),
        "linear_backward_s": loop_seconds(lambda: layer(values).sum().backward(), 1000),
    }
    if wants_compiled:
        print("[compiled]")
        found = compiled_calls()
        # The least of what is measured before and behind: the machine may be slower for a while.
        again = {
            "call_s": loop_seconds(lambda: values + values, 5000),
            "linear_s": loop_seconds(lambda: layer(values), 5000),
        }
        for key, value in (*((name, min(loops[name], again[name])) for name in again), *found.items()):
            print(f"{key} = {value:.3e}")
        return
    names, seconds, counts = [], [], []
    for source in models():
        for autocast in (False, True):
            counts.append(counted(source, autocast))
            seconds.append(passes(source, autocast))
            names.append(source.name + (" amp" if autocast else ""))
    found = [mean_of([row[i] for row in seconds], [row[i] for row in counts]) for i in (0, 1)]
    for name, took, count in zip(names, seconds, counts, strict=True):
        errors = [found[i] * count[i] / took[i] - 1 for i in (0, 1)]
        print(f"# {name:24s} {took[0] * 1e3:6.2f} ms, {took[1] * 1e3:6.2f} ms, {errors[0]:+.0%}, {errors[1]:+.0%}")
    for i, part in enumerate(("forward", "backward")):
        low, high = np.quantile(
            [found[i] * count[i] / took[i] for took, count in zip(seconds, counts, strict=True)], (0.1, 0.9)
        )
        print(f"# {part}: 80 % of predicted over measured are from {low:.2f} to {high:.2f}")
    print("[reference]")
    for key, value in (*loops.items(), ("model_call_s", found[0]), ("model_node_s", found[1])):
        print(f"{key} = {value:.3e}")


if __name__ == "__main__":
    main()
