"""What comes when, deployments as files, policies of one's own, and the command line."""

from __future__ import annotations

import json

import numpy as np
import pytest

from meshwright.cli.main import invoke
from meshwright.serving import draw_arrivals, load_policy, mean_rate, simulate_deployment
from meshwright.spec import Diurnal, DocumentError, Gamma, Poisson, ServingError, Trace, read_deployment
from meshwright.spec.quantities import Seconds
from tests.serving.deployments import deploy, make_model

pytestmark = pytest.mark.timeout(400)  # the first test of a policy compiles it


def with_arrivals(arrivals, name="model"):
    model = make_model(name)
    return type(model)(name=name, slo=model.slo, latency=model.latency, arrivals=arrivals)


@pytest.mark.parametrize(
    ("arrivals", "squared_variation"),
    [(Poisson(rate=300.0), 1.0), (Gamma(rate=300.0, shape=0.1), 10.0), (Gamma(rate=300.0, shape=4.0), 0.25)],
)
def test_gaps_have_their_rate_and_variation(arrivals, squared_variation):
    moments, _ = draw_arrivals([with_arrivals(arrivals)], 400.0, seed=3)
    gaps = np.diff(moments) / 1e9
    count = 300.0 * 400
    assert abs(len(moments) - count) < 5 * (squared_variation * count) ** 0.5
    assert gaps.var() / gaps.mean() ** 2 == pytest.approx(squared_variation, rel=0.1)
    assert (np.diff(moments) >= 0).all()
    assert moments[-1] < 400e9


def test_a_day_has_its_wave():
    arrivals = Diurnal(low=100.0, high=500.0, period=Seconds(10))
    moments, _ = draw_arrivals([with_arrivals(arrivals)], 400.0)
    phase = moments / 1e9 % 10
    low = ((phase < 1) | (phase > 9)).sum() / (400 / 5)
    high = ((phase > 4) & (phase < 6)).sum() / (400 / 5)
    assert mean_rate(arrivals) == 300
    assert low == pytest.approx(100 + 200 * (1 - np.sin(0.2 * np.pi) / (0.2 * np.pi)), rel=0.05)
    assert high == pytest.approx(500 - 200 * (1 - np.sin(0.2 * np.pi) / (0.2 * np.pi)), rel=0.05)


def test_changing_one_model_leaves_the_requests_of_others():
    other = with_arrivals(Gamma(rate=200.0, shape=0.5), "other")
    for rate in (50.0, 400.0):
        moments, owners = draw_arrivals([with_arrivals(Gamma(rate=rate, shape=2.0)), other], 5.0)
        kept = moments[owners == 1]
        if rate == 50:
            first = kept
    assert (first == kept).all()


def test_a_trace_is_replayed(tmp_path):
    file = tmp_path / "trace.txt"
    file.write_text("0.5\n1.0\n1.5\n4.0\n")
    trace = Trace(file=str(file), speed=2.0)
    moments, _ = draw_arrivals([with_arrivals(trace)], 1.0)
    assert moments.tolist() == [250_000_000, 500_000_000, 750_000_000]
    assert mean_rate(trace) == 2


@pytest.mark.parametrize("content", ["", "1\n", "2\n1\n", "one\ntwo\n", "-1\n1\n", "nan\n1\n", "0\n0\n"])
def test_what_is_no_trace_is_refused(tmp_path, content):
    file = tmp_path / "bad.txt"
    file.write_text(content)
    with pytest.raises(DocumentError, match=r"bad\.txt"):
        mean_rate(Trace(file=str(file)))


TEXT = """schema = "meshwright/deployment/1"
devices = 2
[[models]]
name = "one"
slo = "25 ms"
latency = { alpha = "1 ms", beta = "5 ms" }
arrivals = { kind = "poisson", rate = 200.0 }
"""


@pytest.mark.parametrize(
    ("before", "after", "told"),
    [
        ("devices = 2", "device = 2", "did you mean 'devices'"),
        ("devices = 2", "devices = 0", "devices is 0"),
        ('slo = "25 ms"', 'slo = "5 ms"', "longer than its SLO"),
        ('"poisson"', '"poison"', "did you mean 'poisson'"),
        ("rate = 200.0", "rate = -1.0", "rate is -1"),
        ('alpha = "1 ms"', "alpha = 1", "no unit"),
        ("[[models]]", 'troubles = [{ kind = "straggler", device = 2, factor = 2.0 }]\n[[models]]', "device 2"),
    ],
)
def test_a_wrong_deployment_is_refused_with_its_place(tmp_path, before, after, told):
    file = tmp_path / "served.toml"
    file.write_text(TEXT.replace(before, after))
    with pytest.raises(DocumentError, match=told) as caught:
        read_deployment(file)
    assert "served.toml" in str(caught.value)


