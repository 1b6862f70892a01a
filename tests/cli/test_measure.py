"""``measure --from`` and measurement tables of many devices, as a user types them."""

import json
import sys
from functools import partial

import pytest

from meshwright.records import make_records
from meshwright.records.parquet import read_records, write_records
from meshwright.spec import load_shipped_graph, op_key
from tests.records.test_importing import PROFILE
from tests.records.test_trace import FLOATS, op


def test_files_of_other_tools_become_one_table(run, tmp_path):
    (tmp_path / "graph.txt").write_text(PROFILE)
    events = [op("aten::relu", i * 10, 5, [[4, 8]], ["float"]) for i in range(3)]
    (tmp_path / "trace.json").write_text(json.dumps({"traceEvents": events}))
    _, out, err = run("measure", "--from", "graph.txt", "--device", "V100", code=0)
    assert "graph.txt: a PipeDream profile, 3 rows" in out
    assert "rows written to measurements.parquet" in out
    assert "1 left out: inputs (the loading of data)" in err
    code, out, _ = run("measure", "--from", "trace.json", "--json")
    (file,) = json.loads(out)["files"]
    assert code == 0
    assert file["ops"] == [
        {
            "device": "cpu",
            "op": "aten.relu",
            "rows": 1,
            "fastest_s": pytest.approx(5e-6),
            "slowest_s": pytest.approx(5e-6),
        }
    ]
    assert file["left_out"] == {}
    assert sorted(set(read_records("measurements.parquet").device)) == ["V100", "cpu"]


def test_long_traces_are_listed_in_part(run, tmp_path):
    events = [op(f"aten::op{i}", i * 10, 5, [[4, 8]], FLOATS[:1]) for i in range(25)]
    (tmp_path / "trace.json").write_text(json.dumps({"traceEvents": events}))
    assert "and 5 ops more" in run("measure", "--from", "trace.json", code=0)[1]
    assert len(json.loads(run("measure", "--from", "trace.json", "--json")[1])["files"][0]["ops"]) == 25


@pytest.mark.parametrize(
    ("words", "code", "told"),
    [
        (["--from", "graph.txt"], 1, "Name it with --device"),
        (["--from", "absent"], 1, "cannot be read"),
        (["--from", "graph.txt", "--device", "V100", "--out", "m.json"], 1, "ends in .parquet"),
        (["--from", "graph.txt", "--device", "V100", "--out", "m.txt"], 1, "end in .json"),
        (["gpt-tiny", "--from", "graph.txt"], 2, "--from converts files and times nothing"),
        (["--cluster", "--from", "graph.txt"], 2, "--from and --cluster exclude each other"),
        (["gpt-tiny", "--links"], 2, "--links times transfers; give no MODEL"),
        (["--links", "--force"], 2, "--force belongs to --cluster"),
        (["--links", "--device", "V100"], 2, "--device was given with --links"),
        (["--device", "V100"], 1, "Device 'V100' was given to time ops on"),
    ],
)
def test_what_cannot_be_meant(run, tmp_path, words, code, told):
    (tmp_path / "graph.txt").write_text(PROFILE)
    found, _, err = run("measure", *words)
    assert found == code
    assert told in " ".join(err.replace("│", " ").split())
    assert [path.name for path in tmp_path.iterdir()] == ["graph.txt"]


def test_a_table_of_many_devices_is_planned_and_simulated_with(run):
    graph = load_shipped_graph("gpt-tiny")
    parts = [op_key(graph, item, 2).removesuffix(")").split("(", 1) for item in graph.ops if item.phase == "forward"]
    ops, shapes = zip(*sorted(set(map(tuple, parts))), strict=True)
    table = make_records(op=ops, shapes=shapes, phase="forward", device="cpu", seconds=[1e-3] * len(ops))
    write_records(table, "m.parquet")
    given = ["--measurements", "m.parquet", "--cluster", "2xcpu"]
    _, out, err = run("plan", "gpt-tiny", *given, "-m", "2", "--out", "plan.json", code=0)
    assert f"{len(graph.ops)} measured" in out
    assert run("simulate", "plan.json", *given)[0] == 0
    _, _, err = run("plan", "gpt-tiny", "--cluster", "4xA100", "--measurements", "m.parquet", code=1)
    assert "has no rows of A100; its devices are cpu" in err


