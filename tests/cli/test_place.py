"""`plan --method place` and what the other verbs do with what it writes."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from meshwright.spec import load_cluster, write_document

FORK = "plan unet-tiny --cluster 2xcpu --batch 8 --method place"


@pytest.fixture
def placed(run):
    run(*FORK.split(), "--fix", "head=1", "--out", "placed.json", code=0)
    return json.loads(Path("placed.json").read_text())


@pytest.mark.long
def test_a_placement_is_written_and_simulated(run, placed):
    assert placed["schema"] == "meshwright/placement/2"
    assert {stage["rank"] for stage in placed["stages"]} == {0, 1}
    _, out, _ = run("simulate", "placed.json", "--steps", "1", "--json", "--out", "timeline.json", code=0)
    assert [row["rank"] for row in json.loads(out)["ranks"]] == [0, 1]
    assert json.loads(Path("timeline.json").read_text())["schema"] == "meshwright/timeline/1"
    assert "Critical path" in run("simulate", "placed.json", "--explain", code=0)[1]


def test_it_says_what_one_device_takes(run):
    found = json.loads(run(*FORK.split(), "--json", code=0)[1])
    assert 0 < found["duration_s"] <= found["one_device_s"]
    assert found["file"] is None


def test_it_is_shown(run, placed):
    _, out, _ = run("show", "placed.json", code=0)
    ops = sum(len(stage["ops"]) for stage in placed["stages"])
    assert f"{ops} ops on 2 ranks" in out
    assert "placed" in run("show", "placed.json", "--program", code=0)[1]
    assert run("show", "placed.json", "--html", "page.html")[0] == 0


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (f"{FORK} --out folder", "ends in .json"),
        (f"{FORK} --fix head", "expected NAME=RANK"),
        (f"{FORK} --fix head=x", "expected NAME=RANK"),
        (f"{FORK} --fix head=9", "names device 9"),
        (f"{FORK} --fix heat=0", "no such layer, module or op (did you mean 'head'?)"),
        (f"{FORK} -m 3", "do not divide a batch of 8"),
        (f"{FORK} -m 4 -m 2", "takes one --microbatch-size"),
    ],
)
def test_what_says_nothing_here_is_refused(run, line, message):
    code, _, errors = run(*line.split())
    assert code != 0
    assert message in " ".join(errors.replace("│", " ").split())


def test_other_verbs_refuse_what_they_cannot_do(run, placed):
    for line in (
        "simulate placed.json --schedule gpipe",
        "simulate placed.json --against gpipe",
        "simulate placed.json --find-orders orders.csv",
        "show placed.json --as megatron",
        "show placed.json --schedule",
    ):
        code, _, errors = run(*line.split())
        assert code in (1, 2), line
        assert "placement" in errors


def test_too_little_memory_is_told(run, placed):
    cluster = load_cluster("2xcpu")
    kinds = tuple(replace(kind, memory_bytes=2**20) for kind in cluster.device_kinds)
    write_document(replace(cluster, device_kinds=kinds), "small.toml")
    _, out, _ = run("simulate", "placed.json", "--cluster", "small.toml", "--steps", "1", code=0)
    assert "Rank 0 needs up to" in out
    assert "but its cpu has 1 MiB" in " ".join(out.split())
    _, out, _ = run("simulate", "placed.json", "--cluster", "small.toml", "--steps", "1", "--json")
    assert [row["rank"] for row in json.loads(out)["overflows"]] == [0, 1]
