"""Cutting a graph: the slices are run symbolically, with nothing but what they list: enough, and not too much.

The oracle knows only what a stage may hold: it runs the whole graph once with values as expressions, then each stage
with its own ops, state, inputs and received values. Equal expressions show that nothing is missing; taking any one
thing away must make the run fail.
"""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.spec import RNG_STATE_BYTES, Extent, Graph, Layer, Op, PlanError, Tensor, slice_graph
from tests.graphs import chain_graph
from tests.marks import examples
from tests.strategies import bounds_of, graphs


class MissingError(Exception):
    """A stage reads what it does not have."""


def run_ops(graph, ops, values, rng):
    """Run ops in order; values map tensor ids to expressions, ``rng`` counts the random draws so far."""
    for index in ops:
        op = graph.ops[index]
        missing = [i for i in op.inputs if i not in values]
        if missing or (op.random and rng is None):
            raise MissingError(f"{op.name} lacks {missing or 'the random state'}")
        drawn = (rng,) if op.random else ()
        rng = rng + 1 if op.random else rng
        for position, tensor in enumerate(op.outputs):
            values[tensor] = (index, position, drawn, tuple(values[i] for i in op.inputs))
    return rng


def source(graph, tensor):
    return (graph.tensors[tensor].role, tensor)


def run_whole(graph):
    given_roles = ("input", "parameter", "buffer", "constant")
    values = {i: source(graph, i) for i, tensor in enumerate(graph.tensors) if tensor.role in given_roles}
    run_ops(graph, range(len(graph.ops)), values, 0)
    return values


def run_stages(graph, slices):
    """Run the slices one after another; returns the values of each stage."""
    constants = [i for i, tensor in enumerate(graph.tensors) if tensor.role == "constant"]
    stages, states = [], []
    drawn = False
    for piece in slices:
        values = {i: source(graph, i) for i in (*piece.parameters, *piece.buffers, *piece.inputs, *constants)}
        rng = None if drawn else 0
        for channel in piece.incoming:
            for tensor in channel.tensors:
                if tensor not in stages[channel.source]:
                    raise MissingError(f"stage {channel.source} cannot send {tensor}")
                values[tensor] = stages[channel.source][tensor]
            if channel.carries_rng:
                rng = states[channel.source]
        # ops must not overwrite what they receive: ids are unique, so a clash would be a replicated op and a message
        own = {tensor for op in piece.ops for tensor in graph.ops[op].outputs}
        assert not own & set(values)
        rng = run_ops(graph, piece.ops, values, rng)
        drawn = drawn or piece.draws_random
        for tensor in piece.outputs:
            if tensor not in values:
                raise MissingError(f"no output {tensor}")
        stages.append(values)
        states.append(rng)
    return stages


def home_stage(graph, bounds, op):
    layer = next(i for i, item in enumerate(graph.layers) if item.start <= op < item.stop)
    return next(stage for stage, (start, stop) in enumerate(bounds) if start <= layer < stop)


@st.composite
def cut_graphs(draw):
    graph = draw(graphs())
    return graph, draw(bounds_of(graph))


@given(cut_graphs())
@settings(max_examples=examples(150))
def test_the_slices_compute_what_the_graph_computes(case):
    graph, bounds = case
    whole = run_whole(graph)
    slices = slice_graph(graph, bounds)
    stages = run_stages(graph, slices)
    for values in stages:
        assert all(whole[tensor] == value for tensor, value in values.items())
    assert [piece.outputs for piece in slices] == [()] * (len(slices) - 1) + [graph.outputs]
    # every op with an effect runs exactly once, at home
    for op, item in enumerate(graph.ops):
        where = [piece.index for piece in slices if op in piece.ops]
        assert item.replicable or where == [home_stage(graph, bounds, op)]


def without_each(slices):
    """All ways to take one thing away, as (what, changed slices); a channel is changed at both of its ends."""
    for piece in slices:
        for field in ("parameters", "buffers", "inputs", "ops"):
            for item in getattr(piece, field):
                less = tuple(other for other in getattr(piece, field) if other != item)
                yield (field, item), tuple(replace(s, **{field: less}) if s is piece else s for s in slices)
        for channel in piece.incoming:
            thinner = [
                replace(channel, tensors=tuple(t for t in channel.tensors if t != gone)) for gone in channel.tensors
            ]
            thinner += [replace(channel, carries_rng=False)] if channel.carries_rng else []
            for other in thinner:
                incoming = tuple(other if c is channel else c for c in piece.incoming)
                yield ("channel", channel), tuple(replace(s, incoming=incoming) if s is piece else s for s in slices)


@given(cut_graphs())
def test_nothing_can_be_taken_away(case):
    graph, bounds = case
    for (field, item), changed in without_each(slice_graph(graph, bounds)):
        if field == "ops" and not graph.ops[item].replicable:
            continue  # an op may have an effect without anybody reading its result
        with pytest.raises(MissingError):
            run_stages(graph, changed)


@given(cut_graphs())
def test_channels_go_straight_from_producer_to_consumer(case):
    graph, bounds = case
    producers = {tensor: op for op, item in enumerate(graph.ops) for tensor in item.outputs}
    slices = slice_graph(graph, bounds)
    sent = [channel for piece in slices for channel in piece.outgoing]
    assert sorted(sent, key=repr) == sorted((c for piece in slices for c in piece.incoming), key=repr)
    assert len({(c.source, c.target) for c in sent}) == len(sent)
    for channel in sent:
        assert channel.source < channel.target
        assert channel.tensors or channel.carries_rng
        for tensor in channel.tensors:
            assert home_stage(graph, bounds, producers[tensor]) == channel.source
            assert not graph.ops[producers[tensor]].replicable
        wanted = [t for t in channel.tensors if graph.mode == "training" and graph.tensors[t].requires_grad]
        assert list(channel.gradients) == wanted
        sizes = [graph.tensors[t].num_bytes(5) for t in channel.tensors]
        assert channel.forward_bytes(graph, 5) == sum(sizes) + (RNG_STATE_BYTES if channel.carries_rng else 0)
        assert channel.backward_bytes(graph, 5) == sum(graph.tensors[t].num_bytes(5) for t in wanted)