def test_without_pyarrow(run, monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.delitem(sys.modules, "meshwright.records.parquet", raising=False)
    _, _, err = run("plan", "gpt-tiny", "--cluster", "2xcpu", "--measurements", "m.parquet", code=1)
    assert "needs pyarrow, which is not installed. Run: pip install 'meshwright[tables]'" in err


def test_a_table_of_many_devices_is_shown(run, tmp_path):
    write_records(
        make_records(op="matmul", shapes="m=1;n=2;k=3", device=["A", "A", "B"], seconds=[1, 2, 3]), "m.parquet"
    )
    assert "m.parquet: 3 rows" in run("show", "m.parquet", code=0)[1]
    first, second = json.loads(run("show", "m.parquet", "--json")[1])["ops"]
    assert first == {"device": "A", "op": "matmul", "rows": 2, "fastest_s": 1.0, "slowest_s": 2.0}
    assert second["device"] == "B"
    code, _, err = run("show", "m.parquet", "--schedule")
    assert (code, "only listed" in err) == (1, True)
    (tmp_path / "odd.parquet").write_bytes(b"PAR1")
    assert run("show", "odd.parquet")[0] == 1
    assert run("show", "absent.parquet")[0] == 1


@pytest.mark.parametrize("content", [PROFILE.splitlines()[0], '{"traceEvents": [%s]}'])
def test_a_file_without_rows_writes_nothing(run, tmp_path, content):
    zero = json.dumps(op("aten::relu", 0, 0, [[4]], ["float"]))
    (tmp_path / "file.json").write_text(content.replace("%s", zero))
    (tmp_path / "graph.txt").write_text(PROFILE)
    _, _, err = run("measure", "--from", "graph.txt", "--from", "file.json", "--device", "V100", code=1)
    assert "without a row that can be used (1 " in err
    assert "nothing was written" in err
    assert not (tmp_path / "measurements.parquet").exists()


def test_links_of_one_rank_are_refused_before_anything_is_timed(run, tmp_path, monkeypatch):
    import meshwright.measurement as measurement

    monkeypatch.setattr(measurement, "measure_links", lambda **_: pytest.fail("timed"))
    assert "Give --ranks 2 or more" in run("measure", "--links", "--ranks", 1, code=1)[2]
    assert not (tmp_path / "measurements.parquet").exists()


@pytest.mark.parametrize(
    ("file", "content", "words"),
    [
        ("links.json", None, "expected a name that ends in .parquet"),
        ("links.parquet", b"no table", "links.parquet"),
        (
            "links.parquet",
            None,
            "This verb needs pyarrow, which is not installed. Run: pip install 'meshwright[tables]'",
        ),
    ],
    ids=["name", "another file", "no pyarrow"],
)
def test_what_would_keep_links_from_being_written_is_found_first(run, monkeypatch, tmp_path, file, content, words):
    import meshwright.measurement as measurement

    monkeypatch.setattr(measurement, "measure_links", lambda **_: pytest.fail("timed"))
    if content is not None:
        (tmp_path / file).write_bytes(content)
    elif file.endswith(".parquet"):
        monkeypatch.setitem(sys.modules, "pyarrow", None)
        monkeypatch.delitem(sys.modules, "meshwright.records.parquet", raising=False)
    _, _, err = run("measure", "--links", "--out", file, code=1)
    assert words in " ".join(err.split())


def test_links_that_cannot_be_fitted_are_not_written(run, tmp_path, monkeypatch):
    import meshwright.measurement as measurement

    monkeypatch.setattr(measurement, "measure_links", lambda **_: make_records(seconds=[]))
    assert run("measure", "--links")[0] == 1
    assert not (tmp_path / "measurements.parquet").exists()


@pytest.mark.long
@pytest.mark.distributed
@pytest.mark.timeout(300)
def test_links_become_rows_and_a_line_for_each_place(run, monkeypatch, warm_ranks):
    import meshwright.measurement as measurement

    quick = partial(measurement.measure_links, sizes=(16, 4096), budget_s=1.0)
    monkeypatch.setattr(measurement, "measure_links", quick)
    _, out, _ = run("measure", "--links", code=0)
    assert "rows written to measurements.parquet" in out
    ops = {"send", "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast"}
    assert all(op in out for op in ops)
    assert set(read_records("measurements.parquet").op) == ops
    places = json.loads(run("measure", "--links", "--json")[1])["places"]
    assert {row["op"] for row in places} == ops
    assert all(row["latency_s"] >= 0 for row in places)
    assert run("plan", "gpt-tiny", "--cluster", "2xcpu", "--measurements", "measurements.parquet")[0] == 0
