"""`meshwright.plan`: the same answer as on the command line, as an object."""

import json

import pytest

import meshwright
from meshwright.cli.main import invoke
from meshwright.spec import MeshwrightError, NoFeasiblePlanError, Plan, PlanError, read_document


@pytest.fixture(scope="module")
def found():
    return meshwright.plan("gpt-tiny", "4xcpu", batch=16, zero=[0, 1], top=4)


def test_the_answer_is_that_of_the_command_line(found, capsys):
    assert (
        invoke(
            [
                "plan",
                "gpt-tiny",
                "--cluster",
                "4xcpu",
                "--batch",
                "16",
                "--zero",
                "0",
                "--zero",
                "1",
                "--top",
                "4",
                "--json",
            ]
        )
        == 0
    )
    assert json.loads(capsys.readouterr().out)["plans"] == json.loads(json.dumps(found.rows()))


def test_a_plan_is_simulated_saved_and_shown(found, tmp_path):
    assert found.simulate().step_time_s == pytest.approx(found.best.step_time_s)
    second = found.simulate(2, num_steps=1)
    assert second.step_time_s == pytest.approx(found.plans.ranked[1].step_time_s)
    written = found.save(tmp_path / "layout")
    assert [path.name for path in written] == ["plan.json", "launch.sh"]
    assert read_document(Plan, written[0]).stages == found.plan.stages
    assert [path.name for path in found.save(tmp_path / "second.json", place=2)] == ["second.json"]
    assert "<svg" in found.page(tmp_path / "page.html").read_text() or (tmp_path / "page.html").stat().st_size > 10_000
    for html in (found._repr_html_(), found.simulate()._repr_html_()):
        assert html.startswith("<table")
    assert "tokens in sequences of" in repr(found)


def test_other_layouts_are_compared(found):
    assert "It is as fast" in found.why_not(zero=0) or "loses" in found.why_not(zero=0)
    assert "per step" in found.why_not(stages=4)
    assert found.why_not(found.plans.ranked[-1].plan).startswith(("1 stage", "2 stages", "3 stages", "4 stages"))
    with pytest.raises(PlanError, match="another workload"):
        found.why_not(batch=32)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"tokns": 5}, "did you mean 'tokens'"),
        ({"out": "plan.json"}, "no option 'out'"),
        ({"sequence_parallel": True, "tensor": 1}, "sequence_parallel has no effect with tensor 1"),
        ({"inference": True, "optimizer": "sgd"}, "optimizer has no effect with inference"),
        ({"batch": 7, "microbatch_size": 2}, "does not divide into microbatches"),
        ({"tokens": 100}, "nearest is 128"),
        ({"method": "place"}, "meshwright.place"),
        ({"memory_limit": -1}, "not an amount of memory"),
        ({"optimizer": "foo"}, "optimizer.*foo"),
        ({"zero": 7}, "zero.*7 is not in the range|zero.*less than or equal to 3|zero.*7"),
        ({"memory_margin": -0.5}, "memory_margin"),
        ({"batch": 0}, "batch"),
        ({"tokens": "many"}, "tokens.*many|tokens"),
        ({"tf32": 1}, "expected True or False"),
        ({"tensor": object()}, "tensor"),
        ({"cluster_": "x"}, "no option 'cluster_'"),
    ],
)
def test_what_cannot_be_meant_is_an_error(options, words):
    with pytest.raises(PlanError, match=words):
        meshwright.plan("gpt-tiny", "2xcpu", **options)


def test_too_small_a_cluster_says_what_would_do():
    with pytest.raises(NoFeasiblePlanError, match="per step and reserves"):
        meshwright.plan("gpt2-xl", "1xA100", batch=8, memory_limit=20)
    with pytest.raises(PlanError, match="Place 9"):
        meshwright.plan("gpt-tiny", "2xcpu", batch=4, top=1).simulate(9)


def test_ways_to_say_values(tmp_path):
    found = meshwright.plan("gpt-tiny", "4xA100", batch="8", tensor=range(1, 3), zero=None, top=3)
    assert {item.plan.sharding.tensor for item in found.plans.ranked} <= {1, 2}
    assert found.plan.workload.global_batch == 8
    assert "No plan fits" in found.why_not(memory_limit=0.001)
    with pytest.raises(MeshwrightError, match=r"ends in \.html"):
        found.page(tmp_path / "page.txt")
    with pytest.raises(PlanError, match="The cluster is a Cluster"):
        meshwright.plan("gpt-tiny", meshwright.load_cluster("2xcpu"))


def test_how_many_are_listed_decides_nothing():
    options = {"zero": [0, 1], "schedule": ["gpipe", "interleaved"]}
    one, ten = (meshwright.plan("gpt2-small", "4xA100", top=top, **options) for top in (1, 10))
    assert one.plan == ten.plan
