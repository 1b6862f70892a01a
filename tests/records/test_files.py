"""Where measurements are read and written: by suffix, renewed where they are known, the rest kept."""

import sys

import pytest

from meshwright.records import add_records, load_measurements, make_records, save_measurements
from meshwright.records.parquet import read_records
from meshwright.spec import DocumentError, MeasurementError, Measurements, OpMeasurement, load_cluster


def table(device="cpu", seconds=1.0, software="s"):
    ops = (OpMeasurement(key="aten.relu.default(4:float32|1)", forward_s=seconds, backward_s=0.5, num_samples=3),)
    return Measurements(device=device, software=software, date="d", conditions="c", ops=ops, overhead_s=1e-5)


@pytest.mark.parametrize("name", ["m.json", "m.parquet"])
def test_what_is_saved_is_loaded(tmp_path, name):
    path = save_measurements(table(), tmp_path / name)
    assert load_measurements(path, load_cluster("2xcpu")) == table()


def test_other_devices_and_other_rows_are_kept(tmp_path):
    path = tmp_path / "m.parquet"
    public = make_records(op="matmul", shapes="m=1;n=2;k=3", device="H100", seconds=[1.0])
    add_records(public, path)
    save_measurements(table("H100"), path)
    save_measurements(table("cpu"), path)
    save_measurements(table("H100", seconds=2.0), path)
    assert load_measurements(path, load_cluster("8xH100")) == table("H100", seconds=2.0)
    assert load_measurements(path, load_cluster("2xcpu")) == table("cpu")
    assert len(read_records(path)) == 1 + 2 * 3


def test_newer_software_wins(tmp_path):
    path = save_measurements(table(software="torch 2"), tmp_path / "m.parquet")
    save_measurements(table(software="torch 3", seconds=4.0), path)
    assert load_measurements(path, load_cluster("2xcpu")) == table(software="torch 3", seconds=4.0)
    assert len(read_records(path)) == 6  # the older rows stay in the table


def test_a_cluster_that_is_not_in_the_table(tmp_path):
    path = save_measurements(table("H100"), tmp_path / "m.parquet")
    with pytest.raises(MeasurementError, match=r"no rows of A100; its devices are H100"):
        load_measurements(path, load_cluster("4xA100"))


def test_other_suffixes_and_places_are_refused(tmp_path):
    with pytest.raises(DocumentError, match=r"end in \.json \(one device\) or \.parquet"):
        save_measurements(table(), tmp_path / "m.txt")
    with pytest.raises(DocumentError, match=r"ends in \.parquet"):
        add_records(make_records(seconds=[]), tmp_path / "m.json")
    (tmp_path / "m.parquet").mkdir()
    with pytest.raises(DocumentError, match="a folder"):
        save_measurements(table(), tmp_path / "m.parquet")


def test_json_needs_no_pyarrow(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.delitem(sys.modules, "meshwright.records.parquet", raising=False)
    path = save_measurements(table(), tmp_path / "m.json")
    assert load_measurements(path, load_cluster("2xcpu")) == table()
    with pytest.raises(ModuleNotFoundError, match="pyarrow"):
        save_measurements(table(), tmp_path / "m.parquet")
