"""`simulate` of a deployment as users type it: what is printed, written and refused."""

import csv
import json
from dataclasses import replace
from pathlib import Path

import pytest

from meshwright.serving import (
    devices_of,
    devices_shared,
    find_goodput,
    load_policy,
    simulate_deployment,
    split_evenly,
    split_time,
)
from meshwright.spec import BatchMeasurement, Measurements, Scaling, read_deployment, write_document
from meshwright.spec.units import Seconds

DEPLOYMENT = """
schema = "meshwright/deployment/1"
devices = 2
policy = "symphony"

[[models]]
name = "cat"
slo = "50 ms"
latency = { alpha = "1 ms", beta = "5 ms", largest = 32 }
arrivals = { kind = "poisson", rate = 600 }

[[models]]
name = "dog"
slo = "100 ms"
latency = { alpha = "2 ms", beta = "10 ms", largest = 16 }
arrivals = { kind = "gamma", rate = 60, shape = 0.5 }
copies = 2
"""
OWN = """
class Mine:
    def arrive(self, pool, now, queue, request, deadline):
        pool.refuse(queue, request)
    def free(self, pool, now, device):
        pass
"""


@pytest.fixture
def serve(run):
    """`simulate` of a deployment in the folder, with options."""
    Path("served.toml").write_text(DEPLOYMENT)
    Path("mine.py").write_text(OWN)
    return lambda *options, **ends: run("simulate", "served.toml", "--seconds", "2", *options, **ends)


def facts(serve, *options):
    code, out, err = serve(*options, "--json")
    assert (code, err) == (0, "")
    return json.loads(out)


def refused(serve, *options):
    code, out, err = serve(*options)
    assert (code, out) == (1, "")
    assert "Traceback" not in err
    return " ".join(err.split())


def test_a_deployment_is_simulated_under_its_policy(serve):
    found = facts(serve)
    expected = simulate_deployment(read_deployment("served.toml"), load_policy("symphony"), 2.0)
    assert {**found, **expected.row()} == found
    assert found["models"] == [each.row(2.0) for each in expected.models]
    assert (found["policy"], found["seconds"]) == ("symphony", 2.0)
    assert 0 < found["uncoordinated_scale"] < found["staggered_scale"]
    assert "policies" not in found
    _, out, _ = serve(code=0)
    for words in ("symphony:", "cat", "dog", "requests per second in time", "if their batches are staggered"):
        assert words in out


def test_json_documents_are_deployments_too(serve, run):
    write_document(read_deployment("served.toml"), "served.json")
    assert json.loads(run("simulate", "served.json", "--seconds", "2", "--json", code=0)[1]) == facts(serve)


@pytest.mark.long
def test_policy_seed_and_scale(serve):
    assert facts(serve, "--policy", "timeouts:wait=10")["policy"] == "timeouts:wait=10"
    assert facts(serve, "--policy", "timeouts:wait=0") != facts(serve, "--policy", "timeouts:wait=100")
    assert facts(serve, "--seed", "1") == facts(serve, "--seed", "1") != facts(serve)
    double, single = facts(serve, "--scale", "2"), facts(serve)
    assert double["staggered_scale"] == pytest.approx(single["staggered_scale"] / 2)
    assert double["requests_per_s"] > 1.5 * single["requests_per_s"]
    nothing = facts(serve, "--scale", "0")
    assert (nothing["requests_per_s"], nothing["staggered_scale"], nothing["worst_p99_s"]) == (0, None, None)
    assert "Nothing arrives." in serve("--scale", "0")[1]


def test_an_own_policy_beside_ours(serve):
    found = facts(
        serve, "--policy", "mine.py:Mine", "--against", "eager", "--against", "symphony", "--against", "eager"
    )
    assert found["in_time_share"] == 0
    rows = {row["policy"]: row for row in found["policies"]}
    assert list(rows) == ["mine.py:Mine", "eager", "symphony"]
    assert rows["mine.py:Mine"]["regret_share"] == 1
    assert min(row["regret_share"] for row in rows.values()) == 0
    out = serve("--policy", "mine.py:Mine", "--against", "eager")[1]
    assert "regret" in out
    assert "mine.py:Mine" in out


