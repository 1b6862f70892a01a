"""An oracle for sharded graphs: all ranks of one axis computed side by side in one process, and the whole graph.

Every op of a local graph is the operator of torch that it names, on each rank's tensors; ``mesh`` ops exchange values
forward, and gradients only as `ShardedGraph.collectives` say. So losses and gradients come out right only if the local
shapes, attributes, layouts, exchanges and the parameters to be reduced are right. All is float64.
"""

from __future__ import annotations

import ast
import re

import torch
import torch.nn.functional as F

from meshwright.spec import Graph, Partial, Replicate, Shard

BATCH = 4
# Where products have their bias.
_BIASED = {"linear": 2, "conv1d": 2, "conv2d": 2, "conv_transpose2d": 2, "addmm": 0, "baddbmm": 0}
_MEANS = ("aten.mean", "aten.cross_entropy", "aten.mse_loss", "aten.binary")


def initial_values(graph: Graph, batch: int = BATCH) -> dict[int, torch.Tensor]:
    """Random inputs and parameters; whole numbers stay below 8, which every table has."""
    generator = torch.Generator().manual_seed(0)
    values = {}
    for i, tensor in enumerate(graph.tensors):
        if tensor.role not in ("input", "parameter", "buffer", "constant"):
            continue
        shape = [extent.at(batch) for extent in tensor.shape]
        if tensor.dtype.startswith("float"):
            values[i] = 0.3 * torch.rand(shape, generator=generator, dtype=torch.float64) - 0.1
        elif tensor.dtype == "bool":
            values[i] = torch.ones(shape, dtype=torch.bool)
        else:
            values[i] = torch.randint(2, shape, generator=generator)
        if tensor.role == "parameter" and tensor.requires_grad:
            values[i].requires_grad_()
    return values


def run_whole(graph: Graph, values: dict[int, torch.Tensor], batch: int = BATCH) -> torch.Tensor:
    """The loss."""
    known = dict(values)
    for op in graph.ops:
        outputs = call(op, [known[i] for i in op.inputs], batch)
        known |= dict(zip(op.outputs, outputs, strict=True))
    return known[graph.outputs[0]]


def run_ranks(sharded, axis: str, size: int, values: dict[int, torch.Tensor], batch: int):
    """Loss of every rank, and every rank's own parameters by id; ``batch``: samples of the local graph."""
    graph, layouts = sharded.graph, sharded.layouts[axis]
    ranks = [{} for _ in range(size)]
    for i, value in values.items():
        for rank, part in enumerate(split(value.detach(), layouts[i], size, batch)):
            ranks[rank][i] = part.clone().requires_grad_(value.requires_grad)
    parameters = [{i: known[i] for i in graph.parameters} for known in ranks]
    back = {c.at: c.kind for c in sharded.collectives if c.phase == "backward" and graph.ops[c.at].kind[:4] == "mesh"}
    for at, op in enumerate(graph.ops):
        inputs = [[known[i] for i in op.inputs] for known in ranks]
        if op.kind.startswith("mesh."):
            source = op.inputs[0]
            # What goes round a ring is listed where attention waits for it.
            exchanged = "send" if op.kind.startswith("mesh.ring") else back.get(at)
            plan = (layouts[source], layouts[op.outputs[0]], exchanged, size, batch, _is_mean(graph, source))
            outputs = [(value,) for value in _Exchange.apply(plan, *(item[0] for item in inputs))]
        else:
            outputs = _outputs(
                op, inputs, [layouts[i] for i in op.inputs], [layouts[i] for i in op.outputs], size, batch
            )
        for known, made in zip(ranks, outputs, strict=True):
            known |= dict(zip(op.outputs, made, strict=True))
            for i, value in zip(op.outputs, made, strict=True):
                assert list(value.shape) == [e.at(batch) for e in graph.tensors[i].shape], (op.name, value.shape)
    return [known[graph.outputs[0]] for known in ranks], parameters


def split(value: torch.Tensor, layout, size: int, batch: int) -> list[torch.Tensor]:
    if not isinstance(layout, Shard):
        return [value] * size
    pieces = [piece.chunk(size, layout.dim) for piece in value.chunk(layout.parts.at(batch * 1), layout.dim)]
    return [torch.cat([piece[rank] for piece in pieces], layout.dim) for rank in range(size)]


def join(parts: list[torch.Tensor], layout, batch: int, mean: bool = False) -> torch.Tensor:
    if isinstance(layout, Replicate):
        return parts[0]
    if isinstance(layout, Partial):
        return sum(parts) / (len(parts) if mean else 1)
    pieces = [part.chunk(layout.parts.at(batch), layout.dim) for part in parts]
    return torch.cat([piece for group in zip(*pieces, strict=True) for piece in group], layout.dim)


