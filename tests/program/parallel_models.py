"""GPT and Llama as torch's parallelize_module lays them out on a mesh axis, in the way that exchanges least.

Queries, keys and values share what their block takes in: `PrepareModuleInput` converts it once, so its gradient is
summed before it is reduced (without it torch reduces three times). The head's logits stay split for `loss_parallel`.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from meshwright.zoo import GPT, Llama, load_shape

BATCH = 2


def small_shape(name: str):
    """Eight heads, so that up to eight ranks have some; weights of no special size."""
    shape = load_shape(f"{name}-tiny")
    sizes = {"num_layers": 2, "num_heads": 8, "width": 64, "vocabulary": 1024, "context": 32, "sequence_length": 32}
    if name == "llama":
        sizes |= {"num_key_value_heads": 8, "hidden_width": 128}
    return replace(shape, **sizes, batch_size=BATCH)


class Positions(ParallelStyle):
    """A table of positions whose rows each rank looks up for its own tokens."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        weight = DTensor.from_local(module.weight.data, device_mesh, [Replicate()], run_check=False)
        module.register_parameter("weight", nn.Parameter(weight))

        def split(_module, inputs):
            whole = DTensor.from_local(inputs[0], device_mesh, [Replicate()], run_check=False)
            return (whole.redistribute(placements=[Shard(0)]),)

        module.register_forward_pre_hook(split)
        module.register_forward_hook(lambda _module, _inputs, output: output.to_local())
        return module


def parallelize(model: nn.Module, mesh: DeviceMesh, *, sequence_parallel: bool) -> nn.Module:
    """Lay a GPT or Llama out over a mesh of one dim."""
    between = Shard(1) if sequence_parallel else Replicate()
    rows = RowwiseParallel(output_layouts=between)
    plan: dict[str, ParallelStyle] = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=between),
        "head": ColwiseParallel(input_layouts=between, output_layouts=Shard(-1), use_local_output=False),
    }
    if sequence_parallel:
        plan["norm"] = SequenceParallel()
        if isinstance(model, GPT):
            plan["position"] = Positions()
    for index in range(len(model.blocks)):
        plan |= {f"blocks.{index}.{name}": style for name, style in _block_plan(model, between, rows).items()}
        if sequence_parallel:
            plan |= {f"blocks.{index}.{name}_norm": SequenceParallel() for name in ("attention", "mlp")}
    tied = model.head.weight is model.embedding.weight
    parallelize_module(model, mesh, plan)
    if tied:
        model.head.weight = model.embedding.weight
    if isinstance(model, GPT):
        for block in model.blocks:
            block.attention.num_heads //= mesh.size()
    return model


def _block_plan(model: nn.Module, between: Replicate | Shard, rows: RowwiseParallel) -> dict[str, ParallelStyle]:
    columns, whole = ColwiseParallel(), Replicate()
    others = (None, None) if isinstance(model, Llama) else ()
    attention = PrepareModuleInput(input_layouts=(between, *others), desired_input_layouts=(whole, *others))
    mlp = PrepareModuleInput(input_layouts=(between,), desired_input_layouts=(whole,))
    if isinstance(model, Llama):
        return {
            "attention": attention,
            **{f"attention.{name}": columns for name in ("query", "key", "value")},
            "attention.projection": rows,
            "mlp": mlp,
            "mlp.gate": columns,
            "mlp.up": columns,
            "mlp.down": rows,
        }
    return {
        "attention": attention,
        "attention.query_key_value": columns,
        "attention.projection": rows,
        "mlp": mlp,
        "mlp.widen": columns,
        "mlp.projection": rows,
    }


def make_batch(shape) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    tokens = torch.randint(shape.vocabulary, (BATCH, shape.sequence_length))
    return tokens, torch.randint(shape.vocabulary, tokens.shape)
