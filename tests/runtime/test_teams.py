"""Plans that split ops train as one process does, in float64 to 1e-9 per tensor, and exchange what is predicted.

Tensor, sequence, context and expert axes, alone and with each other, pipelines, and replicas that share out states;
every layout with one optimizer and some model, the whole matrix is slow.
"""

import pytest
import torch
from torch import nn

from meshwright.capture import capture_model
from meshwright.runtime.stage_steps import own_optimizer
from meshwright.runtime.teams.grid import AxisGroup, TeamPosition
from meshwright.runtime.teams.local_parts import local_model
from meshwright.runtime.teams.shares import Cut
from meshwright.runtime.teams.team_operators import Attend
from meshwright.spec import Op, Plan, PlanError, Sharding, StagePlan, Workload, slice_graph
from tests.runtime.matrix import assert_equal, matrix_cases, matrix_runs
from tests.runtime.models import GPT
from tests.runtime.team_cases import CASES, FEW, HOST, NVME, SAVED, all_cases, main_cases
from tests.runtime.team_models import MODELS


def GPT24():  # noqa: N802 - stands beside classes of models
    return GPT(depth=1, vocabulary=24, length=8, heads=4, tied=False)


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return matrix_runs("tests.runtime.team_worker", tmp_path_factory.mktemp("teams"), timeout_s=500)


@pytest.mark.distributed
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("which", "world_size", "case"), matrix_cases(CASES, MODELS, main_cases, all_cases, few=FEW))
def test_state_and_losses_are_those_of_one_process(results, which, world_size, case):
    assert_equal(results(which, world_size)[case])


@pytest.mark.long
@pytest.mark.distributed
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("world_size", "case"),
    [
        (2, "1/1f1b/tensor/sgd"),
        (2, "1/1f1b/sequence/adamw"),
        (2, "1/1f1b/context/adamw"),
        (2, "1/1f1b/sequence+again=op/sgd"),
        (2, "2/1f1b/whole+zero1/adamw"),
        (2, "2/1f1b/whole+zero2/sgd"),
        (2, "2/1f1b/whole+zero3/adamw"),
        (2, "2/1f1b/whole+parts/sgd"),
        (4, "4/1f1b/whole+zero1+pairs/adamw"),
        (4, "4/1f1b/whole+zero2+pairs/sgd"),
        (4, "4/1f1b/whole+zero3+pairs/adamw"),
        (4, "4/1f1b/whole+zero3+pairs+host+parameters/adamw"),
    ],
)
def test_the_collectives_of_a_step_are_those_that_are_predicted(results, world_size, case):
    result = results("main", world_size)[f"gpt/{case}"]
    if "zero1+pairs" in case:
        # Sums across groups follow their scatters beside the next ones: in each group there is one order.
        exchanged, expected = (sorted(result[key], key=lambda item: item[2]) for key in ("exchanged", "expected"))
        assert exchanged == expected
    else:
        assert result["exchanged"] == result["expected"]
    assert len(result["exchanged"]) >= 8


@pytest.mark.long
@pytest.mark.distributed
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "case", [case for case in main_cases("gpt", 2) if any(word in case.split for word in (HOST, NVME, SAVED))]
)
def test_the_host_does_what_the_program_says_in_order_and_bytes(results, case):
    result = results("main", 2)[f"gpt/{case.key}"]
    assert result["done_by_host"] == result["asked_of_host"]
    wanted = {"SavedDown", "SavedUp"} if SAVED in case.split else set()
    wanted |= {"HostStep"} if HOST in case.split or NVME in case.split else set()
    assert wanted <= result["done_by_host"].keys()


@pytest.mark.parametrize("parts", [1, 3])
def test_what_is_cut_is_joined_again(parts):
    value = torch.arange(48.0).view(2, 24)
    shares = Cut(1, parts).shares(value, 4)
    assert all(share.shape == (2, 6) for share in shares)
    assert torch.equal(Cut(1, parts).join(shares), value)


class MLP(nn.Module):
    """Two products, with something between them."""

    def __init__(self, between=torch.relu, hidden=4):
        super().__init__()
        self.up, self.down, self.between = nn.Linear(4, hidden), nn.Linear(hidden, 2), between

    def forward(self, x):
        return self.down(self.between(self.up(x)))


class Running(MLP):
    """A running mean of its own."""

    def __init__(self):
        super().__init__()
        self.register_buffer("run", torch.ones(4))

    def forward(self, x):
        hidden = self.up(x)
        self.run.mul_(0.9).add_(hidden.detach().mean(0), alpha=0.1)
        return self.down(torch.relu(hidden) * self.run)


