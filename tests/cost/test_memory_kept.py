"""What autograd keeps on CUDA devices, by op, where a CPU's kernel keeps something else; sizes by hand."""

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from meshwright.cost.memory import as_kept, find_peak, library_workspaces, trace_step
from meshwright.cost.traits import operator_name
from meshwright.spec import Workload, load_shipped_graph
from meshwright.spec.precision import numbers_of
from tests.cost.facts import B, GraphMaker

FULL, HALF = "float32", "bfloat16"
AMP = numbers_of("amp")


def kept_by(name, operator, precision="amp", device="cuda", place=0):
    """(elements of a sample, type, role) of what the operator's op in a shipped graph keeps, sorted."""
    graph = as_kept(load_shipped_graph(name), numbers_of(precision), device)
    op = [op for op in graph.ops if operator_name(op) == operator][place]
    tensors = [graph.tensors[i] for i in op.saved]
    return sorted((tensor.num_elements(1), tensor.dtype, tensor.role) for tensor in tensors)


@pytest.mark.parametrize(("precision", "width"), [(FULL, FULL), ("amp", HALF)])
def test_attention_with_dropout_keeps_no_scores(precision, width):
    graph = load_shipped_graph("bert-tiny")
    op = next(op for op in graph.ops if operator_name(op) == "scaled_dot_product_attention")
    assert dict(op.attributes)["dropout_p"] != "0.0"
    _, heads, tokens, head = (extent.at(1) for extent in graph.tensors[op.inputs[0]].shape)
    values = heads * tokens * head
    scores = heads * tokens * tokens
    assert max(kept_by("bert-tiny", "scaled_dot_product_attention", precision, "cpu"))[0] == max(scores, values)
    # Query, key and value, output, and a number of each row.
    assert kept_by("bert-tiny", "scaled_dot_product_attention", precision) == sorted(
        [(values, width, "activation")] * 4 + [(heads * tokens, FULL, "saved")]
    )


def test_joined_heads_are_a_view_of_fused_attention():
    graph = as_kept(load_shipped_graph("bert-tiny"), AMP, "cuda")
    plain = as_kept(load_shipped_graph("bert-tiny"), AMP, "cpu")
    attention = next(op for op in graph.ops if operator_name(op) == "scaled_dot_product_attention")
    joined = next(op for op in graph.ops if operator_name(op) == "flatten")
    assert plain.tensors[joined.outputs[0]].storage == joined.outputs[0]
    assert graph.tensors[joined.outputs[0]].storage == attention.outputs[0]


def test_a_permuted_mask_needs_the_scores():
    on_cpu = kept_by("t5-tiny", "scaled_dot_product_attention", device="cpu")
    kept = kept_by("t5-tiny", "scaled_dot_product_attention")
    changed = [new for old, new in zip(on_cpu, kept, strict=True) if old != new]
    # One of them becomes dropout's mask.
    assert len({size for size, *_ in kept} & {changed[0][0]}) == 1
    assert [dtype for _, dtype, _ in kept].count("bool") == 1
    assert [size for size, *_ in kept] == [size for size, *_ in on_cpu]


@pytest.mark.parametrize("dtype", [FULL, "bool"])
def test_a_dense_mask_is_kept_in_the_type_of_the_query(dtype):
    make = GraphMaker()
    shape, scores = (B, 2, 8, 16), (B, 2, 8, 8)
    query, key, value = (make.tensor(name, shape, role="input") for name in ("query", "key", "value"))
    mask = make.tensor("mask", (1, 1, 8, 8), role="input", dtype=dtype, grad=False)
    out = make.tensor("out", shape)
    made = tuple(make.tensor(f"made{i}", scores, role="saved", grad=False) for i in range(3))
    make.op("aten.scaled_dot_product_attention.default", (query, key, value, mask), (out,), saved=made)
    graph = as_kept(make.graph(), AMP, "cuda")
    kept = [graph.tensors[i] for i in graph.ops[0].saved]
    assert sorted((tensor.num_elements(1), tensor.dtype) for tensor in kept) == [
        (16, FULL),
        (64, HALF),
        *[(256, HALF)] * 4,
    ]


