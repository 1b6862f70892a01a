"""Rows that may be fitted: drawn by the seed, at most a tenth, and no configuration on both sides."""

from collections import Counter
from importlib import resources

import pytest

from meshwright.spec import DocumentError
from meshwright.validation import load_table
from meshwright.validation.datasets import load_all_steps
from meshwright.validation.scores import read_folds
from meshwright.validation.step_sets import (
    calibration_rows,
    draw_step_splits,
    group_key,
    scored_rows,
    single_node_rows,
)
from meshwright.validation.step_table import read_steps


@pytest.fixture(scope="module")
def rows():
    return load_all_steps()


def test_the_files_are_what_the_seed_deals_out(rows):
    for kind, split in draw_step_splits(rows).items():
        folds = read_folds(split.dataset, [group_key(row) for row in single_node_rows(rows)[kind]])
        assert set(folds.tolist()) == set(range(10))
        distinct = sorted({group_key(row) for row in single_node_rows(rows)[kind]})
        assert "".join(map(str, read_folds(split.dataset, distinct))) == split.folds


def test_at_most_a_tenth_of_each_kind_on_one_node_is_fitted(rows):
    fitted = calibration_rows(rows)
    assert Counter(row["device"].split("-")[0] for row in fitted) == {"A100": 77, "H100": 1, "V100": 2}
    for kind, mine in single_node_rows(rows).items():
        assert 10 * sum(row["device"].startswith(kind) for row in fitted) <= len(mine)
    assert all(int(row["n_devices"]) <= 8 and row["iter_time_s"] for row in fitted)


def test_no_configuration_is_on_both_sides(rows):
    fitted = calibration_rows(rows)
    groups = {(row["device"].split("-")[0], group_key(row)) for row in fitted}
    ids = {row["id"] for row in fitted}
    for kind, mine in single_node_rows(rows).items():
        assert not [row["id"] for row in mine if (kind, group_key(row)) in groups and row["id"] not in ids]


def test_the_rows_that_are_scored_are_those_of_the_committed_list(rows):
    listed = (resources.files("meshwright.validation") / "splits" / "steps_scored.txt").read_text().splitlines()
    assert [case.row_id for case in read_steps(scored_rows(rows))[0]] == listed


def test_other_rows_than_those_dealt_out_are_refused(rows):
    with pytest.raises(DocumentError, match="drawn for other rows"):
        calibration_rows([row for row in rows if row["id"] != "vtrain-single-2"][:300])


def test_rows_of_alpa_are_those_of_its_tables():
    alpa = load_table("training_steps_alpa")
    counts = Counter((row["id"].split("-")[1], row["family"], row["status"]) for row in alpa)
    assert counts["e2e", "gpt", "measured"] == 6
    assert sum(count for (where, _, status), count in counts.items() if where == "node" and status == "measured") == 57
    assert sum(count for (_, _, status), count in counts.items() if status != "measured") == 12
    first = alpa[0]
    assert (first["hidden"], first["tp"], first["dp"], first["iter_time_s"]) == ("2048", "1", "1", "0.45347")
    unequal = next(row for row in alpa if row["id"] == "alpa-e2e-gpt-2.6B")
    assert unequal["notes"] == "stages (layers, data, model): (8, 2, 1), (8, 2, 1), (16, 4, 1)"
    assert unequal["tp"] == ""
