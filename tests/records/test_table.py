"""The measurement table: what it refuses, how rows are found, told apart and kept."""

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.records import COLUMNS, concat_records, keep_sound, make_records, merge_records, named_shapes
from meshwright.spec import MeasurementError


def some_records(**changes):
    columns = {
        "op": ["matmul", "matmul", "send"],
        "shapes": ["m=4;n=2;k=8", "m=8;n=2;k=8", "bytes=4;ranks=2"],
        "dtype": "float32",
        "device": ["H100", "A100", "H100"],
        "seconds": [1e-3, 2e-3, 3e-3],
        "source": "a test",
    }
    return make_records(**{**columns, **changes})


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"seconds": [1.0, float("nan"), 1.0]}, r"1 of 3 rows have seconds that are not a number \(rows 1\)"),
        ({"seconds": [1.0, 1.0, float("inf")]}, r"seconds that are not a number \(rows 2\)"),
        ({"seconds": [-1.0, 1.0, -1.0]}, r"2 of 3 rows have negative seconds \(rows 0, 2\)"),
        ({"seconds": [0.0, 1.0, 1.0]}, "zero seconds"),
        ({"seconds": [1.0, 0.9e-12, 5e-324]}, r"seconds above 0 and below 1e-12 \(rows 1, 2\)"),
        ({"seconds": [1.0, 86_401.0, 1.0]}, r"more seconds than a day has \(86400\) \(rows 1\)"),
        ({"seconds": ["1.0", "2.0", "3.0"]}, "not float64"),
        ({"seconds": [True, True, True]}, "not float64"),
        ({"num_samples": ["1", "2", "3"]}, "not int64"),
        ({"num_samples": [1, 2, float("nan")]}, "not int64"),
        ({"shapes": "m=1;m=2"}, "neither named sizes"),
        ({"shapes": "bytes=4;ranks=8;nodes=1;devices_per_node=4"}, "more ranks in their groups"),
        ({"shapes": "bytes=4;ranks=2;groups=3;nodes=1;devices_per_node=4"}, "more ranks in their groups"),
        ({"spread": float("nan")}, "spread"),
        ({"num_samples": -1}, "negative number of samples"),
        ({"num_samples": [1, 2, 2.5]}, "not int64"),
        ({"op": ["matmul", "", "send"]}, r"no op \(rows 1\)"),
        ({"device": ""}, "no device"),
        ({"phase": "sideways"}, "phase"),
        ({"flags": "noop,noop"}, "flags"),
        ({"flags": "loud"}, "flags"),
        ({"shapes": "m=-4"}, "neither named sizes"),
        ({"shapes": "m=4.5"}, "neither named sizes"),
        ({"shapes": ["m=4", "m=0;n=2", "m=4"]}, r"a size of zero without the flag 'noop' \(rows 1\)"),
        ({"latency_ms": 3.0}, "latency_ms: not a column"),
        ({"seconds": ["fast", "slow", "slow"]}, "not float64"),
        ({"op": 7}, "not strings"),
        ({"op": [["matmul"]]}, "dimensions"),
        ({"seconds": [1.0, 2.0]}, "lengths"),
        ({"source": "x" * 100_001}, "characters"),
    ],
)
def test_rows_that_cannot_be_are_refused(changes, told):
    with pytest.raises(MeasurementError, match=told):
        some_records(**changes)


def test_rows_that_cannot_be_are_left_out_and_counted():
    seconds = [1.0, float("inf"), -2.0, 4.0, float("nan")]
    kept, counts = keep_sound(op="send", device="V100", seconds=seconds, shapes=["bytes=1"] * 4 + ["bytes=?"])
    np.testing.assert_array_equal(kept.seconds, [1.0, 4.0])
    assert counts == {"seconds that are not a number": 2, "negative seconds": 1}


def test_zeros_that_mean_something_are_kept():
    table = make_records(
        op="op",
        device="d",
        shapes=["m=0", "window=0;queries=4", "ranks=1;stride=0", ""],
        seconds=[1, 1, 1, 0],
        flags=["noop", "", "", "noop,plateau"],
    )
    assert len(table) == 4
    np.testing.assert_array_equal(table.has_flag("noop"), [True, False, False, True])
    np.testing.assert_array_equal(table.has_flag("plateau"), [False, False, False, True])


def test_rows_are_found_by_text_and_size():
    table = some_records()
    assert table.where(op="matmul", device="A100").shapes.tolist() == ["m=8;n=2;k=8"]
    np.testing.assert_array_equal(table.where(op="matmul").size("m"), [4, 8])
    np.testing.assert_array_equal(table.where(op="matmul").size("k"), [8, 8])
    with pytest.raises(MeasurementError, match="have no size 'm'"):
        table.size("m")
    with pytest.raises(MeasurementError, match="have no size 'an'"):
        make_records(op="o", device="d", shapes="ran=4", seconds=[1.0]).size("an")


def test_columns_cannot_be_changed():
    with pytest.raises(ValueError, match="read-only"):
        some_records().seconds[0] = 5.0


def test_later_rows_renew_earlier_ones():
    old, new = some_records(), some_records(seconds=[7.0, 8.0, 9.0], date="2026-01-01").where(device="H100")
    for table in (concat_records([old, new]).dedupe(), merge_records(old, new)):
        assert table.device.tolist() == ["A100", "H100", "H100"]
        np.testing.assert_array_equal(table.seconds, [2e-3, 7.0, 9.0])
    twice = concat_records([new, new])
    assert len(merge_records(old, twice)) == 5  # two takes of one thing are both new
    assert len(twice.dedupe()) == 2


def test_hashes_tell_rows_apart_and_are_the_same_in_another_interpreter():
    table = some_records()
    command = (
        "from tests.records.test_table import some_records; print(*some_records().row_hashes())"  # another hash seed
    )
    done = subprocess.run([sys.executable, "-c", command], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.split() == [str(number) for number in table.row_hashes()]
    other = some_records(seconds=[1e-3, 2e-3, 3.0000001e-3])
    np.testing.assert_array_equal(table.row_hashes() == other.row_hashes(), [True, True, False])
    # Who says it, and when, does not make another row of it.
    np.testing.assert_array_equal(table.row_hashes(), some_records(source="elsewhere", date="1999-01-01").row_hashes())


@given(st.lists(st.sampled_from(["matmul", "send", "all_gather"]), max_size=20), st.randoms())
def test_selecting_and_joining_changes_no_row(ops, random):
    table = make_records(op=ops, device="d", seconds=[random.uniform(0.1, 1) for _ in ops])
    mask = np.array([random.random() < 0.5 for _ in ops], bool)
    joined = concat_records([table.select(mask), table.select(~mask)])
    assert sorted(joined.row_hashes().tolist()) == sorted(table.row_hashes().tolist())
    for name in COLUMNS:
        assert getattr(table.select(np.arange(len(ops))), name).tolist() == getattr(table, name).tolist()


def test_named_shapes_keep_their_order():
    assert named_shapes(m=4, n=np.int64(2), k=1) == "m=4;n=2;k=1"