def test_dropout_keeps_bools_and_norms_a_number_of_each_row():
    ((size, dtype, role),) = kept_by("bert-tiny", "dropout", place=1)
    ((wide, noise, _),) = kept_by("bert-tiny", "dropout", place=1, device="cpu")
    assert (size, dtype, role, noise) == (wide, "bool", "saved", FULL)
    rows, width = 128, 128
    assert sorted(kept_by("llama-tiny", "rms_norm"), key=lambda item: item[2]) == [
        (rows * width, FULL, "activation"),
        (width, FULL, "parameter"),
        (rows, FULL, "saved"),
    ]
    assert len(kept_by("llama-tiny", "rms_norm", device="cpu")) == 4


def test_recurrent_layers_keep_input_output_and_a_reserve():
    graph = as_kept(load_shipped_graph("gnmt-tiny"), AMP, "cuda")
    op = [op for op in graph.ops if operator_name(op) == "lstm"][1]
    tensors = [graph.tensors[i] for i in op.saved]
    output = graph.tensors[op.outputs[0]].num_elements(1)
    reserve = [tensor for tensor in tensors if tensor.num_elements(1) == 5 * output]
    assert [tensor.dtype for tensor in reserve] == [HALF]
    assert op.outputs[0] in op.saved
    assert {tensor.dtype for tensor in tensors} == {HALF}, "all of it is in the type of autocast"


class Recorder(TorchDispatchMode):
    """The operators that torch dispatches to, with the types of what they are given."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        found = function(*args, **(kwargs or {}))
        given = next((str(item.dtype).removeprefix("torch.") for item in args if isinstance(item, torch.Tensor)), "")
        self.seen.append((function.overloadpacket.__name__, given))
        return found


def test_losses_under_autocast_keep_logarithms_twice():
    before = torch.is_autocast_enabled("cuda")
    torch.set_autocast_enabled("cuda", True)
    try:
        with FakeTensorMode(), Recorder() as recorder:
            logits = torch.empty(32, 16, dtype=torch.bfloat16, device="cuda")
            F.cross_entropy(logits, torch.empty(32, dtype=torch.int64, device="cuda"))
    finally:
        torch.set_autocast_enabled("cuda", before)
    wanted = [("_log_softmax", HALF), ("_to_copy", HALF), ("nll_loss_forward", FULL)]
    assert [item for item in recorder.seen if item[0] in dict(wanted)] == wanted
    on_cpu = kept_by("gpt-tiny", "cross_entropy_loss", device="cpu")
    kept = kept_by("gpt-tiny", "cross_entropy_loss")
    logits = 128 * 256
    assert [item for item in on_cpu if item[0] == logits] == [(logits, FULL, "saved")]
    assert [item for item in kept if item[0] == logits] == [(logits, HALF, "saved"), (logits, FULL, "saved")]


@pytest.mark.parametrize("name", ["bert-tiny", "t5-tiny", "gnmt-tiny", "llama-tiny", "mixtral-tiny", "resnet-tiny"])
def test_steps_on_cuda_free_what_they_take(name):
    graph = load_shipped_graph(name)
    for precision in (FULL, "amp", "mixed"):
        on_cpu, on_cuda = (
            trace_step(graph, Workload(global_batch=4, precision=precision), device=device)
            for device in ("cpu", "cuda")
        )
        assert on_cuda.in_use().min() >= 0
        if name in ("bert-tiny", "t5-tiny", "llama-tiny"):
            libraries = sum(library_workspaces("cuda", trains=True))
            assert find_peak(on_cuda).num_bytes - libraries < find_peak(on_cpu).num_bytes
    kept = as_kept(graph, AMP, "cuda")
    assert kept.content_hash == graph.content_hash
    assert as_kept(kept, AMP, "cuda") is kept