class Forgetful(nn.Module):
    """Attention that drops some of its weights."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x):
        q, k, v = (item.view(*x.shape[:2], 2, 4).transpose(1, 2) for item in self.qkv(x).chunk(3, -1))
        y = nn.functional.scaled_dot_product_attention(q, k, v, dropout_p=0.1)
        return self.out(y.transpose(1, 2).reshape(x.shape))


def at_most(hidden):
    return torch.clamp(hidden, max=torch.ones(4))


class Scaled(nn.Module):
    """A learned factor of a loss."""

    def __init__(self):
        super().__init__()
        self.model, self.factor = GPT24(), nn.Parameter(torch.ones(()))

    def forward(self, tokens):
        return self.model(tokens), self.factor


def scaled(outputs, targets):
    made, factor = outputs
    return factor * nn.functional.cross_entropy(made.flatten(0, 1), targets.flatten())


def weighed(outputs, targets):
    return nn.functional.cross_entropy(outputs.flatten(0, 1), targets.flatten(), weight=torch.rand(24))


def masked_mean(outputs, targets):
    losses = nn.functional.cross_entropy(outputs.flatten(0, 1), targets.flatten(), reduction="none")
    mask = (targets.flatten() > 5).to(losses.dtype)
    return (losses * mask).sum() / mask.sum()


def open_local(model, loss=nn.functional.mse_loss, batch=None, **sharding):
    x, y = batch or (torch.randn(4, 4), torch.randn(4, 2))
    captured = capture_model(model, (x,), targets=(y,), loss=loss, verify=False)
    graph = captured.graph
    plan = Plan(
        model="own",
        graph_hash=graph.content_hash,
        cluster="",
        workload=Workload(global_batch=4),
        stages=(StagePlan(start=0, stop=len(graph.layers), ranks=(0,)),),
        num_microbatches=1,
        sharding=Sharding(**(sharding or {"tensor": 2})),
    )
    axes = {axis: AxisGroup(group=None, ranks=(0, 1), index=0) for axis in ("tensor", "context") if axis in sharding}
    local = local_model(captured, plan, TeamPosition(process=0, width=2, axes=axes), torch.device("cpu"))
    (stage,) = slice_graph(local.graph, plan.bounds)
    return local.module(stage.inputs, stage.outputs, stage.ops)


TEXT = torch.randint(24, (4, 8)), torch.randint(24, (4, 8))
SEQUENCES = torch.randn(4, 6, 8), torch.randn(4, 6, 8)


@pytest.mark.parametrize(
    ("make", "options", "words"),
    [
        (MLP, {"tensor": 2, "sequence_parallel": True, "regather": True}, "which can only be simulated"),
        (Forgetful, {"tensor": 2, "batch": SEQUENCES}, "draws random numbers, and only dropout can do that on shards"),
        (lambda: MLP(at_most), {"tensor": 2}, "some of its optional tensors are missing"),
        (Running, {"tensor": 2}, "'run' in its forward; a shard would give"),
        (GPT24, {"tensor": 2, "batch": TEXT, "loss": weighed}, "has weights of classes"),
        (
            GPT24,
            {"context": 2, "batch": TEXT, "loss": masked_mean},
            "needs a complete sum, of which each process has only a partial sum",
        ),
        (
            Scaled,
            {"context": 2, "batch": TEXT, "loss": scaled},
            "needs a complete sum, of which each process has only a partial sum",
        ),
    ],
)
def test_what_cannot_be_computed_in_shares_is_refused(make, options, words):
    torch.manual_seed(0)
    with pytest.raises(PlanError, match=words):
        open_local(make().train(), **options)


@pytest.mark.parametrize("index", [0, 1, 2])
def test_causal_attention_reads_no_key_behind_its_queries(index):
    queries, ranks = 4, 3
    query, key, value = (torch.randn(2, 1, queries * ranks, 8, dtype=torch.float64) for _ in range(3))
    whole = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
    own = slice(index * queries, (index + 1) * queries)
    for later in (key, value):
        later[..., own.stop :, :] = torch.nan
    kind, attributes = "aten.scaled_dot_product_attention.default", (("is_causal", "True"),)
    op = Op(name="attention", kind=kind, inputs=(0, 1, 2), outputs=(3,), attributes=attributes)
    attend = Attend(op, AxisGroup(group=None, ranks=(0, 1, 2), index=index), nn.Identity())
    torch.testing.assert_close(attend(query[..., own, :], key, value), whole[..., own, :])


def test_an_optimizer_with_state_of_what_is_split_is_refused():
    whole, share = (nn.Parameter(torch.ones(2)) for _ in range(2))
    optimizer = torch.optim.SGD([whole], lr=0.1, momentum=0.9)
    assert own_optimizer(optimizer, [share], {id(whole): share}).param_groups[0]["params"] == [share]
    optimizer = torch.optim.SGD([whole], lr=0.1, momentum=0.9)
    whole.grad = torch.ones(2)
    optimizer.step()
    with pytest.raises(PlanError, match=r"already has state .*, but the plan replaces its parameters"):
        own_optimizer(optimizer, [share], {id(whole): share})
