"""Every precision that the runtime has, under every way to share out states, against plain PyTorch in one process."""

import json
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from meshwright.capture import capture_model
from meshwright.cli.main import invoke
from meshwright.runtime import check_precision, open_session
from meshwright.runtime.precisions import Masters, set_gradient_type
from meshwright.simulator import simulate_plan
from meshwright.spec import Plan, PlanError, StagePlan, Workload, load_cluster, load_shipped_graph, write_document
from meshwright.spec.precision import numbers_of
from tests.processes import free_port, run_ranks
from tests.training.precision_worker import TYPES

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(300)]
GRAPH = load_shipped_graph("gpt-tiny")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """What the ranks found of a precision, by layout."""
    known = {}

    def train(precision, *broken):
        if (precision, *broken) not in known:
            out = tmp_path_factory.mktemp("precision") / "found.json"
            run_ranks("tests.training.precision_worker", 2, str(out), precision, *broken)
            known[precision, *broken] = json.loads(out.read_text())
        return known[precision, *broken]

    return train


@pytest.mark.matrix
@pytest.mark.parametrize("precision", ["mixed", "amp-float16", "amp", "bfloat16", "mixed-bf16-gradients", "float32"])
def test_weights_and_losses_are_those_of_plain_pytorch(trained, precision):
    for layout, found in trained(precision).items():
        assert found["types"] == [str(TYPES[precision][0])]
        if layout == "tensor":
            # Products are in halves, each rounded by itself.
            assert 0 < found["off"] <= 3 * found["spread"], found
            assert found["losses"] == pytest.approx(found["wanted_losses"], rel=2.0**-7)
        else:
            assert found["off"] == 0, (layout, found)
            assert found["losses"] == pytest.approx(found["wanted_losses"], rel=1e-9)


@pytest.mark.matrix
@pytest.mark.parametrize("precision", ["mixed", "bfloat16", "amp", "mixed-bf16-gradients", "amp-float16", "float32"])
def test_bytes_are_those_of_the_precision(trained, precision):
    numbers = numbers_of(precision)
    each_state = numbers.master_bytes + 2 * numbers.state_bytes
    for layout, found in trained(precision).items():
        for held in found["held"]:
            count, parts = held["elements"], 2 if layout.startswith("zero") else 1
            parameters, gradients, states = numbers.value_bytes * count, numbers.gradient_bytes * count, each_state
            if layout in ("zero 2 host", "zero 3 away"):
                parameters, gradients = parameters // 2, gradients // 2
            if layout in ("zero 2", "zero 3"):
                # With master weights these are what a rank has a part of.
                wide = numbers.master_bytes
                parameters, gradients = (
                    (wide or numbers.value_bytes) * count // 2,
                    (wide or numbers.gradient_bytes) * count // 2,
                )
                states -= wide
            assert held["parameters"] == parameters, layout
            assert held["gradients"] == gradients, layout
            assert held["states"] == states * count // parts, layout


@pytest.mark.long
def test_a_gradient_that_is_not_finite_is_left_out_by_all(trained):
    for layout, found in trained("amp-float16", "1").items():
        for notes in found["notes"]:
            assert notes == {"same": [False, True, False], "num_steps": 2}, layout
        assert found["skipped"] == 1
        assert found["off"] == 0 or layout == "tensor"


@pytest.mark.long
def test_precisions_differ(trained):
    losses = {tuple(trained(precision)["1f1b"]["losses"]) for precision in ("float32", "amp", "amp-float16", "mixed")}
    assert len(losses) == 4, "where all are alike, equality says nothing"


def plan_of(precision, **options):
    return Plan(
        model="gpt-tiny",
        graph_hash=GRAPH.content_hash,
        cluster="1xcpu",
        workload=Workload(global_batch=8, precision=precision, **options),
        stages=(StagePlan(start=0, stop=6, ranks=(0,)),),
        num_microbatches=2,
    )


PREPARING = """
import os, torch, torch.distributed as dist
os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "%d", "RANK": "0", "WORLD_SIZE": "1"}
from dataclasses import replace
from meshwright.spec import GraphMismatchError, Plan, StagePlan, Workload
from meshwright.training import prepare, trainer
from meshwright.capture import capture_model
verified, real = [], trainer.check_capture
trainer.check_capture = lambda it, model, *rest, **facts: verified.append(model[0].weight.dtype) or real(
    it, model, *rest, **facts)
def make():
    return torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
loss, batch = torch.nn.functional.mse_loss, ((torch.randn(2, 4),), (torch.randn(2, 1),))
def plan_of(model, batch):
    graph = capture_model(model, batch[0], targets=batch[1], loss=loss, verify=False).graph
    stages = (StagePlan(start=0, stop=len(graph.layers), ranks=(0,)),)
    work = Workload(global_batch=2, precision="mixed")
    facts = {"model": "m", "graph_hash": graph.content_hash, "cluster": "1xcpu"}
    return Plan(**facts, workload=work, stages=stages, num_microbatches=1)
model, plan = make(), plan_of(make(), batch)
try:
    prepare(model, loss, torch.optim.SGD(model.parameters()), batch, plan=replace(plan, graph_hash="0" * 16))
except GraphMismatchError:
    print("refused", model[0].weight.dtype)
for item in (model, make().bfloat16()):
    given = batch if item is model else tuple((part[0].bfloat16(),) for part in batch)
    verified.clear()
    prepare(item, loss, torch.optim.SGD(item.parameters()), given, plan=plan_of(item, given)).step(*batch)
    print(verified, item[0].weight.dtype)
dist.destroy_process_group()
"""


