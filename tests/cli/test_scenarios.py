"""`simulate --scenario` and `--sweep` as users type them: what is printed, written and refused."""

import csv
import json
from pathlib import Path

import pytest

HEAD = 'schema = "meshwright/scenario/1"\n'
SLOW = HEAD + '[[effects]]\nkind = "slow-device"\ndevices = "rank 1"\nfactor = 2.0\n'


@pytest.fixture
def planned(run):
    """A plan of four stages on four processors, and a scenario file."""
    step = ("--batch", "16", "--stages", "4", "-m", "2", "--schedule", "1f1b")
    assert run("plan", "gpt-tiny", "--cluster", "4xcpu", *step, "--out", "plan.json")[0] == 0
    Path("slow.toml").write_text(SLOW)
    return run


def facts(run, *options):
    code, out, err = run("simulate", "plan.json", *options, "--json")
    assert (code, err) == (0, "")
    return json.loads(out)


def test_a_scenario_is_told_beside_the_plan_without_it(planned):
    plain, slow = facts(planned), facts(planned, "--scenario", "slow.toml")
    assert "scenario" not in plain
    assert slow["scenario"]["step_time_without_s"] == plain["step_time_s"] < slow["step_time_s"]
    assert "Scenario slow: rank 1 2× slower." in planned("simulate", "plan.json", "--scenario", "slow.toml", code=0)[1]


def test_scenarios_compose_in_order_and_ship_by_name(planned):
    twice = facts(planned, "--scenario", "slow.toml", "--scenario", "slow.toml")
    Path("four.toml").write_text(SLOW.replace("2.0", "4.0"))
    assert twice["step_time_s"] == facts(planned, "--scenario", "four.toml")["step_time_s"]
    both = facts(planned, "--scenario", "slow-device", "--scenario", "jitter")["scenario"]
    assert both["name"] == "slow-device + jitter"
    assert both["steps"]["p50_s"] < both["steps"]["p99_s"] <= both["steps"]["slowest_s"]


def test_a_scenario_without_effects_changes_nothing(planned):
    Path("none.toml").write_text(HEAD)
    assert facts(planned, "--scenario", "none.toml") == facts(planned)


def test_the_timeline_of_jitter_is_that_of_the_seed(planned):
    Path("jitter.toml").write_text(HEAD + '[[effects]]\nkind = "jitter"\nspread = 0.3\n')
    texts = []
    for name, options in (("a", ()), ("b", ("--scenario", "jitter.toml")), ("c", ("--scenario", "jitter.toml"))):
        assert planned("simulate", "plan.json", *options, "--out", f"{name}.json")[0] == 0
        texts.append(Path(f"{name}.json").read_text())
    assert texts[0] != texts[1] == texts[2]
    _, _, err = planned(
        "simulate", "plan.json", "--scenario", "jitter.toml", "--detail", "ops", "--trace", "t.json", code=1
    )
    assert "leave --detail out in a scenario with jitter" in err


def test_a_device_without_the_precision_is_told(planned):
    """gpt-tiny is planned in bfloat16 on A100; V100 has float16."""
    step = ("--batch", "16", "--stages", "4", "-m", "2", "--schedule", "1f1b")
    assert planned("plan", "gpt-tiny", "--cluster", "4xA100", *step, "--out", "plan.json")[0] == 0
    words = (
        "V100 has no rate for bfloat16, so its computations are estimated at its slowest rate, 7.8 TFLOP/s of float64."
    )
    assert words in " ".join(planned("simulate", "plan.json", "--scenario", "uneven")[1].split())
    assert facts(planned, "--scenario", "uneven")["scenario"]["remark"].startswith(words)
    assert "remark" not in facts(planned, "--scenario", "slow.toml")["scenario"]


def test_runs_and_costs_are_told(planned):
    found = facts(planned, "--scenario", "spot", "--run-steps", "1000000", "--seeds", "3")["scenario"]
    assert found["run"]["run_steps"] == 1_000_000
    assert sum([value for name, value in found["run"].items() if name.endswith("_share")]) == pytest.approx(1)
    assert found["price"]["price_of_run"] == pytest.approx(4 * 1.2 * found["run"]["run_s"] / 3600)
    out = planned("simulate", "plan.json", "--scenario", "spot", "--run-steps", "1000000")[1]
    assert "A run of 1,000,000 steps takes" in out
    assert "At 4.8 USD per hour:" in out
    assert "run" in facts(planned, "--run-steps", "10")["scenario"]


def test_a_sweep_is_a_table_a_csv_file_and_a_plot(planned):
    sweep = ("--sweep", "slow-device.factor=1,2", "--sweep", "plan.num_microbatches=4,8")
    options = ("--scenario", "slow.toml", *sweep, "--out", "cases.csv", "--plot", "cases.svg")
    code, out, err = planned("simulate", "plan.json", *options)
    assert (code, err) == (0, "")
    assert "cases written to cases.csv" in out
    rows = list(csv.DictReader(Path("cases.csv").read_text().splitlines()))
    assert [(row["slow-device.factor"], row["plan.num_microbatches"]) for row in rows] == [
        ("1", "4"), ("1", "8"), ("2", "4"), ("2", "8"),
    ]  # fmt: skip
    found = facts(planned, "--scenario", "slow.toml", *sweep)
    assert [float(row["step_time_s"]) for row in rows] == [case["step_time_s"] for case in found["cases"]]
    assert float(rows[3]["step_time_s"]) == facts(planned, "--scenario", "slow.toml")["step_time_s"]
    assert Path("cases.svg").read_text().count("<polyline") == 2