MINE = """
class Mine:
    def arrive(self, pool, now, queue, request, deadline):
        {arrive}

    def free(self, pool, now, device):
        {free}
"""
RUNS = "pool.length(0) and pool.run(0, min(pool.length(0), pool.largest(0)), device)"
ENTERS = "pool.enter(queue, request, deadline) and pool.is_idle(0) and self.free(pool, now, 0)"


def run_mine(folder, arrive=ENTERS, free=RUNS, text=MINE, name="Mine", rate=300.0):
    file = folder / "mine.py"
    file.write_text(text.format(arrive=arrive, free=free))
    return simulate_deployment(deploy(make_model(rate=rate), devices=1), load_policy(f"{file}:{name}"), 1.0)


def test_a_policy_of_ones_own_serves(tmp_path):
    result = run_mine(tmp_path)
    assert result.num_requests == result.models[0].num_in_time + result.models[0].num_late
    assert result.models[0].mean_batch > 1


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"free": "pool.run(0, 1000, device)"}, "batch of queue 0"),
        ({"free": "pool.length(0) and (pool.run(0, 1, device), pool.run(0, 1, device))"}, "not idle|batch of queue"),
        ({"arrive": "pool.enter(queue, request + 1, deadline)"}, "one that has come"),
        ({"arrive": "pool.enter(queue, request, 'soon')"}, "deadline 'soon'"),
        ({"arrive": "1 / 0"}, r"ZeroDivisionError: division by zero .*mine\.py:4"),
        ({"name": "Yours"}, "no function 'Yours'"),
        ({"text": "class Mine:\n    pass  # {arrive}{free}\n"}, "no method 'arrive'"),
    ],
)
def test_a_wrong_policy_is_told_what_is_wrong(tmp_path, changes, told):
    with pytest.raises(ServingError, match=told):
        run_mine(tmp_path, **changes)


@pytest.mark.parametrize(
    ("reference", "told"),
    [
        ("symfony", "did you mean 'symphony'"),
        ("timeouts:wate=3", "did you mean 'wait'"),
        ("timeouts:wait=soon", "wait=NUMBER"),
        ("timeouts:wait=1,wait=2", "twice"),
    ],
)
def test_a_name_that_is_no_policy(reference, told):
    with pytest.raises(ServingError, match=told):
        load_policy(reference)


@pytest.fixture
def file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "served.toml").write_text(TEXT)
    return tmp_path / "served.toml"


def test_the_command_prints_and_writes(file, capsys):
    assert invoke(["simulate", str(file), "--policy", "eager", "--seconds", "1", "--out", "r.json", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed == json.loads((file.parent / "r.json").read_text())
    assert printed["policy"] == "eager"
    assert printed["models"][0]["requests_per_s"] == printed["requests_per_s"]
    assert printed["staggered_scale"] > printed["uncoordinated_scale"] > 1
    options = ["--policy", "symphony", "--against", "eager", "--seconds", "1"]
    assert invoke(["simulate", str(file), *options]) == 0
    assert "regret" in capsys.readouterr().out
    assert invoke(["simulate", str(file), "--policy", "eager", "--goodput", "--seconds", "1", "--json"]) == 0
    assert 0.5 < json.loads(capsys.readouterr().out)["policies"][0]["bound_share"] < 1.2
    assert invoke(["simulate", str(file), "--policy", "eager", "--capacity", "--seconds", "1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["policies"][0]["num_devices"] == 1


def test_a_sweep_of_a_deployment(file, capsys):
    sweep = ["--sweep", "devices=1,2", "--sweep", "policy=eager,symphony", "--seconds", "1"]
    assert invoke(["simulate", str(file), *sweep, "--out", "s.csv", "--plot", "s.svg", "--json"]) == 0
    cases = json.loads(capsys.readouterr().out)["cases"]
    assert [(case["devices"], case["policy"]) for case in cases] == [
        (devices, policy) for devices in (1, 2) for policy in ("eager", "symphony")
    ]
    assert len((file.parent / "s.csv").read_text().splitlines()) == 5
    assert (file.parent / "s.svg").read_text().startswith("<svg")


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--cluster", "4xA100"], "--cluster was given for a deployment"),
        (["--policy", "nobody"], "no policy 'nobody'"),
        (["--sweep", "devices=1,2", "--goodput"], "--sweep has policies"),
        (["--goodput", "--capacity"], "Ask for one"),
        (["--out", "r.txt"], "ends in .json"),
        (["--sweep", "models.3.slo=1,2ms"], "models.3.slo"),
    ],
)
def test_what_does_not_go_together_is_refused(file, capsys, options, told):
    assert invoke(["simulate", str(file), *options]) == 1
    assert told in " ".join(capsys.readouterr().err.split())


def test_a_plan_has_no_policy(tmp_path, capsys):
    (tmp_path / "plan.json").write_text("{}")
    assert invoke(["simulate", str(tmp_path / "plan.json"), "--policy", "eager"]) == 1
    assert "--policy is about a deployment" in " ".join(capsys.readouterr().err.split())