def test_devices_that_scale_are_told(serve):
    scaled = replace(read_deployment("served.toml"), scaling=Scaling(start=Seconds(0.1), every=Seconds(0.1)))
    write_document(scaled, "served.toml")
    found = facts(serve, "--against", "eager")
    expected = simulate_deployment(scaled, load_policy("symphony"), 2.0)
    assert {**found, **expected.row(), "fleet": expected.scaled.points()} == found
    assert [row["device_s"] > 0 for row in found["policies"]] == [True, True]
    words = " ".join(serve()[1].split())
    assert f"{expected.scaled.num_starts} starts: {expected.scaled.device_s:.4g} device-seconds" in words
    assert "Remove the scaling" in refused(serve, "--goodput")


def test_goodput_is_a_scale_for_each_policy(serve):
    found = facts(serve, "--goodput", "--against", "eager")
    rows = {row["policy"]: row for row in found["policies"]}
    scale, result = find_goodput(read_deployment("served.toml"), load_policy("symphony"), 2.0)
    assert rows["symphony"]["scale"] == scale
    assert {**rows["symphony"], **result.row()} == rows["symphony"]
    assert rows["symphony"]["bound_share"] == pytest.approx(scale / found["staggered_scale"])
    assert "results written to goodput.json" in serve("--goodput", "--out", "goodput.json", code=0)[1]
    assert json.loads(Path("goodput.json").read_text())["policies"][0]["scale"] == scale


def test_results_are_written(serve):
    assert "results written to result.json" in serve("--out", "result.json", code=0)[1]
    assert json.loads(Path("result.json").read_text()) == facts(serve)


ROOM = """
[[models]]
name = "bird"
slo = "100 ms"
latency = { alpha = "2 ms", beta = "10 ms" }
memory = "3 GiB"
arrivals = { kind = "poisson", rate = 40 }
"""


def in_memory(limit):
    text = DEPLOYMENT.replace("devices = 2", f'devices = 2\ndevice_memory = "{limit} GiB"')
    return text.replace("[[models]]\n", '[[models]]\nmemory = "2 GiB"\n') + ROOM


@pytest.mark.long
def test_models_are_placed_and_written(serve, run):
    Path("served.toml").write_text(in_memory(5))
    assert "All models together take 9 GiB, and a device has 5 GiB" in refused(serve)
    found = facts(serve, "--place", "simulated", "--out", "placed.toml")
    assert (found["method"], found["num_devices"], found["out"]) == ("simulated", 2, "placed.toml")
    assert found["in_time_share"] <= found["bound_in_time_share"] == 1
    placed = read_deployment("placed.toml")
    assert [group["models"] for group in found["groups"]] == [list(group.models) for group in placed.groups]
    assert all(0 < group["memory_bytes"] <= 5 * 2**30 for group in found["groups"])
    assert all(0 < group["busy_share"] < 1 for group in found["groups"])
    # What was printed is what the written deployment does.
    _, out, _ = run("simulate", "placed.toml", "--seconds", "2", "--json", code=0)
    assert {**found, "models": json.loads(out)["models"]} == found
    _, out, _ = serve("--place", "best", "--out", "placed.json", code=0)
    for words in (
        "2 devices answer",
        "no placement could answer more than 100.00 %",
        "written to placed.json",
    ):
        assert words in out
    assert sum(group.devices for group in read_deployment("placed.json").groups) == 2


def test_the_fewest_devices_with_models_placed_on_them(serve):
    Path("served.toml").write_text(in_memory(3))
    found = facts(serve, "--place", "replication", "--capacity")
    # Cat, two dogs and a bird, one on each device at most.
    assert found["num_devices"] == 4
    assert sum(group["num_devices"] for group in found["groups"]) == found["num_devices"]
    assert min(model["in_time_share"] for model in found["models"]) >= 0.99
    assert found["staggered_devices"] < found["num_devices"]
    assert "took turns" in serve("--place", "replication", "--capacity")[1]


def test_groups_of_a_file_are_replaced(serve):
    text = DEPLOYMENT + '[[groups]]\ndevices = 1\nmodels = ["cat"]\n'
    Path("served.toml").write_text(text)
    assert facts(serve)["models"][1]["num_dropped_unplaced"] > 0
    assert facts(serve, "--place", "replication")["in_time_share"] > 0.9
    assert "has groups, so its number of devices is fixed" in refused(serve, "--capacity")


ASKING = """
schema = "meshwright/deployment/1"
devices = 4
policy = "symphony"
[[queries]]
name = "street"
slo = "300 ms"
rate = 50
calls = [
    { name = "find", latency = { alpha = "10 ms", beta = "30 ms", largest = 32 } },
    { name = "cars", after = "find", fan_out = 3, latency = { alpha = "1 ms", beta = "5 ms" } },
]
"""


