"""``validate`` as a user types it: sets, own tables, what is left out, pages; and what a score says."""

from __future__ import annotations

import csv
import json
from dataclasses import replace

import numpy as np
import pytest

from meshwright.cli.main import invoke
from meshwright.cost.costs import Predictions
from meshwright.records import text_files
from meshwright.spec import DocumentError, MeasurementError, NullSink
from meshwright.validation import Score, load_records, load_steps, load_table, read_table, score_rows
from meshwright.validation import sets as sets_module
from meshwright.validation.datasets import load_all_steps
from meshwright.validation.page import number_notes, score_cells, scores_page
from meshwright.validation.sets import DATASETS, DataSet, find_datasets
from meshwright.validation.step_sets import calibration_rows
from meshwright.validation.step_table import MAX_ROWS
from meshwright.validation.validate import score_datasets, score_step_table, tabulate_scores


def made_up() -> tuple[Score, ...]:
    measured = np.array([1.0, 2.0, 4.0, 8.0])
    predicted = np.array([1.1, 2.0, 3.0, 8.0])
    ours = Predictions(seconds=predicted, low_s=predicted * 0.9, high_s=predicted * 1.1, basis=("measured",) * 4)
    return (
        score_rows("set", "part | one", "ours", measured, ours, target=9.0),
        score_rows("set", "part | one", "ours", measured, ours, judged="worst", target=20.0),
        score_rows("set", "part | one", "a line", measured, predicted * 2),
    )


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    sets = (
        DataSet(name="first", about="a set", score=made_up, quick=made_up),
        DataSet(name="long", about="one that takes long", score=made_up, quick=lambda: made_up()[2:]),
    )
    monkeypatch.setattr(sets_module, "DATASETS", sets)

    def run_line(*words):
        code = invoke(["validate", *map(str, words)])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run_line


def test_a_score_against_arithmetic():
    ours, _, line = made_up()
    assert ours.num_rows == 4
    assert ours.mape == pytest.approx((10 + 0 + 25 + 0) / 4)
    assert ours.median == pytest.approx(5.0)
    assert ours.worst == pytest.approx(25.0)
    assert ours.coverage == pytest.approx(75.0)
    assert ours.width == pytest.approx(20.0)
    assert ours.met is True
    assert (line.met, line.coverage) == (None, None)


def test_targets_of_one_arm_share_its_line():
    ours, line = tabulate_scores(made_up())
    assert ours["targets"] == {"mape": 9.0, "worst": 20.0}
    assert ours["met"] == [True, False]
    assert line["targets"] == {}
    part, first, second = score_cells(made_up())
    assert part[0] == "part | one"
    assert first == [
        "· ours",
        "4",
        "8.75",
        "5.00",
        "20.5",
        "25.0",
        "75.0",
        "20.0",
        "–",
        "–",
        "MAPE ≤ 9 met, worst ≤ 20 missed",
    ]
    assert second[-5:] == ["–", "–", "–", "–", ""]


def test_notes_stand_below_the_table():
    one, two, line = made_up()
    noted = (replace(one, note="seen before"), replace(two, note="seen before"), replace(line, note="3 rows are out"))
    _, first, second = score_cells(noted)
    assert (first[0], second[0]) == ("· ours [1]", "· a line [2]")
    assert number_notes(noted) == ["[1] seen before.", "[2] 3 rows are out."]
    assert number_notes(made_up()) == []
    page = scores_page([(DataSet(name="x", about="y", score=made_up, quick=made_up), noted)])
    assert "| part \\| one [1] |" in page
    assert "\n[2] 3 rows are out.\n" in page
    assert [row["note"] for row in tabulate_scores(noted)] == ["seen before", "3 rows are out"]


def test_sets_are_named_where_there_are_several():
    other = score_rows("other", "part | one", "ours", np.ones(2), np.ones(2))
    parts = [row["part"] for row in tabulate_scores([*made_up(), other])]
    assert parts == ["set: part | one", "set: part | one", "other: part | one"]


def test_a_name_of_any_length_is_drawn_briefly():
    score = score_rows("set", "x" * 5000, "ours", np.ones(2), np.ones(2))
    assert score_cells([score])[0][0] == "x" * 100 + "…"


def test_every_set_once(run):
    code, out, _ = run()
    assert code == 0
    assert out.count("part | one") == 2
    assert "first: a set" in out
    assert max(map(len, out.splitlines())) <= 80
    code, out, _ = run("--quick", "--json")
    assert {name: len(rows) for name, rows in json.loads(out)["sets"].items()} == {"first": 2, "long": 1}
    code, out, _ = run("long", "long", "--json")
    (name,), (rows,) = zip(*json.loads(out)["sets"].items(), strict=True)
    assert (name, len(rows), rows[0]["met"]) == ("long", 2, [True, False])


