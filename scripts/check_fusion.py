"""Compare the kernels that `cost.fusion` predicts for compiled layers with inductor's own schedule, on this CPU.

    .venv/bin/python scripts/check_fusion.py [--json] [--differences] [MODEL ...]

Every distinct layer is cut out of the captured model, traced by ahead-of-time autograd and lowered by inductor up to
its fusion; no kernel is compiled. Nodes carry the number of their op in ``meta["custom"]``, forward and backward. A
kernel is right if exactly the ops of inductor's are predicted to be in it; bytes are those of the tensors that it reads
and writes, each element once. An op that is computed again beside its own backward counts once; views and casts do not
count.
"""

from __future__ import annotations

import argparse
import json
import logging
import operator
import sys
import warnings
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
import transformers
from torch import fx
from torch._functorch.aot_autograd import make_boxed_func
from torch._inductor import config, scheduler
from torch._inductor.compile_fx import compile_fx, compile_fx_inner
from torch._inductor.dependencies import MemoryDep
from torch._inductor.ir import MultiOutput
from torch._inductor.virtualized import V

from meshwright.capture import capture_model, part
from meshwright.cost.autocast import Widths
from meshwright.cost.fusion import fuse_unit
from meshwright.cost.op_classes import classify_ops
from meshwright.spec import compiled_units
from meshwright.spec.precision import numbers_of
from meshwright.zoo import ModelSource, load_model

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from meshwright.capture import Captured
    from meshwright.spec import Graph

MODELS = ("gpt-tiny", "bert-tiny", "llama-tiny", "resnet50", "mixtral-tiny", "vit")
# A kernel's ops, each with whether it is its backward, of one pass; empty of what has none.
Members = frozenset[tuple[int, bool]]

# What does not compute: views, and conversions of type.
_VIEWS = frozenset(
    [
        *("view", "permute", "slice", "expand", "squeeze", "unsqueeze", "select", "split", "_unsafe_view", "getitem"),
        *("t", "alias", "split_with_sizes", "reshape", "convert_element_type", "full", "detach"),
    ]
)
_CASTS = ("aten.to.dtype", "aten.type_as.default")
# Kernels that inductor calls. Where one realizes its input, inductor names it among the origins of that, too.
_CALLED = frozenset(
    [
        *("convolution", "convolution_backward", "mm", "addmm", "bmm", "native_dropout", "native_dropout_default"),
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_flash_attention_for_cpu_backward",
    ]
)


@dataclass(slots=True)
class Found:
    """A kernel of inductor's: its ops and the bytes that it moves."""

    members: Members
    num_bytes: float
    extern: bool


@dataclass(slots=True)
class Result:
    """What was compared of a model: kernels predicted, and of inductor's, those that are right, bytes of both."""

    kernels: int = 0
    predicted: int = 0
    right: int = 0
    num_bytes: float = 0.0
    predicted_bytes: float = 0.0
    differences: list[str] = field(default_factory=list)

    def add(self, other: Result) -> None:
        """Add up."""
        for name in ("kernels", "predicted", "right", "num_bytes", "predicted_bytes"):
            setattr(self, name, getattr(self, name) + getattr(other, name))


class _Scheduled(Exception):  # noqa: N818 - ends a compilation that has nothing left to say
    """Inductor has fused."""


def load(name: str) -> ModelSource:
    """A model of the zoo, or a vision transformer of transformers."""
    if name != "vit":
        return load_model(name, **({"batch_size": 8} if name.startswith("resnet5") else {}))
    sizes: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 2}
    shape = transformers.ViTConfig(**sizes, num_attention_heads=4, image_size=32, patch_size=8, num_labels=10)
    images = {"pixel_values": torch.randn(16, 3, 32, 32), "labels": torch.zeros(16, dtype=torch.long)}
    return ModelSource(name=name, model=transformers.ViTForImageClassification(shape), inputs=images)


def check_model(name: str) -> Result:
    """Compare every distinct layer of a model, forward and backward."""
    source, total = load(name), Result()
    captured = capture_model(
        source.model, source.inputs, targets=source.targets, loss=source.loss, name=name, verify=False
    )
    graph = replace(captured.graph, compiled=True)
    blocks = {layer.start: layer.block for layer in graph.layers}
    seen: set[str] = set()
    for start, stop in compiled_units(graph):
        if blocks.get(start) and blocks[start] in seen:
            continue
        seen.add(blocks.get(start, ""))
        total.add(compared := check_unit(captured, graph, start, stop, source.batch_size))
        total.differences += compared.differences
    return total


