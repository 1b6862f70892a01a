"""A graph under autocast has the types that torch's autocast gives CUDA tensors: fake ones tell, without a GPU."""

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

from meshwright.cost import CostModel
from meshwright.cost.autocast import as_computed, cast_inputs, compute_type
from meshwright.cost.memory import find_peak, trace_step
from meshwright.program import build_program
from meshwright.spec import Plan, StagePlan, Workload, load_cluster, load_shipped_graph, slice_graph
from meshwright.spec.precision import numbers_of
from tests.cost.facts import GraphMaker

AMP = numbers_of("amp")
FULL, HALF = "float32", "bfloat16"
# By operator: what calls it on (full, half, weight), and the types of what it is given.
OPERATORS = {
    "linear": (lambda x, h, w: F.linear(x, w), (FULL, FULL)),
    "matmul": (lambda x, h, w: h @ w, (HALF, FULL)),
    "scaled_dot_product_attention": (lambda x, h, w: F.scaled_dot_product_attention(x, h, x), (FULL, HALF, FULL)),
    "layer_norm": (lambda x, h, w: F.layer_norm(h, (16,)), (HALF,)),
    "rms_norm": (lambda x, h, w: F.rms_norm(h, (16,)), (HALF,)),
    "group_norm": (lambda x, h, w: F.group_norm(h, 4), (HALF,)),
    "softmax": (lambda x, h, w: h.softmax(-1), (HALF,)),
    "log_softmax": (lambda x, h, w: h.log_softmax(-1), (HALF,)),
    "mse_loss": (lambda x, h, w: F.mse_loss(h, x), (HALF, FULL)),
    "cross_entropy_loss": (
        lambda x, h, w: F.cross_entropy(h.flatten(0, 1), torch.empty(32, dtype=torch.int64, device="cuda")),
        (HALF,),
    ),
    "sum": (lambda x, h, w: h.sum(-1), (HALF,)),
    "cumsum": (lambda x, h, w: h.cumsum(-1), (HALF,)),
    "linalg_vector_norm": (lambda x, h, w: torch.linalg.vector_norm(h, dim=-1), (HALF,)),
    "pow": (lambda x, h, w: h.pow(2), (HALF,)),
    "rsqrt": (lambda x, h, w: h.rsqrt(), (HALF,)),
    "exp": (lambda x, h, w: h.exp(), (HALF,)),
    "mean": (lambda x, h, w: h.mean(-1), (HALF,)),
    "gelu": (lambda x, h, w: F.gelu(h), (HALF,)),
    "silu": (lambda x, h, w: F.silu(h), (HALF,)),
    "dropout": (lambda x, h, w: F.dropout(h), (HALF,)),
    "embedding": (lambda x, h, w: F.embedding(torch.empty(8, dtype=torch.int64, device="cuda"), w), (FULL,)),
    "add": (lambda x, h, w: h + x, (HALF, FULL)),
    "add_": (lambda x, h, w: h.add_(x), (HALF, FULL)),
    "mul": (lambda x, h, w: h * h, (HALF, HALF)),
    "cat": (lambda x, h, w: torch.cat([h, x]), (HALF, FULL)),
    "type_as": (lambda x, h, w: x.type_as(h), (FULL, HALF)),
}


@pytest.fixture
def autocast():
    before = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
    torch.set_autocast_enabled("cuda", True)
    torch.set_autocast_dtype("cuda", torch.bfloat16)
    yield
    torch.set_autocast_enabled("cuda", before[0])
    torch.set_autocast_dtype("cuda", before[1])


def test_types_are_those_of_torch(autocast):
    wrong = {}
    for name, (call, given) in OPERATORS.items():
        with FakeTensorMode():
            x, h = (torch.empty(4, 8, 16, dtype=dtype, device="cuda") for dtype in (torch.float32, torch.bfloat16))
            found = str(call(x, h, torch.empty(16, 16, device="cuda")).dtype).removeprefix("torch.")
        make = GraphMaker()
        inputs = [make.tensor(f"in{i}", (4, 8, 16), role="input", dtype=dtype) for i, dtype in enumerate(given)]
        make.op(f"aten.{name}.default", tuple(inputs), (make.tensor("out", (4, 8, 16)),))
        predicted = as_computed(make.graph(), AMP).tensors[-1].dtype
        if predicted != found:
            wrong[name] = predicted, found
    assert not wrong


