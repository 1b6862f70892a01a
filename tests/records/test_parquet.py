"""Tables as parquet files: whole, within limits, and of exactly our columns."""

import contextlib
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from meshwright.records import COLUMNS, make_records, parquet
from meshwright.records.parquet import _pages, read_records, write_records
from meshwright.spec import DocumentError
from tests.project import ROOT
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
        (lambda t: t.append_column("op", t.column("op")), "two columns have the same name"),
        (lambda t: t.set_column(0, t.field(0).name, pa.array([1, 2, 3])), "not strings"),
        (lambda t: t.set_column(10, "seconds", pa.array(["a", "b", "c"])), "not float64"),
        (lambda t: t.set_column(10, "seconds", pa.array([1.0, None, 3.0])), r"not a number \(rows 1\)"),
        (
            lambda t: t.set_column(10, "seconds", pa.array([[1.0], [2.0], [3.0]])),
            "holds list<.*expected strings or numbers",
        ),
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


@pytest.mark.long
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


def test_every_spoilt_byte_of_a_footer_is_refused_or_harmless(tmp_path):
    """The same where the figures stand by which the limits are checked."""
    path = write_records(some_records(), tmp_path / "table.parquet")
    content = path.read_bytes()
    footer = int.from_bytes(content[-8:-4], "little") + 8
    random = np.random.default_rng(1)
    refused = 0
    for place in len(content) - 1 - random.integers(0, footer, 400):
        spoilt = bytearray(content)
        spoilt[place] ^= int(random.integers(1, 256))
        try:
            assert (parquet.parse_records(bytes(spoilt), path).seconds > 0).all()
        except DocumentError:
            refused += 1
    assert refused > 50


def zigzag(number, *, width):
    """An integer as the footer stores it, padded to so many bytes."""
    number = number * 2
    digits = [number >> shift & 127 for shift in range(0, 7 * width, 7)]
    return bytes([*(digit | 128 for digit in digits[:-1]), digits[-1]])


def lie(path, told, meant):
    """Replace a figure in the footer wherever it stands, by another one in as many bytes."""
    content = path.read_bytes()
    start = len(content) - 8 - int.from_bytes(content[-8:-4], "little")
    width = next(width for width in range(1, 10) if meant < 1 << 7 * width - 1)
    assert zigzag(meant, width=width) in content[start:]
    footer = content[start:].replace(zigzag(meant, width=width), zigzag(told, width=width))
    path.write_bytes(content[:start] + footer)


@pytest.mark.parametrize("told", [1, 2999, 3001, 8000])
def test_a_footer_that_lies_about_rows_is_refused(told, tmp_path):
    path = write_records(make_records(op="o", device="d", seconds=np.ones(3000)), tmp_path / "t.parquet")
    assert len(read_records(path)) == 3000
    lie(path, told, 3000)
    with pytest.raises(
        DocumentError, match=f"column 'op' has 3000 values, but its footer says {told} values in {told} rows"
    ):
        read_records(path)


def with_sources(path, texts, times, **how):
    """A table of as many row groups, each with these texts as sources."""
    table = pq.read_table(write_records(make_records(op="o", device="d", seconds=np.ones(len(texts))), path))
    table = table.set_column(table.schema.get_field_index("source"), "source", texts)
    with pq.ParquetWriter(path, table.schema, compression="zstd", use_dictionary=False, **how) as writer:
        for _ in range(times):
            writer.write_table(table)
    return path


# Reads tables, and tells how many bytes more that took at once than reading the first one.
READ = """
import sys
from meshwright.records.parquet import read_records
from meshwright.spec import DocumentError
from tests.processes import peak_rss_bytes

read_records(sys.argv[1])
before = peak_rss_bytes()
for path in sys.argv[2:]:
    try:
        print(len(read_records(path)))
    except DocumentError as error:
        print(error)
print(peak_rss_bytes() - before)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's /proc")
@pytest.mark.long
def test_small_files_that_stand_for_gigabytes_are_refused_in_little_memory(tmp_path):
    small = write_records(some_records(), tmp_path / "small.parquet")
    long = pa.array(["x" * 2**20] * 64)  # 64 MiB, which pages repeat
    alike = {"column_encoding": {"source": "DELTA_BYTE_ARRAY"}}
    binary = with_sources(tmp_path / "binary.parquet", long.cast(pa.binary()), 6, **alike)
    view = with_sources(tmp_path / "view.parquet", long.cast(pa.string_view()), 6, **alike)
    delta = with_sources(tmp_path / "delta.parquet", long, 6, **alike)
    plain = with_sources(tmp_path / "plain.parquet", long, 17)
    (size,) = {pq.ParquetFile(plain).metadata.row_group(i).total_byte_size for i in range(17)}
    assert size > 2**26
    lie(plain, 1000, size)
    assert all(path.stat().st_size < 2**20 for path in (binary, view, delta, plain))
    command = [sys.executable, "-c", READ, *map(str, (small, binary, view, delta, plain, small))]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    told = done.stdout.splitlines()
    assert "column 'source' holds binary; expected strings or numbers" in told[0]
    assert "column 'source' holds string_view; expected strings or numbers" in told[1]
    assert "a page has an encoding that may unpack to any size" in told[2]
    assert "1088 rows that take 114" in told[3]
    assert told[4] == "3"
    assert int(told[5]) < 2**28


READ_AND_WRITE = """
import sys
from pathlib import Path
from meshwright.records.parquet import read_records, write_records

def threads():
    return len(list(Path("/proc/self/task").iterdir()))

before = threads()
write_records(read_records(sys.argv[1]), sys.argv[2])
print(threads() - before)
"""


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs Linux's /proc")
def test_no_threads_are_left_that_could_abort_the_process_at_its_end(tmp_path):
    small = write_records(some_records(), tmp_path / "small.parquet")
    command = [sys.executable, "-c", READ_AND_WRITE, str(small), str(tmp_path / "again.parquet")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout == "0\n"


def test_heads_of_pages_that_cannot_be_are_refused():
    """Every way in which a head can be cut off, too deep or too long ends in ValueError."""
    random = np.random.default_rng(2)
    for size in random.integers(0, 60, 3000):
        with contextlib.suppress(ValueError):
            assert all(min(page) >= 0 for page in _pages(random.bytes(int(size)), 0, int(size)))
    for head, words in (
        ([0x1C] * 20, "too many levels"),
        ([0x15, *[255] * 20], "more than 64 bits"),
        ([0x19, 0xF5, 255, 255, 255, 1, 0], "truncated"),
    ):
        with pytest.raises(ValueError, match=words):
            list(_pages(bytes(head), 0, len(head)))
