"""Tables as parquet files: whole, within limits, and of exactly our columns."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from meshwright.records import COLUMNS, make_records, parquet
from meshwright.records.parquet import read_records, write_records
from meshwright.spec import DocumentError
from tests.records.test_table import some_records


def test_a_table_comes_back_as_it_was(tmp_path):
    table = some_records(flags=["", "plateau", ""], num_samples=[1, 2, 3], spread=0.25)
    again = read_records(write_records(table, tmp_path / "new" / "table.parquet"))
    for name in COLUMNS:
        assert getattr(again, name).tolist() == getattr(table, name).tolist()
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["table.parquet"]


def test_an_empty_table_comes_back(tmp_path):
    assert len(read_records(write_records(make_records(seconds=[]), tmp_path / "empty.parquet"))) == 0


def changed(path, change, **metadata):
    table = change(pq.read_table(path))
    pq.write_table(table.replace_schema_metadata(metadata or table.schema.metadata), path)
    return path


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda t: t.append_column("latency_ms", pa.array([1.0] * 3)), r"unknown or missing columns \(latency_ms\)"),
        (lambda t: t.drop_columns(["spread"]), r"unknown or missing columns \(spread\)"),
        (lambda t: t.append_column("op", t.column("op")), "a column twice"),
        (lambda t: t.set_column(0, t.field(0).name, pa.array([1, 2, 3])), "no text"),
        (lambda t: t.set_column(10, "seconds", pa.array(["a", "b", "c"])), "not float64"),
        (lambda t: t.set_column(10, "seconds", pa.array([1.0, None, 3.0])), r"no number \(rows 1\)"),
        (lambda t: t.set_column(10, "seconds", pa.array([[1.0], [2.0], [3.0]])), "holds lists"),
        (lambda t: t.set_column(10, "seconds", pa.array([1.0, -2.0, 3.0])), r"negative seconds \(rows 1\)"),
    ],
)
def test_another_table_is_refused(change, told, tmp_path):
    path = write_records(some_records(), tmp_path / "table.parquet")
    with pytest.raises(DocumentError, match=rf"(?s){told}"):
        read_records(changed(path, change))


def test_another_version_is_refused(tmp_path):
    path = write_records(some_records(), tmp_path / "table.parquet")
    with pytest.raises(DocumentError, match=r"expected a measurement table 'records/1', found 'records/9'"):
        read_records(changed(path, lambda table: table, meshwright="records/9"))


@pytest.mark.parametrize("cut", [0, 4, 200, -1])
def test_a_file_that_was_cut_off_is_refused(cut, tmp_path):
    path = write_records(some_records(), tmp_path / "table.parquet")
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(DocumentError, match="not a parquet file that can be read"):
        read_records(path)


def test_every_spoilt_byte_is_refused_or_harmless(tmp_path):
    """No spoilt file ends in anything but DocumentError; a row that is read still keeps the table's rules."""
    path = write_records(some_records(), tmp_path / "table.parquet")
    content = path.read_bytes()
    random = np.random.default_rng(0)
    refused = 0
    for place in random.integers(0, len(content), 300):
        spoilt = bytearray(content)
        spoilt[place] ^= int(random.integers(1, 256))
        path.write_bytes(bytes(spoilt))
        try:
            assert (read_records(path).seconds > 0).all()
        except DocumentError:
            refused += 1
    assert refused > 100


def test_files_that_are_too_large_are_refused(tmp_path, monkeypatch):
    path = write_records(some_records(), tmp_path / "table.parquet")
    monkeypatch.setattr(parquet, "MAX_ROWS", 2)
    with pytest.raises(DocumentError, match="limited to 2 rows"):
        read_records(path)
    monkeypatch.setattr(parquet, "MAX_FILE_BYTES", 100)
    with pytest.raises(DocumentError, match="more than 100 bytes"):
        read_records(path)


def test_a_text_that_repeats_is_kept_once(tmp_path):
    """A small file may name one long text for every row; the rows share it."""
    long = "x" * 50_000
    path = write_records(make_records(op="o", device="d", seconds=np.ones(10_000), source=long), tmp_path / "t.parquet")
    assert path.stat().st_size < 20_000
    assert len({id(text) for text in read_records(path).source}) == 1


def test_equal_numbers_count_as_what_they_take_once_unpacked(tmp_path, monkeypatch):
    """A file of a few kilobytes that stands for megabytes is refused before it is unpacked."""
    path = write_records(make_records(op="o", device="d", seconds=np.ones(20_000)), tmp_path / "t.parquet")
    monkeypatch.setattr(parquet, "MAX_UNPACKED_BYTES", 10 * path.stat().st_size)
    monkeypatch.setattr(parquet.pq.ParquetFile, "read", lambda *_, **__: pytest.fail("unpacked"))
    with pytest.raises(DocumentError, match="20000 rows that take 2080000 bytes"):
        read_records(path)


def test_a_spoilt_page_is_told_by_its_checksum(tmp_path):
    """Without checksums a changed figure would be another sound figure."""
    seconds = np.random.default_rng(0).random(1000) + 1
    path = write_records(make_records(op="o", device="d", seconds=seconds), tmp_path / "t.parquet")
    content = bytearray(path.read_bytes())
    meta = pq.ParquetFile(path).metadata.row_group(0).column(COLUMNS.index("seconds"))
    content[meta.data_page_offset - 100] ^= 1  # the page of the dictionary, which stands before
    path.write_bytes(bytes(content))
    with pytest.raises(DocumentError, match="checksum"):
        read_records(path)
