"""Mixtures by grouped products on the expert axis: what a rank computes, what travels, and what cannot be laid out."""

from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from running.shares import share_source
from torch import nn

from meshwright.capture import capture_model
from meshwright.capture.surroundings import grouped_mm
from meshwright.program import check_configured_experts, lower_graph, shard_graph
from meshwright.spec import Extent, PlanError, Shard, Sharding

EXPERTS, CHOSEN, TOKENS, WIDTH, HIDDEN = 8, 2, 6, 16, 24
ROWS = CHOSEN * TOKENS


class Mixture(nn.Module):
    """A router, and experts by grouped products with biases; ``change`` says what is done otherwise."""

    def __init__(self, change=""):
        super().__init__()
        self.change = change
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, HIDDEN))
        self.up_bias = nn.Parameter(torch.randn(EXPERTS, HIDDEN))
        self.down = nn.Parameter(torch.randn(EXPERTS, HIDDEN, WIDTH))

    def forward(self, x):
        flat = x.flatten(0, 1)
        weights, experts = self.router(flat).softmax(-1).topk(CHOSEN, dim=-1)
        ids, order = experts.flatten().sort()
        rows = flat[order // CHOSEN]
        counts = torch.histc(ids.float(), bins=EXPERTS, min=0, max=EXPERTS - 1)
        ends = counts.cumsum(0, dtype=torch.int32)
        if self.change == "ends":
            ends = counts.int()
        hidden = grouped_mm(rows, self.up, ends) + self.up_bias[ids]
        if self.change == "rows":
            hidden = hidden.view(-1, rows.shape[0] // 2, HIDDEN).flatten(0, 1)
        hidden = hidden.softmax(0) if self.change == "across" else hidden.relu()
        down = torch.cat([self.down[: EXPERTS // 2], self.down[EXPERTS // 2 :]]) if self.change == "down" else self.down
        made = grouped_mm(hidden, down, ends) * weights.flatten()[order].unsqueeze(-1)
        back = torch.empty_like(order)
        back[order] = torch.arange(order.shape[0])
        if self.change == "back":
            back = order
        return x + made[back].view(-1, CHOSEN, WIDTH).sum(1).view(x.shape)


def graph_of(change=""):
    return captured(nn.Sequential(nn.Linear(WIDTH, WIDTH), Mixture(change)))


def captured(model):
    batch = torch.randn(4, TOKENS, WIDTH), torch.randn(4, TOKENS, WIDTH)
    return capture_model(model, batch[:1], targets=batch[1:], loss=nn.functional.mse_loss, verify=False).graph


@pytest.fixture(scope="module")
def graph():
    return graph_of()


@pytest.mark.parametrize("size", [2, 4, 8])
def test_a_rank_has_its_experts_and_as_many_rows_as_it_sends(graph, size):
    sharded = shard_graph(graph, Sharding(expert=size))
    local, layouts = sharded.graph, sharded.layouts["expert"]
    split = {graph.tensors[i].name: local.tensors[i].shape[0] for i in graph.parameters if layouts[i] == Shard(0)}
    assert split == {f"1.{name}": Extent(EXPERTS // size) for name in ("up", "up_bias", "down")}
    products = [op for op in local.ops if op.kind.startswith("meshwright.grouped_mm")]
    assert [local.tensors[op.outputs[0]].shape for op in products] == [
        (Extent(0, ROWS), Extent(HIDDEN)),
        (Extent(0, ROWS), Extent(WIDTH)),
    ]
    assert [op.flops for op in products] == [Extent(0, 2 * ROWS * WIDTH * HIDDEN)] * 2
    # Nothing else is exchanged, but what sums the loss's parts up needs nothing.
    assert Counter((item.kind, item.phase) for item in sharded.collectives) == {
        ("all_to_all", "forward"): 3,
        ("all_to_all", "backward"): 2,
    }


@pytest.mark.parametrize("size", [2, 4])
def test_counts_and_rows_travel_there_and_back(graph, size):
    sharded = shard_graph(graph, Sharding(expert=size))
    batch = 3
    sizes = [item.num_bytes(sharded.graph, batch) for item in sharded.collectives]
    counts, rows = size * EXPERTS * 8, size * batch * ROWS * WIDTH * 4
    assert sizes == [counts, rows, rows, rows, rows]
    # In two bytes rows halve, whole numbers do not.
    halved = [item.num_bytes(sharded.graph, batch, 2) for item in sharded.collectives]
    assert halved == [counts, *[rows // 2] * 4]


def test_the_router_is_held_by_all_and_its_gradient_summed(graph):
    sharded = shard_graph(graph, Sharding(expert=2))
    summed = {graph.tensors[i].name for i in sharded.reduced_parameters["expert"]}
    assert summed == {"0.weight", "0.bias", "1.router.weight", "1.router.bias"}


def test_experts_beside_the_tensor_axis_are_whole_there(graph):
    sharded = shard_graph(graph, Sharding(expert=2, tensor=2))
    assert not any(item.axis == "tensor" and item.kind == "all_to_all" for item in sharded.collectives)
    assert shard_graph(graph, Sharding(tensor=2)).graph.num_parameters() <= graph.num_parameters()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("ends", "something else than the cumulative sum of a histogram of the choices"),
        ("rows", "has a fixed number of rows, but the router decides this number"),
        ("across", "mixes the rows of different samples"),
        ("down", "does not multiply sorted rows with a parameter"),
        ("back", "picks rows by something else"),
    ],
)
def test_rows_that_are_sorted_in_another_way_are_refused(change, words):
    with pytest.raises(PlanError, match=f"mixture of experts in '1': op .*{words}.*expert = 1"):
        shard_graph(graph_of(change), Sharding(expert=2))


def test_experts_that_the_ranks_do_not_divide_are_refused_with_their_module(graph):
    with pytest.raises(PlanError, match="'1' has 8 experts; expected a divisor of 8"):
        shard_graph(graph, Sharding(expert=3))
    with pytest.raises(PlanError, match="'1' has fewer experts than ranks: 8"):
        shard_graph(graph, Sharding(expert=16))
    plain = capture_model(nn.Linear(4, 4), (torch.randn(2, 4),), mode="inference").graph
    with pytest.raises(PlanError, match="has no experts: no grouped product"):
        shard_graph(plain, Sharding(expert=2))


@pytest.mark.parametrize("key", ["num_local_experts", "num_experts", "n_routed_experts"])
def test_a_configuration_says_how_many_experts_there_are(key):
    check_configured_experts({key: 8}, "config.json", (3, 4))
    check_configured_experts({"hidden_size": 3, key: 1}, "config.json", (2,))
    with pytest.raises(PlanError, match=f"'config.json: {key}' has 8 experts"):
        check_configured_experts({key: 8}, "config.json", (3, 5))
    with pytest.raises(PlanError, match=f"'config.json: text_config.{key}' has fewer experts than ranks: 8"):
        check_configured_experts({"text_config": {key: 8}}, "config.json", (16,))


def test_numbers_that_count_samples_are_those_of_all_ranks():
    class Counted(nn.Module):
        def forward(self, x):
            return SimpleNamespace(whole=x, sums=x.sum((0, 1)) / (0.0 + x.shape[0] * x.shape[1]))

    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Mixture(), Counted())

    def loss(made, target):
        return nn.functional.mse_loss(made.whole, target) + made.sums.square().sum()

    batch = torch.randn(4, TOKENS, WIDTH), torch.randn(4, TOKENS, WIDTH)
    whole = capture_model(model, batch[:1], targets=batch[1:], loss=loss, verify=False).graph
    local = shard_graph(whole, Sharding(expert=2)).graph
    factors = [dict(op.attributes)["other"] for g in (whole, local) for op in g.ops if op.kind == "aten.div.Tensor"]
    assert factors == [f"{TOKENS}*b", f"{2 * TOKENS}*b"]


def test_the_ops_of_a_share_run_without_other_ranks(graph):
    local = lower_graph(graph, Sharding(expert=2), ())
    made = share_source(local, 3).cut(local.inputs, local.outputs, range(len(local.ops)), 3)
    made.load_state_dict({name: torch.rand(x.shape).to(x.dtype) for name, x in made.state_dict().items()}, assign=True)
    for parameter in made.parameters():
        parameter.requires_grad_()
    (loss,) = made(*(torch.rand(3, TOKENS, WIDTH) for _ in local.inputs))
    loss.backward()
    held = {name: parameter for name, parameter in made.named_parameters() if "up" in name or "down" in name}
    # Rows are even, so every expert that is here computes.
    assert {len(parameter) for parameter in held.values()} == {EXPERTS // 2}
    assert all(expert.any() for parameter in held.values() for expert in parameter.grad)


class Attention(nn.Module):
    """Queries and keys wider than values, so that torch attends by products that it makes itself, or by two of ours."""

    def __init__(self, heads=4, by_hand=False):
        super().__init__()
        self.heads, self.by_hand = heads, by_hand
        self.q, self.k = nn.Linear(WIDTH, heads * 12), nn.Linear(WIDTH, heads * 12)
        self.v, self.out = nn.Linear(WIDTH, heads * 4), nn.Linear(heads * 4, WIDTH)

    def forward(self, x):
        q, k, v = (f(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        if self.by_hand:
            made = (q @ k.transpose(2, 3)).softmax(-1) @ v
        else:
            made = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(made.transpose(1, 2).flatten(2))


def saved_inside(graph):
    """Shapes of what the ops of attention keep that they made inside: no output is it."""
    ops = [op for op in graph.ops if "attention" in op.kind or "matmul" in op.kind]
    return [graph.tensors[i].shape for op in ops for i in op.saved if graph.tensors[i].role == "saved"]


@pytest.mark.parametrize("by_hand", [True, False])
def test_what_ops_keep_inside_is_that_of_the_samples_of_a_rank(by_hand):
    graph = captured(nn.Sequential(Attention(by_hand=by_hand), Mixture()))
    wanted = saved_inside(graph)
    assert len(wanted) >= 2
    assert all(any(extent.per_sample for extent in shape) for shape in wanted)
    for sharding in (Sharding(expert=2), Sharding(expert=4)):
        assert saved_inside(shard_graph(graph, sharding).graph) == wanted


@pytest.mark.parametrize("by_hand", [True, False])
def test_what_ops_keep_inside_is_that_of_the_heads_of_a_rank(by_hand):
    whole, half = (captured(Attention(heads, by_hand)) for heads in (4, 2))
    assert saved_inside(shard_graph(whole, Sharding(tensor=2)).graph) == saved_inside(half) != saved_inside(whole)