def check_unit(captured: Captured, graph: Graph, start: int, stop: int, size: int) -> Result:
    """Compare the kernels of one unit."""
    outside = {i for op in graph.ops[stop:] for i in op.inputs} | set(graph.outputs)
    later = frozenset(i for op in graph.ops[start:stop] for i in op.outputs if i in outside)
    scheduled = schedules(captured, graph, start, stop, size, sorted(later))
    widths = Widths(graph=graph, values=4, single=classify_ops(graph).single)
    unit = fuse_unit(graph, start, stop, size, numbers_of("float32"), widths, later, "cpu")
    result = Result()
    for backward, kernels in ((False, unit.forward), (True, unit.backward)):
        theirs = [found for is_backward, found in scheduled if is_backward == backward]
        ours = [
            _normal(
                {
                    (start + op, own and backward)
                    for op, own in kernel.members
                    if graph.ops[start + op].kind not in _CASTS
                },
                backward,
            )
            for kernel in kernels
        ]
        right = Counter(item.members for item in theirs) & Counter(ours)
        result.add(
            Result(
                kernels=len(theirs),
                predicted=len(ours),
                right=right.total(),
                num_bytes=sum(item.num_bytes for item in theirs),
                predicted_bytes=sum(kernel.read + kernel.written for kernel in kernels),
            )
        )
        _note(result.differences, graph, backward, "inductor", Counter(item.members for item in theirs) - right)
        _note(result.differences, graph, backward, "predicted", Counter(ours) - right)
    return result


def _note(lines: list[str], graph: Graph, backward: bool, whose: str, kernels: Counter[Members]) -> None:
    for members, count in kernels.items():
        names = " ".join(
            f"{graph.ops[op].name}{'' if own == backward else ' again'}" for op, own in sorted(members) if op >= 0
        )
        lines.append(f"{'backward' if backward else 'forward'}, {whose} alone, {count}: {names}")


def _normal(members: set[tuple[int, bool]], backward: bool) -> Members:
    """Members of a kernel of a pass, without what is computed again beside its own backward."""
    return frozenset((op, own) for op, own in members if own == backward or (op, backward) not in members)


def schedules(
    captured: Captured, graph: Graph, start: int, stop: int, size: int, fetches: Sequence[int]
) -> list[tuple[bool, Found]]:
    """The kernels of inductor's schedule of a unit, each with whether it is one of the backward."""
    ops = range(start, stop)
    made = {i for op in ops for i in graph.ops[op].outputs}
    read = dict.fromkeys(i for op in ops for i in graph.ops[op].inputs if i not in made)
    feeds = [i for i in read if graph.tensors[i].role not in ("parameter", "buffer", "constant")]
    module = part(captured, feeds, fetches, batch_size=size, ops=list(ops))
    numbers = {graph.ops[op].name: op for op in ops}
    for node in module.graph.nodes:
        named = node.args[0] if node.target is operator.getitem else node
        if node.op == "call_function" and named.name in numbers:
            node.meta["custom"] = {"op": numbers[named.name]}
    found: list[tuple[bool, Found]] = []

    def compile_inner(traced: fx.GraphModule, examples: Sequence[Any], **options: Any) -> Callable[..., Any]:
        backward = bool(options.get("is_backward"))

        def take(nodes: list[Any]) -> None:
            found.extend((backward, kernel) for kernel in _read_schedule(nodes, backward))
            raise _Scheduled

        with config.patch(_post_fusion_custom_pass=take):
            try:
                compile_fx_inner(traced, examples, **options)
            except Exception as error:
                if not _comes_from_us(error):
                    raise
        return make_boxed_func(traced.forward)

    with (
        torch._functorch.config.patch(force_non_lazy_backward_lowering=True),
        config.patch(fallback_random=True, force_disable_caches=True, compile_threads=1),
    ):
        compile_fx(module, [_example(graph, i, size) for i in feeds], inner_compile=compile_inner)
    return found


def _comes_from_us(error: BaseException | None) -> bool:
    while error is not None:
        if isinstance(error, _Scheduled) or "_Scheduled" in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False


def _example(graph: Graph, tensor: int, size: int) -> torch.Tensor:
    given = graph.tensors[tensor]
    shape, dtype = [extent.at(size) for extent in given.shape], getattr(torch, given.dtype)
    if not dtype.is_floating_point:
        return torch.zeros(shape, dtype=dtype)
    return torch.randn(shape, dtype=dtype).requires_grad_(given.requires_grad)


def _read_schedule(nodes: Sequence[Any], backward: bool) -> list[Found]:
    made = {
        buffer.get_name(): origin
        for node in nodes
        for inner in node.get_nodes()
        if (origin := _origin(inner)) is not None
        for buffer in inner.get_outputs()
    }
    found = []
    for node in nodes:
        extern = node.is_extern()
        if isinstance(node, scheduler.NopKernelSchedulerNode) or (extern and isinstance(node.node, MultiOutput)):
            continue
        computed = {item for item in _computed(node, made, extern=extern) if extern or _name(item) not in _VIEWS}
        members = {
            (item.meta["custom"]["op"], not backward or item.meta.get("partitioner_tag") != "is_forward")
            for item in computed
            if "op" in item.meta.get("custom", {})
        }
        own = {(op, backward if is_own else False) for op, is_own in members}
        found.append(Found(_normal(own, backward), _moved(node, extern=extern), extern))
    return found


