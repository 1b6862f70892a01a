"""Memory of a step op by op: by hand, against a real step with its tensors followed, and what must always hold."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.cost.memory import find_peak, trace_step
from meshwright.spec import (
    GraphError,
    Optimizer,
    Workload,
    load_shipped_graph,
    recompute_layers,
    recompute_runs,
    shipped_graphs,
    with_recompute,
)
from tests.cost.facts import B, GraphMaker

SGD, MOMENTUM, ADAMW = Optimizer(kind="sgd"), Optimizer(kind="sgd", momentum=True), Optimizer(kind="adamw")
WEIGHT = 8 * 8 * 4


def chain(num_layers):
    """x → linear (8x8) → exp → ... → sum: every linear keeps its input, every exp its output."""
    make = GraphMaker()
    value = make.tensor("x", (B, 8), role="input", grad=False)
    bounds = []
    for i in range(num_layers):
        weight = make.tensor(f"weight{i}", (8, 8), role="parameter")
        wide = make.tensor(f"wide{i}", (B, 8))
        make.op("aten.linear.default", (value, weight), (wide,), saved=(value, weight))
        value = make.tensor(f"y{i}", (B, 8))
        make.op("aten.exp.default", (wide,), (value,), saved=(value,))
        bounds.append((2 * i, 2 * i + 2))
    loss = make.tensor("loss", ())
    make.op("aten.sum.default", (value,), (loss,))
    return make.graph(has_loss=True), bounds


def peak_of(graph, samples, optimizer=SGD, **options):
    return find_peak(trace_step(graph, Workload(global_batch=samples, optimizer=optimizer), **options))


def test_a_chain_by_hand():
    graph, _ = chain(2)
    rows = 1000 * 8 * 4  # one value of 1000 samples
    peak = peak_of(graph, 1000)
    # Backward of the second linear: y0 is kept for two ops, the gradient of wide1 arrived, those of y0 and of the
    # weight are made; y1 is gone, the loss (4 bytes) is still there.
    assert peak.moment == "backward of op2"
    assert peak.num_bytes == 2 * WEIGHT + rows + (rows + rows + rows + WEIGHT + 4)
    assert peak.parts["parameters"] == 2 * WEIGHT
    assert peak.parts["gradients"] == WEIGHT
    assert peak.parts["inputs"] == rows
    assert (peak.parts["saved activations"], peak.parts["sent"]) == (rows, 4)
    assert peak.parts["workspace"] == 2 * rows


def test_states_and_gradients_by_optimizer():
    graph, _ = chain(3)
    few = {optimizer.name: peak_of(graph, 1, optimizer) for optimizer in (SGD, MOMENTUM, ADAMW)}
    # With one sample weights are all that counts: three of them, their gradients, states and copies.
    values = 10 * 8 * 4
    assert few["sgd"].num_bytes == pytest.approx(6 * WEIGHT, abs=values)
    assert few["sgd+momentum"].num_bytes == pytest.approx(9 * WEIGHT, abs=values)
    assert few["adamw"].num_bytes == pytest.approx(12 * WEIGHT + 2 * WEIGHT, abs=values)
    assert few["adamw"].owner == "optimizer states"
    for loop, copies in [("tensors", 2), ("foreach", 3), ("fused", 0)]:
        assert peak_of(graph, 1, ADAMW, loop=loop).num_bytes == pytest.approx((12 + copies) * WEIGHT, abs=values)
    fused, cuda = peak_of(graph, 1, ADAMW, loop="fused"), peak_of(graph, 1, ADAMW, device="cuda")
    # A workspace of cuBLAS for the thread of forwards, another one for that of backwards.
    assert (cuda.num_bytes, cuda.moment) == (fused.num_bytes + 2 * 32 * 2**20, fused.moment)


@given(layers=st.integers(2, 8), samples=st.sampled_from([1, 64, 4096]), optimizer=st.sampled_from([SGD, ADAMW]))
def test_every_step_frees_what_it_takes_and_recomputing_keeps_less(layers, samples, optimizer):
    graph, bounds = chain(layers)
    events = trace_step(graph, Workload(global_batch=samples, optimizer=optimizer))
    live, sizes = {}, {}
    for block, num_bytes, part in zip(events.block, events.num_bytes, events.part, strict=True):
        if num_bytes >= 0 and block not in live:
            live[block] = sizes[block] = (num_bytes, part)
        else:
            assert live.pop(block) == (-num_bytes, part)
    # What is left is what is there between steps: weights, input, states.
    states = layers * (2 * WEIGHT + 4) if optimizer is ADAMW else 0
    assert sum(size for size, _ in live.values()) == layers * WEIGHT + samples * 32 + states
    # The more layers are computed again, the less is there when the backward begins: with all, what they read.
    workload = Workload(global_batch=samples, optimizer=optimizer)
    kept = []
    for count in range(layers // 2 + 1):
        pairs = [(bounds[2 * i][0], bounds[2 * i + 1][1]) for i in range(count)]
        events = trace_step(with_recompute(graph, pairs), workload)
        begin = next(i for i, moment in enumerate(events.moment) if events.moments[moment] == "gradient of the loss")
        kept.append(int(events.in_use()[begin]))
    assert all(after < before for before, after in itertools.pairwise(kept))


def test_recomputing_by_groups_of_layers_by_hand():
    graph, bounds = chain(16)
    rows = 4096 * 8 * 4
    plain = peak_of(graph, 4096)
    assert plain.parts["saved activations"] == 15 * rows
    # Four groups of four layers, each of which keeps what it reads. When the third is computed again, there are the
    # inputs of the second and third, its four results, the last one's input and gradient, and four weights' gradients.
    groups = [(bounds[i][0], bounds[i + 3][1]) for i in range(0, 16, 4)]
    peak = peak_of(with_recompute(graph, groups), 4096)
    assert peak.moment == "recomputation of op23"
    assert peak.num_bytes == 16 * WEIGHT + rows + (2 + 4 + 2) * rows + 4 * WEIGHT + 4


def test_gradients_of_several_microbatches_gather_in_place():
    graph, _ = chain(4)
    rows = 256 * 8 * 4
    one, four = peak_of(graph, 256), peak_of(graph, 1024, num_microbatches=4)
    # Beside what one takes: the inputs of the others; the last microbatch finds all gradients, and makes one more.
    assert one.parts["gradients"] == WEIGHT
    assert (one.parts["inputs"], four.parts["inputs"]) == (rows, 4 * rows)
    assert four.num_bytes - one.num_bytes == 4 * WEIGHT + 3 * rows


def test_a_repeated_step_peaks_alike():
    graph = load_shipped_graph("gpt-tiny")
    events = trace_step(graph, Workload(global_batch=4, optimizer=SGD))
    peaks = [int(events.in_use()[chosen].max()) for chosen in (slice(0, len(events.block) // 2), slice(None))]
    assert peaks[0] == peaks[1] == find_peak(events).num_bytes


@pytest.mark.parametrize("ranges", [[(0, 3), (2, 5)], [(-1, 2)], [(3, 3)], [(0, 10**6)]])
def test_ranges_that_cannot_be_are_refused(ranges):
    with pytest.raises(GraphError, match="overlap"):
        with_recompute(chain(3)[0], ranges)


def test_what_has_no_step_is_refused():
    graph, _ = chain(1)
    with pytest.raises(GraphError, match="expected a divisor"):
        peak_of(graph, 3, num_microbatches=2)
    names = ("name", "tensors", "ops", "layers", "inputs", "outputs")
    without_loss = type(graph)(**{name: getattr(graph, name) for name in names})
    with pytest.raises(GraphError, match="loss"):
        peak_of(without_loss, 1)


def test_layers_give_their_ranges():
    graph = load_shipped_graph("gpt-tiny")
    ranges = recompute_layers(graph, range(len(graph.layers)))
    assert [start for start, _ in ranges[1:]] == [stop for _, stop in itertools.islice(ranges, len(ranges) - 1)]


@pytest.mark.parametrize("name", [name for name in shipped_graphs() if name.endswith("-tiny")])
def test_larger_batches_and_wider_numbers_never_need_less(name):
    graph = load_shipped_graph(name)
    peaks = [peak_of(graph, samples, ADAMW).num_bytes for samples in (2, 4, 16)]
    assert peaks == sorted(peaks)
    half = find_peak(trace_step(graph, Workload(global_batch=4, optimizer=ADAMW, precision="bfloat16")))
    full = find_peak(trace_step(graph, Workload(global_batch=4, optimizer=ADAMW)))
    assert half.parts["parameters"] <= full.parts["parameters"]
    # Every peak is named by what goes on then.
    assert full.moment.startswith(("forward of ", "backward of ", "optimizer step of "))


def test_a_convolution_works_on_copies():
    make = GraphMaker()
    image = make.tensor("image", (B, 3, 8, 8), role="input", grad=False)
    weights = [make.tensor(f"weight{i}", (16, channels, 1, 1), role="parameter") for i, channels in enumerate((3, 16))]
    first, second = (make.tensor(f"y{i}", (B, 16, 8, 8)) for i in range(2))
    make.op("aten.conv2d.default", (image, weights[0]), (first,), saved=(image, weights[0]))
    make.op("aten.conv2d.default", (first, weights[1]), (second,), saved=(first, weights[1]))
    loss = make.tensor("loss", ())
    make.op("aten.sum.default", (second,), (loss,))
    graph = make.graph(has_loss=True)
    inside = 100 * 16 * 64 * 4
    weight = 16 * 16 * 4
    # oneDNN: copies of the input and of the output beside them in the backward; cuDNN: and of the weight. There are the
    # gradients of the output and of the input, too.
    for device, copied in (("cpu", 2 * inside), ("cuda", 2 * inside + weight)):
        peak = peak_of(graph, 100, device=device)
        assert (peak.moment, peak.parts["workspace"]) == ("backward of op1", copied + inside + 4)
    for kind in ("aten.conv2d.default", "aten.lstm.input", "aten.cross_entropy_loss.default", "aten.mul.Tensor"):
        odd = GraphMaker()
        end = odd.tensor("end", ())
        odd.op(kind, (), (end,))
        for device in ("cpu", "cuda"):
            assert peak_of(odd.graph(has_loss=True), 1, device=device).num_bytes >= 4


def test_selective_recompute_leaves_out_what_some_ops_keep():
    graph, _ = chain(6)
    rows = 4096 * 8 * 4
    runs = recompute_runs(graph, ("aten.exp",))
    assert runs == tuple((2 * i + 1, 2 * i + 2) for i in range(6))
    selective = peak_of(with_recompute(graph, runs), 4096)
    # The results of exp are kept for the next linear anyway, all but the last; now its six inputs are kept too: worse
    # here, and said so. In the last one's backward there are its result again and the gradient that it makes.
    assert selective.moment == "backward of op11"
    assert selective.num_bytes == 6 * WEIGHT + rows + (5 + 6 + 2) * rows + 8
    gpt = load_shipped_graph("gpt-tiny")
    attention = recompute_runs(gpt, ("aten.scaled_dot_product_attention",))
    assert len(attention) == 4
    kept = [peak_of(with_recompute(gpt, ranges), 8).parts["saved activations"] for ranges in ((), attention)]
    # Of fused attention only the sums of scores (8 samples, 4 heads, 128 tokens) are not needed elsewhere.
    assert kept[0] - kept[1] == 4 * (8 * 4 * 128 * 4)


@given(layers=st.integers(2, 6), samples=st.sampled_from([64, 4096]), kept=st.sets(st.integers(0, 11)))
def test_results_of_kept_ops_stay_until_their_range_runs_again(layers, samples, kept):
    graph, bounds = chain(layers)
    ops, rows = sorted(op for op in kept if op < 2 * layers), samples * 8 * 4
    workload = Workload(global_batch=samples, optimizer=SGD)
    in_use = []
    for keeps in ((), ops):
        again = with_recompute(graph, [(0, bounds[-1][1])], keeps)
        events = trace_step(again, workload)
        begin = next(i for i, moment in enumerate(events.moment) if events.moments[moment] == "gradient of the loss")
        in_use.append(int(events.in_use()[begin]))
        # Nothing of it is left when the step is over.
        assert int(events.in_use()[-1]) == layers * WEIGHT + rows
    # Each is one value; of the range nothing else is kept but the input, which is there anyway.
    assert in_use[1] - in_use[0] == len(ops) * rows


def test_kept_results_are_taken_and_not_computed_when_a_range_runs_again():
    graph, bounds = chain(3)
    rows = 4096 * 8 * 4
    whole = [(0, bounds[-1][1])]
    found = []
    for keeps in ((), (1, 3)):
        events = trace_step(with_recompute(graph, whole, keeps), Workload(global_batch=4096, optimizer=SGD))
        taken = [
            num_bytes
            for num_bytes, moment in zip(events.num_bytes, events.moment, strict=True)
            if num_bytes > 0 and events.moments[moment].startswith("recomputation of ")
        ]
        found.append(sum(taken))
    # Two steps, in each of which six values are made again, or four.
    assert found == [2 * 6 * rows, 2 * 4 * rows]