def test_steps_without_a_table_are_the_public_ones(run, monkeypatch):
    steps = DataSet(name="steps", about="public steps", score=made_up, quick=lambda: made_up()[2:])
    monkeypatch.setattr(sets_module, "DATASETS", (*sets_module.DATASETS, steps))
    for words in ([], ["--quick"]):
        code, out, err = run("--steps", "--json", *words)
        assert code == 0, err
        assert json.loads(out) == json.loads(run("steps", "--json", *words)[1])
        assert list(json.loads(out)["sets"]) == ["steps"]


def test_sets_are_listed(run):
    code, out, _ = run("--list")
    assert code == 0
    assert "one that takes long" in out
    assert [row["set"] for row in json.loads(run("--list", "--json")[1])["sets"]] == ["first", "long"]


def test_a_page_says_when_and_how_it_was_made(run, tmp_path):
    code, out, _ = run("first", "--out", "page.md")
    assert code == 0
    assert "scores written to page.md" in out
    text = (tmp_path / "page.md").read_text()
    assert "`meshwright validate first --out docs/accuracy.md`" in text
    row = (
        "| part \\| one | 4 | 8.75 | 5.00 | 20.5 | 25.0 | 75.0 | 20.0 | – | – | MAPE ≤ 9 met, worst ≤ 20 missed | "
        "a line 92.5 |"
    )
    assert row in text
    assert "1 of 2 are met" in text
    assert "| first | part \\| one | ours | worst | 25.0 | ≤ 20 | missed |" in text
    assert run("first", "--out", "page.txt")[0] == 1


def test_a_page_of_more_sets_is_not_replaced_by_a_part(run, tmp_path):
    page = tmp_path / "page.md"
    assert run("--out", "page.md")[0] == 0
    whole = page.read_text()
    for words in (["long"], ["first", "long", "--quick"]):
        code, out, err = run(*words, "--out", "page.md")
        assert code == 1
        assert "Choose another name" in " ".join(err.split())
        assert "part | one" not in out  # before anything is scored
        assert page.read_text() == whole
    assert run("long", "first", "--out", "page.md")[0] == 0
    assert run("long", "--out", "other.md")[0] == 0
    assert run("--out", "other.md")[0] == 0


def test_sets_are_named_without_what_scores_them(run_fresh):
    loaded = run_fresh(
        "from meshwright.cli.main import invoke; import sys; invoke(['validate', '--list']); print(*sys.modules)"
    ).split()
    assert not {"sklearn", "numba", "pyarrow", "torch"} & set(loaded)


@pytest.mark.long
def test_missing_packages_are_named_with_the_extra_that_has_them_all(run_fresh, tmp_path):
    (tmp_path / "mine.csv").write_text("id\n1\n")
    script = (
        "import sys; sys.stderr = sys.stdout; sys.modules['pyarrow'] = None; from meshwright.cli.main import invoke; "
        f"print(invoke(['validate', 'collectives']), invoke(['validate', '--steps', {str(tmp_path / 'mine.csv')!r}]))"
    )
    done = run_fresh(script)
    assert "needs pyarrow, which is not installed. Run: pip install 'meshwright[validate]'" in " ".join(done.split())
    assert "lacks the columns source" in done  # a table of steps is read without it


def test_every_set_has_its_functions():
    found = [scorer.find() for dataset in DATASETS for scorer in (dataset.score, dataset.quick)]
    assert len({function.__module__ for function in found}) == len(DATASETS)
    assert all(callable(function) for function in found)


@pytest.mark.parametrize(
    ("words", "code", "told"),
    [
        (["firstt"], 1, "did you mean 'first'?"),
        (["first", "--steps", "x.csv"], 2, "--steps FILE.csv scores your own table alone"),
        (["--quick", "--steps", "x.csv"], 2, "--steps FILE.csv scores your own table alone"),
        (["--steps", "x.csv"], 1, "x.csv: cannot be read"),
        (["x.csv", "--steps"], 1, "x.csv: cannot be read"),
        (["--steps", "--json", "x.csv"], 1, "x.csv: cannot be read"),
        (["--steps", "x.csv", "y.csv"], 2, "--steps FILE.csv scores your own table alone"),
    ],
)
def test_what_cannot_be_meant(run, words, code, told):
    found, _, err = run(*words)
    assert found == code
    assert told in " ".join(err.replace("│", " ").split())


def write_steps(path, rows):
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return path