def test_queries_are_split_and_simulated(serve):
    Path("served.toml").write_text(ASKING)
    found = facts(serve)
    (query,) = read_deployment("served.toml").queries
    times, even = split_time(query), split_evenly(query)
    (row,) = found["queries"]
    assert [call["time_s"] for call in row["calls"]] == [times["find"], times["cars"]]
    assert [call["even_time_s"] for call in row["calls"]] == [even["find"], even["cars"]] == [0.15, 0.15]
    assert [call["requests_per_s"] for call in row["calls"]] == [50, 150]
    assert row["staggered_devices"] == devices_of(query, times) < row["even_devices"] == devices_of(query, even)
    assert [model["model"] for model in found["models"]] == ["street.find", "street.cars"]
    saved = 100 * (1 - row["staggered_devices"] / row["even_devices"])
    out = " ".join(serve()[1].split())
    assert f"with an even split ({saved:.1f} % saved)" in out
    # Each way to ask about a deployment knows its queries.
    assert facts(serve, "--goodput")["policies"][0]["scale"] > 0
    assert facts(serve, "--capacity")["policies"][0]["staggered_devices"] == row["staggered_devices"]
    assert facts(serve, "--place", "replication")["groups"][0]["models"] == ["street.find", "street.cars"]
    cases = facts(serve, "--sweep", "queries.0.rate=10,50")["cases"]
    assert cases[0]["requests_per_s"] < cases[1]["requests_per_s"]


def test_trunks_are_shared(serve):
    text = """
schema = "meshwright/deployment/1"
devices = 2
policy = "symphony"
[[trunks]]
name = "faces"
slo = "100 ms"
latency = { alpha = "2 ms", beta = "8 ms" }
heads = [
    { name = "age", rate = 100, latency = { alpha = "0.1 ms", beta = "0.3 ms" } },
    { name = "name", rate = 100, latency = { alpha = "0.1 ms", beta = "0.3 ms" } },
]
"""
    Path("served.toml").write_text(text)
    found = facts(serve)
    together, apart = devices_shared(read_deployment("served.toml").trunks[0])
    assert found["trunks"] == [
        {"trunk": "faces", "num_heads": 2, "staggered_devices": together, "apart_devices": apart}
    ]
    assert [model["model"] for model in found["models"]] == ["faces"]
    assert f"{together:.2f} devices suffice for its 2 heads together, {apart:.2f} with" in " ".join(serve()[1].split())
    Path("served.toml").write_text(text.replace("rate = 100", "rate = 0"))
    assert facts(serve)["requests_per_s"] == 0
    slow = text.replace(
        'name = "name", rate = 100, latency = { alpha = "0.1 ms"',
        'name = "name", rate = 1, latency = { alpha = "91 ms"',
    )
    Path("served.toml").write_text(slow)
    assert facts(serve)["trunks"][0]["apart_devices"] is None
    assert "no number with a trunk for each head" in " ".join(serve()[1].split())


def test_splits_that_cannot_be(serve):
    Path("served.toml").write_text(ASKING.replace("300 ms", "70 ms"))
    found = facts(serve)
    assert found["queries"][0]["even_devices"] is None
    assert "split evenly, some call would have less time than a batch of one takes" in " ".join(serve()[1].split())
    Path("served.toml").write_text(ASKING.replace("300 ms", "45 ms"))
    assert "Query 'street': no split of 0.045 s in 100 parts" in refused(serve)


