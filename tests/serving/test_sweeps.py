"""Grids of deployments: every case is what a simulation of its own says, and what cannot be says why."""

import pytest

from meshwright.serving import load_policy, simulate_deployment, sweep_deployment
from meshwright.simulator.scenarios import read_parameter
from meshwright.spec import MeshwrightError
from tests.serving.deployments import one_model


def sweep(*texts, deployment=None, **options):
    parameters = [read_parameter(text) for text in texts]
    return sweep_deployment(parameters, deployment or one_model(rate=900), 1.0, **options)


def test_each_case_is_its_own_simulation():
    found = sweep("devices=1,2", "policy=symphony,eager", seed=3)
    assert [(row["devices"], row["policy"]) for row in found.rows] == [
        (1, "symphony"), (1, "eager"), (2, "symphony"), (2, "eager"),
    ]  # fmt: skip
    for row in found.rows:
        alone = simulate_deployment(
            one_model(devices=row["devices"], rate=900), load_policy(row["policy"]), 1.0, seed=3
        )
        assert {**row, **alone.row()} == row


def test_parts_of_models_scales_and_seeds():
    rows = sweep("models.0.arrivals.rate=100..900:3", "models.0.slo=50 ms,100 ms").rows
    assert [row["models.0.arrivals.rate"] for row in rows] == [100, 100, 500, 500, 900, 900]
    alone = simulate_deployment(one_model(rate=500, slo=0.1), load_policy("adaptive"), 1.0)
    assert {**rows[3], **alone.row()} == rows[3]
    scaled = sweep("scale=0,0.5,1", scale=7.0).rows
    assert scaled[0]["requests_per_s"] == 0
    assert scaled[1]["requests_per_s"] < scaled[2]["requests_per_s"] < 1200
    seeds = sweep("seed=0..2").rows
    assert len({row["requests_per_s"] for row in seeds}) == 3


def test_a_case_that_cannot_be_has_its_reason():
    rows = sweep("devices=0,1", "policy=eager,shepherd:factor=3").rows
    assert ["error" in row for row in rows] == [True, True, False, True]
    assert "devices is 0" in rows[0]["error"]
    assert "more than 100" in rows[3]["error"]


@pytest.mark.parametrize(
    ("texts", "words"),
    [
        (["device=1,2"], "unknown key 'device'"),
        (["devices=1", "devices=2"], "each parameter once"),
        (["seed=0..999", "models.0.copies=1..200"], "combinations of seed, models.0.copies; expected 1 to"),
        (["seed=1.5"], "Got seed=1.5; expected"),
        (["seed=1000000000000000000000000"], "from 0 to 2147483648"),
        (["seed=5000000000"], "from 0 to 2147483648"),
        (["scale=1000001"], "from 0 to 1000000"),
        (["scale=-1"], "Got scale=-1; expected"),
        (["scale=much"], "Got scale=much; expected"),
        (["models.1.slo=1"], "the name has '1' where a number from 0 to 0"),
        (["models.0.name.x=1"], "has no fields"),
        (["policy=eagre"], "did you mean 'eager'"),
        (["models.0.slo=1 ms"], "no request can meet it"),
    ],
)
def test_parameters_of_which_no_value_can_be(texts, words):
    with pytest.raises(MeshwrightError, match=words):
        sweep(*texts)