def test_own_steps_are_scored_by_source(run, tmp_path):
    rows = load_steps()
    korthikanti = [row for row in rows if row["id"].startswith("korth-t5-22B")]
    adafactor = next(row for row in load_table("training_steps_alpa") if "Adafactor" in row["features"])
    untimed = [{**korthikanti[0], "id": "", "iter_time_s": ""}]
    # A calibration row of vTrain, in other words.
    seen = {**calibration_rows(load_all_steps())[3], "id": "mine", "notes": "measured again"}
    write_steps(tmp_path / "mine.csv", [*korthikanti, adafactor, *untimed, seen])
    code, out, err = run("--steps", "mine.csv", "--json")
    assert code == 0, err
    document = json.loads(out)
    (score,) = document["sets"]["mine.csv"]
    assert score["rows"] == len(korthikanti) == 2
    assert {reason["reason"]: reason["lines"] for reason in document["left_out"]} == {
        "no plan can express the run: the optimizer Adafactor": [4],
        "no measured seconds (iter_time_s)": [5],
        "rows that a host's speed was fitted on": [6],
    }
    code, out, err = run("--steps", "mine.csv")
    assert "1 left out: no plan can express the run: the optimizer Adafactor; line 4" in err
    assert "Korthikanti" in out


def test_tables_of_nothing_that_can_be_scored_are_refused():
    untimed = [{**row, "iter_time_s": ""} for row in load_steps()[:3]]
    with pytest.raises(MeasurementError, match="3 left out: no measured seconds"):
        score_step_table(untimed)
    with pytest.raises(MeasurementError, match="no rows"):
        score_step_table([])
    rows = [load_steps()[0]] * (MAX_ROWS + 1)
    with pytest.raises(MeasurementError, match="at most 100000"):
        score_step_table(rows)


def test_own_steps_that_cannot_be_are_named_by_line_and_cell(run, tmp_path):
    good = next(row for row in load_steps() if row["id"].startswith("korth-t5"))
    odd = [{"precision": "fp3"}, {"recompute": "maybe"}, {"status": "derived"}, {"iter_time_s": "1e-320"}]
    rows = [good, *({**good, "id": str(place), **change} for place, change in enumerate(odd)), good]
    write_steps(tmp_path / "mine.csv", rows)
    code, out, err = run("--steps", "mine.csv")
    assert code == 0
    for line, change in enumerate(odd, start=3):
        ((column, value),) = change.items()
        said = next(text for text in err.splitlines() if f"left out: {column}: expected " in text)
        assert said.startswith("mine.csv: 1 left out")
        assert said.endswith(f"found {value!r} (line {line})")
    assert "mine.csv: 1 left out: the id of an earlier row; expected every id once, or an empty cell; line 7" in err
    code, out, err = run("--steps", "mine.csv", "--json")
    assert code == 0, err
    assert sorted(reason["lines"] for reason in json.loads(out)["left_out"]) == [[3], [4], [5], [6], [7]]
    write_steps(tmp_path / "mine.csv", rows[1:-1])
    code, out, err = run("--steps", "mine.csv", "--json")
    assert (code, out) == (1, "")
    assert "mine.csv: No row of the table can be scored" in err
    assert "found 'fp3' (line 2)" in err


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("", "line 1 names no columns"),
        ("a,a\n1,2\n", "line 1 names a column twice"),
        ("a,b\n1,2\n\n'\n", "line 4 has 1 cells; expected 2"),
        ('a,b\n"1\n\n",2\n1\n', "line 5 has 1 cells; expected 2"),
        ("\xff", "can't decode"),
    ],
)
def test_odd_tables_are_refused(tmp_path, content, told):
    (tmp_path / "x.csv").write_bytes(content.encode("latin1"))
    with pytest.raises(DocumentError, match=rf"x\.csv: not a table in CSV \(.*{told}"):
        read_table(tmp_path / "x.csv")


def test_tables_of_more_cells_than_memory_are_refused(tmp_path, monkeypatch):
    (tmp_path / "x.csv").write_text("a,b\n" + "1,2\n" * 5)
    monkeypatch.setattr(text_files, "_MAX_CELLS", 5 * (2 + 4))
    assert len(read_table(tmp_path / "x.csv")) == 5
    monkeypatch.setattr(text_files, "_MAX_CELLS", 5 * (2 + 4) - 1)
    with pytest.raises(DocumentError, match=r"line 6 exceeds the limit of 29 cells, .*; split the table"):
        read_table(tmp_path / "x.csv")


def test_shipped_tables_are_there():
    assert {name: len(load_records(name)) for name in ("v100", "kernels", "nccl")} == {
        "v100": 8123, "kernels": 48_000, "nccl": 11_181
    }  # fmt: skip
    assert (len(load_steps()), len(load_steps(single_node=True))) == (278, 736)
    assert len(load_table("zero_bubble_rates_table5")) == 12
    with pytest.raises(DocumentError, match=r"did you mean 'v100'\?"):
        load_records("v10")


def test_sets_have_names_of_their_own():
    names = [dataset.name for dataset in DATASETS]
    assert len(set(names)) == len(names) >= 1
    assert [dataset.name for dataset in find_datasets([])] == names
    made = DataSet(name="x", about="y", score=made_up, quick=made_up)
    ((_, scores),) = score_datasets([made], NullSink())
    assert "# Accuracy" in scores_page([(made, scores)])