class _Exchange(torch.autograd.Function):
    """All ranks at once: values as the layouts say, gradients as the collective of the backward says."""

    @staticmethod
    def forward(ctx, plan, *values):
        have, want, _, size, batch, mean = ctx.plan = plan
        whole = join(list(values), have, batch, mean)
        return tuple(part.clone() for part in split(whole, want, size, batch))

    @staticmethod
    def backward(ctx, *gradients):
        have, want, kind, size, batch, mean = ctx.plan
        gradients = list(gradients)
        if kind in ("reduce_scatter", "send"):
            made = split(sum(gradients), have, size, batch)
        elif kind == "all_reduce":
            made = [sum(gradients)] * size
        elif kind in ("all_gather", "all_to_all"):
            made = split(join(gradients, want, batch), have if isinstance(have, Shard) else Replicate(), size, batch)
        elif isinstance(have, Shard):
            made = [split(gradient, have, size, batch)[rank] for rank, gradient in enumerate(gradients)]
        else:
            made = gradients
        if isinstance(have, Partial) and mean:
            made = [gradient / size for gradient in made]
        return (None, *made)


def _is_mean(graph: Graph, tensor: int) -> bool:
    return any(tensor in op.outputs and op.kind.startswith(_MEANS) for op in graph.ops)


def _outputs(op, inputs, read, made, size: int, batch: int):
    """Outputs of every rank."""
    name = op.kind.split(".")[1]
    if name == "embedding" and read[0] == Shard(0):
        return [(_looked_up(*given, rank),) for rank, given in enumerate(inputs)]
    if name == "cross_entropy_loss" and isinstance(read[0], Shard) and read[0].dim == 1:
        whole = _Exchange.apply((read[0], Replicate(), None, size, batch, False), *(given[0] for given in inputs))
        return [(F.cross_entropy(logits, given[1]),) for logits, given in zip(whole, inputs, strict=True)]
    if name == "scaled_dot_product_attention" and made[0] == Shard(2):
        return [(_attended(op, given, rank, size, batch),) for rank, given in enumerate(inputs)]
    if name == "arange" and isinstance(made[0], Shard):
        (local,) = call(op, [], batch)
        return [(local + rank * len(local),) for rank in range(size)]
    if made[0] == Partial() and name in _BIASED:
        inputs = [_with_share(name, given, size) for given in inputs]
    if made[0] == Partial() and Partial() in read:
        inputs = [_with_whole_gradients(given, read, size) for given in inputs]
    return [call(op, given, batch) for given in inputs]


def _with_whole_gradients(given: list[torch.Tensor], read, size: int) -> list[torch.Tensor]:
    """What is added to a mean over the ranks has a whole gradient on each of them."""
    return [
        item if lies == Partial() else item.detach() + size * (item - item.detach())
        for item, lies in zip(given, read, strict=True)
    ]


def _with_share(name: str, given: list[torch.Tensor], size: int) -> list[torch.Tensor]:
    """A bias is added once; its gradient is that of the sum."""
    place = _BIASED[name]
    if len(given) < 3:
        return given
    bias = given[place]
    return [*given[:place], bias.detach() / size + bias - bias.detach(), *given[place + 1 :]]


def _looked_up(weight: torch.Tensor, index: torch.Tensor, rank: int) -> torch.Tensor:
    """Rows that another rank holds are zero."""
    local = index - rank * len(weight)
    mine = (local >= 0) & (local < len(weight))
    return F.embedding(local * mine, weight) * mine.unsqueeze(-1)


def _attended(op, given, rank: int, size: int, batch: int) -> torch.Tensor:
    """Attention of the queries of one rank to all keys."""
    attributes = dict(op.attributes)
    if attributes.pop("is_causal", "") != "True":
        return call(op, given, batch)[0]
    queries, keys = given[0].shape[-2], given[1].shape[-2]
    mask = torch.ones(queries, keys, dtype=torch.bool).tril(rank * queries)
    return F.scaled_dot_product_attention(*given, attn_mask=mask, enable_gqa="enable_gqa" in attributes)


def call(op, tensors: list[torch.Tensor], batch: int) -> tuple[torch.Tensor, ...]:
    """The operator of torch that an op names, on these tensors."""
    _, name, overload = op.kind.split(".")
    if name == "dropout":
        return tuple(tensors)
    function = getattr(getattr(torch.ops.aten, name), overload)
    # Random numbers of ranks are none of our business here.
    given, attributes = list(tensors), {**dict(op.attributes), "dropout": "0.0", "dropout_p": "0.0"}
    arguments = {}
    for argument in function._schema.arguments:
        kind = str(argument.type)
        if kind == "List[Tensor]":
            count = 2 if argument.name == "hx" else len(given)
            arguments[argument.name], given = given[:count], given[count:]
        elif kind == "List[Optional[Tensor]]":
            arguments[argument.name] = [None] * (tensors[0].ndim - len(given)) + given
        elif "Tensor" in kind and given:
            arguments[argument.name] = given.pop(0)
        elif argument.name in attributes:
            arguments[argument.name] = _parsed(attributes[argument.name], batch)
        elif not argument.has_default_value():
            arguments[argument.name] = None
    made = function(**arguments)
    return tuple(made) if isinstance(made, tuple | list) else (made,)


def _parsed(text: str, batch: int):
    if hasattr(torch, text) and isinstance(getattr(torch, text), torch.dtype):
        return torch.float64 if text.startswith("float") else getattr(torch, text)
    text = re.sub(r"(\d+)\*b\b", lambda match: str(int(match[1]) * batch), text)
    text = re.sub(r"\bb\b", str(batch), text)
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return float(text) if text.endswith("inf") else text