def _origin(inner: Any) -> fx.Node | None:
    if inner.node is None:
        return None
    found: fx.Node | None = inner.node.get_origin_node()
    return found or getattr(getattr(inner.node, "data", None), "origin_node", None)


def _name(node: fx.Node) -> str:
    return str(getattr(node.target, "__name__", "")).split(".")[0] if node.op == "call_function" else node.op


def _computed(node: Any, made: dict[str, fx.Node], *, extern: bool) -> set[fx.Node]:
    """The nodes of the traced graph that a kernel computes: its origins, without what it reads from others."""
    inner = [each for each in node.get_nodes() if each.node is not None]
    origins: set[fx.Node] = {origin for each in inner for origin in each.node.get_origins()}
    if extern:
        called = str(getattr(inner[0].node, "op_overload", "")).split(".")[1:2] or [""]
        origin = _origin(inner[0])
        return {origin} if origin else {item for item in origins if _name(item) in _CALLED | {called[0]}}
    if origins and all(item.op == "placeholder" for item in origins):
        # Copies in another order, for the first that asks for one.
        return {next(iter(item.users)) for item in origins}
    names = [buffer.get_name() for each in inner for buffer in each.get_outputs()]
    if all(name in made for name in names):
        reads = {dep.name for dep in node.read_writes.reads} - set(names)
        behind = {made[name] for name in reads if name in made}
        ends = {made[name] for name in names}
        reached = (
            ends
            if not reads and any("index_put" in _name(end) or "scatter" in _name(end) for end in ends)
            else _between(ends, behind)
        )
        if behind and any(_name(end) == "cat" for end in ends):
            reached &= _above(behind, reached)
        origins = origins & reached or origins
    computed = {item for item in origins if _name(item) not in _CALLED}
    return computed if any(_name(item) not in _VIEWS | {"placeholder"} for item in computed) else origins


def _between(ends: set[fx.Node], behind: set[fx.Node]) -> set[fx.Node]:
    """What leads to some nodes, up to others."""
    reached: set[fx.Node] = set()
    todo = list(ends)
    while todo:
        item = todo.pop()
        if item not in reached and item not in behind:
            reached.add(item)
            todo += item.all_input_nodes
    return reached


def _above(behind: set[fx.Node], among: set[fx.Node]) -> set[fx.Node]:
    """What comes from some nodes."""
    reached: set[fx.Node] = set()
    todo = list(behind)
    while todo:
        for user in todo.pop().users:
            if user in among and user not in reached:
                reached.add(user)
                todo.append(user)
    return reached


def _moved(node: Any, *, extern: bool) -> float:
    """Bytes that a kernel reads and writes: of each buffer the elements that it looks at, at most all."""
    sizes: dict[str, int] = node.get_read_write_buffer_accesses(include_reads=True, include_writes=True)
    if extern:
        return float(sum(sizes.values()))
    total = 0
    for name, size in sizes.items():
        deps = [dep for dep in (*node.read_writes.reads, *node.read_writes.writes) if dep.name == name]
        seen = sum(int(dep.get_numel()) for dep in deps if isinstance(dep, MemoryDep))
        whole = not seen or not all(isinstance(dep, MemoryDep) for dep in deps)
        total += size if whole else min(size, seen * V.graph.get_dtype(name).itemsize)
    return float(total)


def main() -> int:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=MODELS)
    parser.add_argument("--json", action="store_true", help="print the figures as one JSON object")
    parser.add_argument("--differences", action="store_true", help="print kernels that only one of the two has")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    for name in ("transformers", "torch._inductor.utils"):
        logging.getLogger(name).setLevel(logging.ERROR)
    results = {name: check_model(name) for name in args.models}
    total = Result()
    for result in results.values():
        total.add(result)
    results["together"] = total
    if args.json:
        figures = {
            name: {
                key: getattr(result, key) for key in ("kernels", "predicted", "right", "num_bytes", "predicted_bytes")
            }
            for name, result in results.items()
        }
        print(json.dumps(figures))
        return 0
    print(f"{'model':14s} {'kernels':>8s} {'predicted':>10s} {'right':>7s} {'share':>7s} {'bytes':>7s}")
    for name, result in results.items():
        share, moved = result.right / result.kernels, result.predicted_bytes / result.num_bytes
        print(f"{name:14s} {result.kernels:8d} {result.predicted:10d} {result.right:7d} {share:7.1%} {moved:7.3f}")
        for line in result.differences if args.differences else ():
            print(f"    {line}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