@given(cut_graphs())
def test_one_stage_is_the_whole_graph(case):
    graph, _ = case
    (piece,) = slice_graph(graph, [(0, len(graph.layers))])
    assert (piece.incoming, piece.outgoing) == ((), ())
    assert piece.draws_random == any(op.random for op in graph.ops)
    gradients = any(graph.tensors[t].requires_grad for op in graph.ops for t in op.outputs)
    assert piece.has_backward == (graph.mode == "training" and gradients)


# --- by hand ---


def test_a_chain_sends_one_value_to_its_neighbour():
    graph = chain_graph(4)
    slices = slice_graph(graph, [(0, 2), (2, 3), (3, 4)])
    assert [piece.ops for piece in slices] == [(0, 1), (2,), (3,)]
    routes = [(c.source, c.target, [graph.tensors[t].name for t in c.tensors]) for s in slices for c in s.outgoing]
    assert routes == [(0, 1, ["y1"]), (1, 2, ["y2"])]
    assert [piece.inputs for piece in slices] == [(0,), (), ()]


def test_a_skip_jumps_over_stages():
    graph = chain_graph(4, skips=((0, 3),))
    slices = slice_graph(graph, [(0, 1), (1, 2), (2, 3), (3, 4)])
    routes = {(c.source, c.target): [graph.tensors[t].name for t in c.tensors] for s in slices for c in s.outgoing}
    assert routes == {(0, 1): ["y0"], (1, 2): ["y1"], (2, 3): ["y2"], (0, 3): ["y0"]}
    assert [(c.source, c.target) for c in slices[3].incoming] == [(0, 3), (2, 3)]


def test_a_tied_parameter_is_held_by_each_stage_that_reads_it():
    graph = chain_graph(3, tied=True)
    slices = slice_graph(graph, [(0, 1), (1, 2), (2, 3)])
    assert [[graph.tensors[t].name for t in piece.parameters] for piece in slices] == [
        ["layer0.weight"],
        ["layer1.weight"],
        ["layer0.weight"],
    ]


def test_the_random_state_follows_the_stages_that_draw():
    graph = chain_graph(5, random=(0, 3, 4))
    slices = slice_graph(graph, [(i, i + 1) for i in range(5)])
    assert [piece.draws_random for piece in slices] == [True, False, False, True, True]
    carried = {(c.source, c.target): c.carries_rng for s in slices for c in s.outgoing}
    assert carried == {(0, 1): False, (1, 2): False, (2, 3): False, (0, 3): True, (3, 4): True}
    jump = next(c for c in slices[0].outgoing if c.target == 3)
    assert jump.forward_bytes(graph, 7) == RNG_STATE_BYTES
    assert jump.backward_bytes(graph, 7) == 0


def test_frozen_layers_get_no_gradients():
    graph = chain_graph(3, frozen=2)
    slices = slice_graph(graph, [(0, 1), (1, 2), (2, 3)])
    assert [piece.has_backward for piece in slices] == [False, False, True]
    assert [c.gradients for piece in slices for c in piece.outgoing] == [(), ()]
    assert not any(piece.has_backward for piece in slice_graph(replace(graph, mode="inference"), [(0, 3)]))


def test_a_mask_is_made_again_in_each_stage():
    size = (Extent(4),)
    tensors = tuple(
        Tensor(name=name, shape=size, dtype="float32", role=role, storage=i)
        for i, (name, role) in enumerate(
            [("x", "input"), ("m", "activation"), ("y", "activation"), ("z", "activation")]
        )
    )
    ops = (
        Op(name="arange", kind="aten.arange.default", inputs=(), outputs=(1,), replicable=True),
        Op(name="first", kind="aten.add.Tensor", inputs=(0, 1), outputs=(2,)),
        Op(name="second", kind="aten.mul.Tensor", inputs=(2, 1), outputs=(3,)),
    )
    layers = (Layer(name="a", start=0, stop=2), Layer(name="b", start=2, stop=3))
    graph = Graph(name="mask", tensors=tensors, ops=ops, layers=layers, inputs=(0,), outputs=(3,))
    first, second = slice_graph(graph, [(0, 1), (1, 2)])
    assert (first.ops, second.ops) == ((0, 1), (0, 2))
    assert [channel.tensors for channel in second.incoming] == [(2,)]


@pytest.mark.parametrize(
    ("bounds", "message"),
    [
        ([(0, 2)], "every layer needs a stage"),
        ([], "every layer needs a stage"),
        ([(1, 4)], "expected it to start at layer 0"),
        ([(0, 2), (3, 4)], "expected it to start at layer 2"),
        ([(0, 2), (1, 4)], "expected it to start at layer 2"),
        ([(0, 0), (0, 4)], "hold at least one"),
        ([(0, 4), (4, 5)], "takes at most 4 stages"),
        ([(0, 3), (3, 1)], "hold at least one"),
    ],
)
def test_cuts_that_do_not_cover_the_layers(bounds, message):
    with pytest.raises(PlanError, match=message):
        slice_graph(chain_graph(4), bounds)