def test_cases_that_cannot_be_are_told_with_their_reason(planned):
    _, out, _ = planned(
        "simulate", "plan.json", *("--sweep", "plan.num_microbatches=4,3", "--out", "cases.csv"), code=0
    )
    assert "1 of 2 cases could not be simulated; plan.num_microbatches=3: A global batch of 16" in out
    rows = list(csv.DictReader(Path("cases.csv").read_text().splitlines()))
    assert rows[0]["error"] == ""
    assert rows[1]["error"].startswith("plan.num_microbatches=3: A global batch of 16")
    assert rows[1]["step_time_s"] == ""


@pytest.mark.parametrize("how", [(), ("--json",), ("--figure", "mfu")])
def test_a_sweep_of_which_no_case_can_be_has_failed(planned, how):
    options = ("--sweep", "plan.num_microbatches=3,5", "--out", "cases.csv", "--plot", "cases.svg")
    code, out, err = planned("simulate", "plan.json", *options, *how)
    assert (code, err) == (1, "")
    assert "plan.num_microbatches=3: A global batch of 16" in out
    assert [bool(row["error"]) for row in csv.DictReader(Path("cases.csv").read_text().splitlines())] == [True, True]
    assert not Path("cases.svg").exists()


def test_names_of_strangers_are_printed_as_they_are(planned):
    price = '[[effects]]\nkind = "price"\nper_hour = 1.0\ncurrency = "[/z]"\n'
    Path("odd.toml").write_text(HEAD + 'name = "[/x] [red]a"\n' + price)
    code, out, err = planned("simulate", "plan.json", "--scenario", "odd.toml", "--run-steps", "10")
    assert (code, err) == (0, "")
    assert "Scenario [/x] [red]a: 1 [/z] per device and hour." in " ".join(out.split())
    assert "At 4 [/z] per hour" in out
    _, out, _ = planned("simulate", "plan.json", "--scenario", "odd.toml", "--sweep", "price.currency=EUR,[/y]", code=0)
    assert "[/y]" in out


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--scenario", "slow-devise"), "No scenario 'slow-devise' is shipped (did you mean 'slow-device'"),
        (("--scenario", "none.toml"), "none.toml"),
        (("--scenario", "slow.toml", "--cluster", "A100"), "has ranks 0 to 0"),
        (("--sweep", "seed=1", "--out", "a.json"), "choose a name that ends in .csv"),
        (("--sweep", "seed=1", "--plot", "a.png"), "choose a name that ends in .svg"),
        (("--sweep", "seed=1", "--figure", "step_time"), "is not a column of this sweep (did you mean 'step_time_s'"),
        (("--sweep", "slow-device.factor=2"), "names no effect of the scenario"),
    ],
)
def test_what_cannot_be_is_refused_and_nothing_is_written(planned, options, words):
    before = set(Path().iterdir())
    _, out, err = planned("simulate", "plan.json", *options, code=1)
    assert words in " ".join(err.split())
    assert out == ""
    assert set(Path().iterdir()) == before


@pytest.mark.parametrize(
    ("effect", "words"),
    [
        ('kind = "slow-device"\ndevices = "rank 8"\nfactor = 2', "(slow-device).devices: 'rank 8' was selected"),
        ('kind = "jitter"\ndevices = "rank 8"\nspread = 1', "(jitter).devices: 'rank 8' was selected"),
        ('kind = "lost-device"\ndevices = "rank 8"', "(lost-device).devices: 'rank 8' was selected"),
        ('kind = "other-device"\ndevices = "all"\ndevice = "A10"', "(other-device).device: no device kind 'A10'"),
        ('kind = "slow-link"\nlinks = "of node 3"\nfactor = 2', "(slow-link).links: 'of node 3' was selected"),
        ('kind = "oversubscription"\nnodes_per_rack = 4\nratio = 2', "(oversubscription).nodes_per_rack: racks of 4"),
        ('kind = "price"\nper_hour = 1.0\ndevice = "H100"', "(price).device: the cluster has no devices of kind"),
    ],
)
def test_what_the_cluster_has_not_is_told_by_file_and_effect(planned, effect, words):
    Path("two.toml").write_text(HEAD + '[[effects]]\nkind = "network-cards"\nnum_nics = 2\n[[effects]]\n' + effect)
    for options in ((), ("--sweep", "plan.num_microbatches=4")):
        _, out, err = planned(
            "simulate", "plan.json", "--scenario", "slow.toml", "--scenario", "two.toml", *options, code=1
        )
        assert f"two.toml.effects[1] {words}" in " ".join((out if options else err).split())


def test_an_interrupted_sweep_leaves_no_file(planned, monkeypatch):
    import meshwright.simulator.scenarios.outcome as module

    whole, calls = module.simulate_scenario, []

    def interrupt(*arguments, **settings):
        calls.append(arguments)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return whole(*arguments, **settings)

    monkeypatch.setattr(module, "simulate_scenario", interrupt)
    monkeypatch.setattr(module, "run_places", lambda run, count, _: [run(place) for place in range(count)])
    before = set(Path().iterdir())
    planned("simulate", "plan.json", "--sweep", "seed=0..9", "--out", "a.csv", "--plot", "a.svg", code=130)
    assert set(Path().iterdir()) == before