def test_a_sweep_is_a_table_a_file_and_a_plot(serve):
    sweep = ("--sweep", "devices=1,2", "--sweep", "policy=eager,symphony")
    code, out, err = serve(*sweep, "--out", "cases.csv", "--plot", "cases.svg", "--figure", "goodput_per_s")
    assert (code, err) == (0, "")
    assert "cases written to cases.csv" in out
    with Path("cases.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["devices"], row["policy"]) for row in rows] == [
        ("1", "eager"), ("1", "symphony"), ("2", "eager"), ("2", "symphony"),
    ]  # fmt: skip
    assert Path("cases.svg").read_text().startswith("<svg")
    cases = facts(serve, "--policy", "eager", "--sweep", "scale=1,2", "--seed", "4")["cases"]
    alone = facts(serve, "--policy", "eager", "--scale", "2", "--seed", "4")
    assert cases[1]["goodput_per_s"] == alone["goodput_per_s"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--policy", "symphny"), "There is no policy 'symphny' (did you mean 'symphony'?)"),
        (("--against", "clockwerk"), "did you mean 'clockwork'?"),
        (("--policy", "timeouts:wait=soon"), "'wait=soon' is not a setting"),
        (("--policy", "mine.py:Yours"), "has no function 'Yours'"),
        (("--policy", "absent.py:Mine"), "There is no file 'absent.py'"),
        (("--out", "x.csv"), "Choose a name that ends in .json"),
        (("--goodput", "--scale", "2"), "Leave --scale out"),
        (("--goodput", "--scale", "1"), "Leave --scale out"),
        (("--goodput", "--out", "x.csv"), "Choose a name that ends in .json"),
        (("--sweep", "devices=1,2", "--out", "x.json"), "choose a name that ends in .csv"),
        (("--sweep", "devices=1,2", "--plot", "x.png"), "choose a name that ends in .svg"),
        (("--sweep", "devices=1,2", "--figure", "p98_s"), "--figure 'p98_s' is not a column"),
        (("--sweep", "devices=1,2", "--goodput"), "--goodput searches a value"),
        (("--sweep", "devices=1,2", "--capacity", "--against", "eager"), "--capacity searches a value"),
        (("--sweep", "devices=1,2", "--against", "eager"), "Leave --against out"),
        (("--sweep", "device=1,2"), "did you mean 'devices'"),
        (("--sweep", "devices"), "has no name or no values"),
        (("--policy", "shepherd:factor=50"), "expected a factor of more than 100"),
        (("--place", "simulatd"), "did you mean 'simulated'?"),
        (("--place", "best", "--against", "eager"), "Leave --sweep, --against and --goodput out"),
        (("--place", "best", "--goodput"), "Leave --sweep, --against and --goodput out"),
        (("--place", "best", "--sweep", "devices=1,2"), "Leave --sweep, --against and --goodput out"),
        (("--place", "best", "--out", "x.csv"), "ends in .toml or .json"),
    ],
)
def test_what_is_refused(serve, options, words):
    assert words in refused(serve, *options)
    assert not list(Path().glob("x.*"))


def test_rates_of_nothing_have_no_highest_multiple(serve):
    text = DEPLOYMENT.replace("rate = 600", "rate = 0").replace("rate = 60", "rate = 0")
    Path("served.toml").write_text(text)
    assert "No requests arrive" in refused(serve, "--goodput")
    assert serve()[0] == 0


def test_files_that_are_none(run):
    Path("bad.toml").write_text(DEPLOYMENT.replace("devices = 2", "devices = 0"))
    Path("trace.toml").write_text(DEPLOYMENT.replace('"poisson", rate = 600', '"trace", file = "day.txt"'))
    Path("broken.toml").write_text(DEPLOYMENT + "[[")
    Path("empty.toml").write_text("")
    for name, words in (
        ("absent.toml", "cannot be read"),
        ("bad.toml", "devices is 0"),
        ("trace.toml", "day.txt: cannot be read"),
        ("broken.toml", "not valid TOML"),
        ("empty.toml", "expected schema 'meshwright/deployment/1', found None"),
    ):
        _, _, err = run("simulate", name, "--seconds", "1", code=1)
        assert "Traceback" not in err
        assert words in " ".join(err.split())
    Path("day.txt").write_text("1\n2\n3\n")
    assert run("simulate", "trace.toml")[0] == 0


@pytest.mark.long
def test_the_example_that_is_shipped(run):
    path = Path(__file__).parents[2] / "examples" / "deployments" / "vision.toml"
    _, out, _ = run("simulate", path, "--seconds", "1", "--json", code=0)
    assert [row["model"] for row in json.loads(out)["models"]] == ["classifier", "detector"]