def test_products_keep_copies_and_parameters_are_cast_once():
    graph = load_shipped_graph("gpt-tiny")
    cast = as_computed(graph, AMP)
    assert cast.content_hash == graph.content_hash
    assert as_computed(cast, AMP) is cast
    assert as_computed(graph, AMP) is cast
    assert as_computed(graph, numbers_of("mixed")) is graph
    assert [tensor.dtype for tensor in cast.tensors[: len(graph.tensors)] if tensor.role == "parameter"] == [
        FULL
    ] * len(graph.parameters)
    assert cast.tensors[cast.outputs[0]].dtype == FULL, "the loss"
    linears = [op for op in cast.ops if op.kind.startswith("aten.linear")]
    for op in linears:
        assert {cast.tensors[i].dtype for i in op.outputs} == {HALF}
        assert {cast.tensors[i].dtype for i in op.saved} == {HALF}
        assert compute_type(cast, op, HALF) == HALF
        assert set(cast_inputs(cast, op, HALF)) >= {op.inputs[1]}
    # The head is the embedding: its product keeps a copy of that, too.
    weights = {op.inputs[1] for op in linears}
    copies = [
        tensor for tensor in cast.tensors[len(graph.tensors) :] if len(tensor.shape) == 2 and "weight" in tensor.name
    ]
    assert sum(tensor.num_elements(1) for tensor in copies) == sum(graph.tensors[i].num_elements(1) for i in weights)


def test_all_shipped_graphs_and_ops_of_no_operator_have_types():
    for name in ("t5-tiny", "ddpm-tiny", "mixtral-tiny", "gnmt-tiny", "resnet-tiny", "dlrm-tiny", "llama-lora-tiny"):
        cast = as_computed(load_shipped_graph(name), AMP)
        assert HALF in {tensor.dtype for tensor in cast.tensors}
    make = GraphMaker()
    x, y = make.tensor("x", (4,), role="input", dtype=HALF), make.tensor("y", (4,))
    make.op("wrap_with_set_grad_enabled", (x,), (y,))
    assert as_computed(make.graph(), AMP).tensors[y].dtype == HALF


def test_a_parameter_of_two_products_has_one_copy():
    make = GraphMaker()
    x = make.tensor("x", (4, 8), role="input")
    weight = make.tensor("weight", (8, 8), role="parameter", grad=True)
    y, z = make.tensor("y", (4, 8), grad=True), make.tensor("z", (4, 8), grad=True)
    make.op("aten.linear.default", (x, weight), (y,), saved=(x, weight))
    make.op("aten.linear.default", (y, weight), (z,), saved=(y, weight))
    cast = as_computed(make.graph(), AMP)
    names = [[cast.tensors[i].name for i in op.saved] for op in cast.ops]
    assert [len(found) for found in names] == [2, 1]
    # What a product made is in the lower type already.
    assert names[1] == ["y"]


def test_amp_takes_more_memory_than_two_bytes_and_less_than_four():
    graph = load_shipped_graph("gpt-tiny")
    peaks = {
        precision: find_peak(trace_step(graph, Workload(global_batch=8, precision=precision), device="cuda")).num_bytes
        for precision in ("bfloat16", "amp", "float32")
    }
    assert peaks["bfloat16"] < peaks["amp"] < peaks["float32"]
    costs = {
        precision: CostModel(cluster=load_cluster("1xH100"), precision=precision).estimate_ops(
            graph, 8, load_cluster("1xH100").device_kind(0)
        )
        for precision in ("mixed-bf16-gradients", "mixed", "amp")
    }
    plain, wide, amp = (item.forward_s.sum() for item in costs.values())
    assert plain == wide < amp, "casts take time"
    assert costs["mixed"].backward_s.sum() > costs["mixed-bf16-gradients"].backward_s.sum()
    assert costs["mixed"].accumulate_s.sum() > costs["mixed-bf16-gradients"].accumulate_s.sum()


def test_what_crosses_has_the_type_of_autocast():
    graph = load_shipped_graph("gpt-tiny")
    plans = [
        Plan(
            model="gpt-tiny",
            graph_hash=graph.content_hash,
            cluster="2xcpu",
            workload=Workload(global_batch=8, precision=precision),
            stages=(StagePlan(start=0, stop=3, ranks=(0,)), StagePlan(start=3, stop=6, ranks=(1,))),
            num_microbatches=2,
        )
        for precision in ("float32", "amp", "mixed")
    ]
    sent = [int(build_program(plan, graph).body.num_bytes.max()) for plan in plans]
    # The residual stream is a sum with the float32 embedding.
    assert sent[0] == sent[1] == 2 * sent[2]
    channel = slice_graph(graph, plans[0].bounds)[0].outgoing[0]
    assert as_computed(graph, AMP).tensors[channel.tensors[0]].dtype == FULL


def test_rearranged_inputs_of_products_are_kept_in_the_lower_type():
    make = GraphMaker()
    x = make.tensor("x", (4, 2, 8), role="input")
    weight = make.tensor("weight", (8, 8), role="parameter", grad=True)
    dense, y = make.tensor("dense", (8, 8), role="saved"), make.tensor("y", (4, 2, 8), grad=True)
    make.op("aten.linear.default", (x, weight), (y,), saved=(dense, weight))
    cast = as_computed(make.graph(), AMP)
    assert [cast.tensors[i].dtype for i in cast.ops[0].saved] == [HALF, HALF]
