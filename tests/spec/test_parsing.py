"""Parsing: what is damaged, ambiguous or too large is refused, each with its own remedy."""

from pathlib import Path

import pytest

from meshwright.spec import DocumentError, Workload, parsing, read_document, write_document
from meshwright.spec.parsing import parse_data, read_data
from tests.spec.examples import WORKLOAD

pytestmark = pytest.mark.timeout(20)


@pytest.mark.parametrize(
    "text", ['{"a": NaN}', '{"a": -Infinity}', '{"a": 1, "a": 2}', "[" * 100_000, "1" * 5000, "\xff"]
)
def test_bad_json_is_refused(tmp_path, text):
    path = tmp_path / "bad.json"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(DocumentError, match="not valid JSON"):
        read_data(path)


@pytest.mark.parametrize("text", ["a = 1\na = 2", "a = [" * 100_000, "a =", "\xff"])
def test_bad_toml_is_refused(tmp_path, text):
    path = tmp_path / "bad.toml"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(DocumentError, match="not valid TOML"):
        read_data(path)


def test_files_that_cannot_be_read(tmp_path):
    for path in (tmp_path / "none.json", tmp_path):
        with pytest.raises(DocumentError, match="cannot be read"):
            read_data(path)


def test_size_limit(tmp_path, monkeypatch):
    path = write_document(WORKLOAD, tmp_path / "workload.json")
    monkeypatch.setattr(parsing, "MAX_DOCUMENT_BYTES", path.stat().st_size)
    assert read_document(Workload, path) == WORKLOAD
    monkeypatch.setattr(parsing, "MAX_DOCUMENT_BYTES", path.stat().st_size - 1)
    with pytest.raises(DocumentError, match="the limit of such documents"):
        read_document(Workload, path)


def test_an_endless_file_is_not_begun():
    with pytest.raises(DocumentError, match="it is a device, not a file"):
        read_data("/dev/zero")


@pytest.mark.parametrize("text", [r'{"a": ["\ud800"]}', r'{"\uDFFF": 1}', r'["\ude00\ud83d"]'])
def test_half_a_character_is_no_text(text):
    with pytest.raises(DocumentError, match=r"x\.json: not valid JSON"):
        parse_data(text.encode(), Path("x.json"))


def test_a_character_in_two_halves_is_read():
    assert parse_data(rb'["\ud83d\ude00 \\ud800"]', Path("x.json")) == ["\U0001f600 \\ud800"]


@pytest.mark.parametrize(
    ("content", "name", "remedy"),
    [
        (b'{"a": [1, 2', "x.json", "may be truncated"),
        (b'{"a": "b', "x.json", "may be truncated"),
        (b"", "x.json", "may be truncated"),
        (b'a = """b', "x.toml", "Correct it there|may be truncated"),
        (b"\x89PNG\xff\xfe", "x.json", "holds no text"),
        (b"[" * 200_000, "x.json", "nested more deeply"),
        (b'{"a": 1, "a": 2}', "x.json", "Correct it there"),
        (b'{"a": NaN}', "x.json", "Correct it there"),
        (b'{"a" 1}', "x.json", "Correct it there"),
        (b"a = = 1\n", "x.toml", "Correct it there"),
    ],
)
def test_each_fault_has_its_own_remedy(content, name, remedy, tmp_path):
    with pytest.raises(DocumentError, match=remedy):
        parse_data(content, tmp_path / name)


@pytest.mark.parametrize(
    ("content", "name"),
    [
        (b"[" + b"{}," * 12_000_000 + b"{}]", "wide.json"),
        (b"[" + b"[]," * 12_000_000 + b"[]]", "wide.json"),
        (b"[" + b"12345," * 30_000_000 + b"1]", "long.json"),
        (b"a" + b".a" * 401 + b" = 1\n", "deep.toml"),
        (b"[a]\n" * 300_001, "many.toml"),
    ],
    ids=["tables", "lists", "numbers", "dotted", "headings"],
)
def test_what_would_exhaust_memory_is_refused_unparsed(content, name, tmp_path, monkeypatch):
    monkeypatch.setattr("json.loads", pytest.fail)
    monkeypatch.setattr("tomllib.loads", pytest.fail)
    with pytest.raises(DocumentError, match=r"limited to|the limit for"):
        parse_data(content, tmp_path / name)