def test_a_model_is_cast_when_its_plan_fits_and_verified_as_it_runs(run_fresh):
    refused, *runs = run_fresh(PREPARING % free_port()).splitlines()
    assert refused == "refused torch.float32"
    assert runs == ["[torch.bfloat16] torch.bfloat16"] * 2


@pytest.mark.matrix
@pytest.mark.parametrize("precision", ["mixed", "bfloat16", "amp-float16"])
def test_the_command_line_runs_what_was_planned(precision, tmp_path, warm_ranks, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    options = ["--cluster", "1xcpu", "--batch", "8", "-m", "4", "--precision", precision, "--out", "plan.json"]
    assert invoke(["plan", "gpt-tiny", *options]) == 0
    capsys.readouterr()
    assert invoke(["run", "plan.json", "--steps", "2"]) == 0
    assert "in 2 steps" in capsys.readouterr().out
    assert invoke(["run", "plan.json", "--dry"]) == 0


@pytest.mark.parametrize("precision", ["mixed-float16", "float8"])
def test_what_is_only_predicted_is_refused(precision, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    plan = plan_of(precision)
    assert simulate_plan(plan, GRAPH, load_cluster("1xH100")).step_time_s > 0
    assert invoke(["run", str(write_document(plan, tmp_path / "plan.json"))]) == 1
    assert f"computes in {precision}, which can only be simulated" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("precision", "before", "within"),
    [("tf32", "none", "tf32"), ("float32", "tf32", "ieee"), ("float32", "none", "none"), ("amp", "tf32", "tf32")],
)
def test_a_step_multiplies_as_its_precision_says(precision, before, within):
    setting, seen = torch.backends.cuda.matmul, []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is torch.ops.aten.mm.default:
                seen.append(setting.fp32_precision)
            return func(*args, **(kwargs or {}))

    model, x, y = torch.nn.Linear(4, 4, bias=False), torch.ones(2, 4), torch.ones(2, 4)
    captured = capture_model(model, (x,), targets=(y,), loss=torch.nn.functional.mse_loss, verify=False)
    plan = replace(
        plan_of(precision),
        graph_hash=captured.graph.content_hash,
        stages=(StagePlan(start=0, stop=len(captured.graph.layers), ranks=(0,)),),
        num_microbatches=1,
        workload=Workload(global_batch=2, precision=precision),
    )
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    usual, setting.fp32_precision = setting.fp32_precision, before
    try:
        session = open_session(captured, plan, torch.optim.SGD(model.parameters(), lr=0.1))
        with Watch():
            session.run_step(0, (x, y))
            session.finish()
        session.close()
        assert setting.fp32_precision == before
    finally:
        setting.fp32_precision = usual
        dist.destroy_process_group()
    assert len(seen) == 2
    assert set(seen) == {within}


def test_what_ranks_would_refuse_is_refused_before_they_start(tmp_path, capsys):
    two = (StagePlan(start=0, stop=6, ranks=(0, 1)),)
    waves = replace(plan_of("mixed"), stages=two, schedule="hetpipe", cluster="2xcpu")
    assert invoke(["run", str(write_document(waves, tmp_path / "waves.json"))]) == 1
    assert "hetpipe sums changes of weights" in " ".join(capsys.readouterr().err.split())
    place = [
        "plan",
        "gpt-tiny",
        "--cluster",
        "1xcpu",
        "--batch",
        "4",
        "--method",
        "place",
        "--precision",
        "amp-float16",
    ]
    assert invoke([*place, "--out", str(tmp_path / "placed.json")]) == 0
    capsys.readouterr()
    assert invoke(["run", str(tmp_path / "placed.json")]) == 1
    assert "A placement cannot train in amp-float16" in " ".join(capsys.readouterr().err.split())


def test_scaled_losses_need_a_schedule_that_flushes():
    two = (StagePlan(start=0, stop=3, ranks=(0,)), StagePlan(start=3, stop=6, ranks=(1,)))
    with pytest.raises(PlanError, match="amp-float16 was given for the asynchronous schedule pipedream"):
        replace(plan_of("amp-float16"), stages=two, schedule="pipedream")


def test_a_gpu_without_bfloat16_is_named(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla T4")
    check_precision(plan_of("float32"), torch.device("cuda", 0))
    check_precision(plan_of("amp-float16"), torch.device("cuda", 0))
    check_precision(plan_of("mixed"), torch.device("cpu"))
    for precision in ("amp", "mixed", "bfloat16"):
        with pytest.raises(PlanError, match=r"bfloat16, which Tesla T4 \(compute capability 7\.5\).*amp-float16"):
            check_precision(plan_of(precision), torch.device("cuda", 0))


def test_a_torch_without_types_of_gradients_is_named():
    class Old:
        dtype = torch.bfloat16

    with pytest.raises(PlanError, match="accumulates gradients only in the type of their parameters"):
        set_gradient_type(Old(), torch.float32)


def test_masters_go_on_where_parameters_cannot():
    parameter = torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    set_gradient_type(parameter, torch.float32)
    masters = Masters({7: parameter}, numbers_of("mixed"))
    optimizer = torch.optim.SGD([masters.updated[7]], lr=1.0)
    # A step of 2^-10 is lost in bfloat16, 16 of them are not.
    for step in range(16):
        parameter.grad = torch.full((3,), 2.0**-10)
        with masters.stepping([parameter]):
            optimizer.step()
        assert bool((parameter == 1).all()) == (step < 2)
    assert torch.equal(masters.updated[7], torch.full((3,), 1 - 2.0**-6))
    assert masters.updated[7].grad is None
    again = Masters({7: parameter}, numbers_of("mixed"))
    again.take_state(masters.state())
    assert torch.equal(again.updated[7], masters.updated[7])
