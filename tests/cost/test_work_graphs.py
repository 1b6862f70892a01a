"""Every op of every shipped graph: what its key says is what capture recorded of real torch."""

from functools import cache

import pytest

from meshwright.cost.traits import is_view, passes_of
from meshwright.cost.work import Amount, find_operator, read_work
from meshwright.cost.work.op_calls import read_call
from meshwright.cost.work.work_count import outputs_of
from meshwright.spec import load_shipped_graph, op_key, shipped_graphs

# Saved by autograd for its shape, or for a case that is not this one, and not read.
UNREAD = {
    "adaptive_avg_pool2d": {"input 0"},
    "batch_norm": {"input 3", "input 4"},
    "conv2d": {"input 1"},
    "gather": {"input 0"},
    "layer_norm": {"input 2"},
    "max_pool2d": {"input 0"},
}
PLACES = {"first": (0,), "second": (1,)}
# Their backward is no sum over gradients, and what they save depends on the road that torch takes.
WHOLE = ("attention", "recurrent")


def read_back(call, operator, elements):
    """What the backward reads, by the table; of products each gradient reads the other factor."""
    names = set()
    for place in (i for i, flag in enumerate(call.grads) if flag):
        if operator.family in ("product", "convolution"):
            first = 1 if call.operator in ("addmm", "baddbmm") else 0
            names |= {f"input {2 * first + 1 - place}"} if place in (first, first + 1) else set()
        elif operator.gradient != "none" and not operator.passes_on(place, call.elements(place), elements):
            others = tuple(i for i in range(len(call.shapes)) if i != place)
            for name in operator.keeps:
                names |= {f"input {i}" for i in (others if name == "others" else PLACES.get(name, ()))}
                names |= {name} if name in ("output", "made") else set()
    return names - {f"input {i}" for i in range(len(call.shapes), 3)}


def acting_operator(call):
    return find_operator(call.operator, call.attributes, call.dtypes)


@cache
def cases(name):
    """(graph, batch size, op, call) of every distinct op."""
    graph = load_shipped_graph(name)
    sizes = (graph.batch_size,) if graph.batch_size is not None else (1, 3)
    found = {}
    for size in sizes:
        for op in graph.ops:
            mine = tuple(graph.tensors[i].storage == i for i in op.outputs)
            found.setdefault((op_key(graph, op, size), mine), (graph, size, op))
    return [(*case, read_call(key)) for (key, _), case in found.items()]


@pytest.fixture(params=sorted(shipped_graphs()), scope="module")
def ops(request):
    return cases(request.param)


@pytest.mark.matrix
def test_outputs_have_the_sizes_and_dtypes_that_were_captured(ops):
    for graph, size, op, call in ops:
        tensors = [graph.tensors[i] for i in op.outputs]
        real = [(tensor.num_elements(size), tensor.dtype) for tensor in tensors]
        if acting_operator(call).gradient == "joined":  # the parts of one tensor count together
            real = [(sum(elements for elements, _ in real), real[0][1])]
        assert [tuple(item) for item in outputs_of(call, acting_operator(call))] == real, op.name


def test_forward_bytes_are_those_of_the_tensors(ops):
    for graph, size, op, call in ops:
        operator = acting_operator(call)

        def total(tensors, graph=graph, size=size):
            return sum(graph.tensors[i].num_bytes(size) for i in dict.fromkeys(tensors))

        written = total(i for i in op.outputs if graph.tensors[i].storage == i or op.kind.split(".")[1].endswith("_"))
        read = {"all": total(op.inputs), "none": 0, "rows": written + total(op.inputs[1:])}[operator.reads]
        made = [i for i in op.saved if graph.tensors[i].role == "saved"] if operator.makes else []
        made = [i for i in made if graph.tensors[i].shape]  # of a loss also the weight of all its rows: a number
        if call.attributes.get("dropout_p", "0.0") != "0.0":
            continue  # step by step: `test_work_torch`
        expected = 0 if is_view(graph, op) else read + written + total(made)
        assert passes_of(graph, op, size, "float32").forward.num_bytes == expected, op.name


def test_a_backward_reads_what_autograd_saved(ops):
    for graph, size, op, call in ops:
        operator = acting_operator(call)
        if not any(graph.tensors[i].requires_grad for i in op.outputs) or operator.family in WHOLE:
            continue
        saved = {f"input {op.inputs.index(i)}" for i in op.saved if i in op.inputs}
        saved |= {"output" for i in op.saved if i in op.outputs}
        if operator.makes:
            saved |= {"made" for i in op.saved if graph.tensors[i].role == "saved" and graph.tensors[i].shape}
        expected = read_back(call, operator, graph.tensors[op.outputs[0]].num_elements(size))
        if op.kind == "aten.topk.default":
            saved.clear()  # the places, its second output, which is not differentiable
        if len(op.saved) > len(saved) and operator.family == "product":
            saved.add("input 0")  # a copy of it, where it was not contiguous
        assert expected <= saved, op.name
        assert saved - expected <= UNREAD.get(call.operator, set()), op.name


def test_a_key_says_what_the_graph_says(ops):
    for graph, size, op, call in ops:
        work, passes = read_work(op_key(graph, op, size)), passes_of(graph, op, size, "float32")
        assert work is not None, op.kind
        if acting_operator(call).family != "view" or is_view(graph, op):  # a copy of a view's operator is news to a key
            assert (passes.forward.num_bytes, passes.forward.num_kernels) == (
                work.forward.num_bytes,
                work.forward.num_kernels,
            )
        trained = any(graph.tensors[i].requires_grad for i in op.outputs)
        assert (passes.backward.num_bytes, passes.backward.num_kernels) == (
            (work.backward.num_bytes, work.backward.num_kernels) if trained else (0, 0)
        ), op.name
        assert passes.forward.flops == op.flops.at(size)


def test_what_is_handed_on_in_a_graph_starts_no_kernel(ops):
    for graph, size, op, call in ops:
        operator = acting_operator(call)
        if operator.gradient in ("passed", "none") and operator.family == "view":
            backward = passes_of(graph, op, size, "float32").backward
            shown = graph.tensors[op.outputs[0]].num_elements(size)
            if shown == graph.tensors[op.inputs[0]].num_elements(size):
                assert backward == Amount(num_views=backward.num_views), op.name