def test_latencies_come_from_a_table(run):
    Path("served.toml").write_text(
        DEPLOYMENT.replace('latency = { alpha = "1 ms", beta = "5 ms", largest = 32 }', 'model = "gpt-tiny"')
    )
    _, _, err = run("simulate", "served.toml", code=1)
    assert "Model 'cat' has no `latency`. Only a server measures it" in " ".join(err.split())
    write_document(
        Measurements(
            device="cpu",
            software="torch",
            date="2026-11-20",
            batches=tuple(
                BatchMeasurement(
                    model="gpt-tiny", batch_size=size, seconds=seconds, p90_s=seconds, p99_s=seconds, num_samples=5
                )
                for size, seconds in ((1, 0.006), (32, 0.037))
            ),
        ),
        "table.json",
    )
    code, out, err = run("simulate", "served.toml", "--measurements", "table.json", "--seconds", "2", "--json")
    assert (code, err) == (0, "")
    Path("line.toml").write_text(DEPLOYMENT)
    assert json.loads(out) == json.loads(run("simulate", "line.toml", "--seconds", "2", "--json")[1])
    for name, words in (("table.parquet", "a file that ends in .json"), ("none.json", "cannot be read")):
        _, _, err = run("simulate", "served.toml", "--measurements", name, code=1)
        assert words in " ".join(err.split())


def traced(name, *moments):
    """The deployment with one model, whose requests are those of a trace; a trace is read once in a process."""
    Path(name).write_text("".join(f"{moment}\n" for moment in moments))
    return DEPLOYMENT.split('[[models]]\nname = "dog"')[0].replace('"poisson", rate = 600', f'"trace", file = "{name}"')


def test_traces_that_do_not_fill_the_time_are_told(serve):
    Path("served.toml").write_text(traced("even.txt", *(number / 100 for number in range(1, 101))))
    _, out, err = serve("--scale", "2", code=0)
    assert "200 of 200 requests per second" in " ".join(out.split())
    assert "even.txt: it ends at 0.5 s, and 2 s are simulated" in " ".join(err.split())
    Path("served.toml").write_text(traced("late.txt", 1.7e9, 1.7e9 + 2))
    for options in ((), ("--goodput",), ("--capacity",), ("--place", "packing")):
        assert "subtract the first one from all of them" in refused(serve, *options)


@pytest.mark.long
def test_the_longest_latencies_are_told_as_such(serve):
    # Batches take at least 300 ms, and the SLO is 50.
    slow = DEPLOYMENT.split('[[models]]\nname = "dog"')[0] + "".join(
        f'[[troubles]]\nkind = "straggler"\ndevice = {device}\nfactor = 50\n' for device in (0, 1)
    )
    Path("served.toml").write_text(slow)
    code, out, err = serve("--policy", "timeouts:wait=0")
    assert (code, err) == (0, "")
    assert "> 200 ms" in out
    found = facts(serve, "--policy", "timeouts:wait=0")
    assert found["models"][0]["p99_s"] is None
    assert found["models"][0]["p99_over_s"] == found["worst_p99_over_s"] == pytest.approx(0.2, rel=1e-3)


def test_queries_at_a_scale_are_told_as_they_are_simulated(serve):
    Path("served.toml").write_text(ASKING)
    found = facts(serve, "--scale", "0.1")
    (query,) = read_deployment("served.toml").queries
    times = split_time(query, scale=0.1)
    (row,) = found["queries"]
    assert [call["requests_per_s"] for call in row["calls"]] == pytest.approx([5, 15])
    assert [call["time_s"] for call in row["calls"]] == list(times.values())
    assert row["staggered_devices"] == devices_of(query, times, scale=0.1)


def test_no_number_of_devices_that_take_no_turns(serve):
    # A batch of one takes 6 of 8 ms.
    Path("served.toml").write_text(DEPLOYMENT.split('[[models]]\nname = "dog"')[0].replace("50 ms", "8 ms"))
    out = serve("--capacity")[1]
    assert "no number if not coordinated." in " ".join(out.split())
    assert facts(serve, "--capacity")["policies"][0]["uncoordinated_devices"] is None


def test_what_a_sweep_has_values_of_is_no_option(serve):
    for option, value, values in (
        ("policy", "eager", "symphony"),
        ("scale", "2", "1"),
        ("scale", "1", "1,2"),
        ("seed", "3", "1,2"),
        ("seed", "0", "1,2"),
    ):
        assert f"Leave --{option} out" in refused(serve, f"--{option}", value, "--sweep", f"{option}={values}")


def test_a_deployment_is_known_wherever_its_schema_stands(serve, run):
    data = json.loads(write_document(read_deployment("served.toml"), "served.json").read_text())
    schema = data.pop("schema")
    Path("served.json").write_text(json.dumps({**data, "schema": schema}).replace("/", "\\/"))
    assert Path("served.json").read_text().index("schema") > 256
    assert json.loads(run("simulate", "served.json", "--seconds", "2", "--json", code=0)[1]) == facts(serve)
