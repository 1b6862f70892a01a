"""Bad input gets one paragraph: a share of the cases here, 10,000 of them in the slow tests.

All of them in a process of its own: ``python -m tests.fuzz.run --cases 10000``.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.spec import encode_document
from tests.fuzz.cases import Case
from tests.fuzz.mutations import spoil_bytes, spoil_data, written
from tests.fuzz.outcome import try_case
from tests.fuzz.requests import shared_server
from tests.fuzz.run import MAX_RSS_BYTES
from tests.spec.examples import EXAMPLES

PLAN = json.dumps({**encode_document(EXAMPLES["plan"]), "model": "gpt-tiny", "model_sizes": []})


def run_cases(count: int, seed: int, timeout_s: float) -> dict:
    command = [sys.executable, "-m", "tests.fuzz.run", "--cases", str(count), "--seed", str(seed)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
    assert done.stdout, done.stderr[-3000:]
    return json.loads(done.stdout)


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_share_of_the_cases_is_taken_well():
    result = run_cases(150, seed=0, timeout_s=290)
    assert result["cases"] == 150
    assert not result["wrong"], json.dumps(result["wrong"], indent=1)[:4000]
    assert result["max_rss_bytes"] < MAX_RSS_BYTES


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_ten_thousand_cases_are_taken_well():
    result = run_cases(10_000, seed=1, timeout_s=3500)
    assert result["cases"] == 10_000
    assert not result["wrong"], json.dumps(result["wrong"], indent=1)[:4000]
    assert result["max_rss_bytes"] < MAX_RSS_BYTES


GRAPH = json.dumps(encode_document(EXAMPLES["graph"]))
LONG = "a" * 300
# What earlier cases found; {} is a file with the content beside it.
FOUND = [
    ("show 1" + "0" * 400, ""),
    (f"capture {LONG}.py:build", ""),
    (f"capture {LONG}.json", ""),
    (f"plan gpt-tiny --cluster 2xcpu --precision float32 --batch 4 --out {LONG}", ""),
    (f"measure --out {LONG}.json", ""),
    (f"measure --cluster --out {LONG}.toml", ""),
    (f"simulate {LONG}.json --html {LONG}.html", ""),
    ("show {} --program", PLAN.replace('"model_sizes": []', '"model_sizes": [["batch_size", 1]]')),
    ("show {} --program", PLAN.replace('"model_sizes": []', '"model_sizes": [["fake", 1]]')),
    ("show {} --program", PLAN.replace('"gpt-tiny"', '"trap.py:build"')),
    ("show {} --as deepspeed", PLAN.replace('"gpt-tiny"', '"trap.py:build"')),
    ("show {} --play", PLAN.replace('"gpt-tiny"', '"trap.py:build"')),
    ("show {}", PLAN.replace('"gpt-tiny"', '"\\ud800"')),
    ("plan {} --cluster 2xcpu --batch 4 --precision float32", GRAPH.replace('"shape": [', f'"shape": [{2**64}, ', 1)),
]


@pytest.mark.parametrize(("line", "content"), FOUND)
def test_what_was_found_once_stays_well(line, content):
    words = tuple(word.replace("{}", "x.json") for word in line.split())
    assert try_case(Case(arguments=words, files={"x.json": content.encode()} if content else {})) is None


@given(st.data())
def test_data_is_spoiled_and_its_source_is_not(data):
    sound = {"schema": "x", "rows": [1, 2, {"a": "b"}]}
    before = json.dumps(sound)
    spoiled = spoil_data(data.draw, sound)
    written(spoiled, ".json")
    written(spoiled, ".toml")
    assert json.dumps(sound) == before
    assert isinstance(spoil_bytes(data.draw, before.encode()), bytes)


def fake_verb(monkeypatch, action):
    monkeypatch.setattr("tests.fuzz.outcome.invoke", action)


@pytest.mark.parametrize(
    ("action", "found"),
    [
        (lambda words: 0, None),
        (lambda words: 7, "exit code 7"),
        (lambda words: 1 // 0, "ZeroDivisionError"),
        (lambda words: print("Traceback (most recent call last):") or 1, "a traceback was printed"),
        (lambda words: Path("harmed").touch() or 0, "was executed"),
        (lambda words: Path("../escaped").touch() or 0, "outside"),
        (lambda words: Path("left.json").touch() or 0, "nobody asked"),
    ],
)
def test_what_goes_wrong_is_noticed(monkeypatch, action, found):
    fake_verb(monkeypatch, action)
    outcome = try_case(Case(arguments=("show", "x.json"), files={"x.json": b"{}"}))
    assert outcome is None if found is None else found in outcome


def asked(path):
    port = shared_server().server_port
    return f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nConnection: close\r\n\r\n".encode()


def test_a_defect_behind_a_request_is_noticed(monkeypatch):
    case = Case(arguments=(), files={}, request=asked("/options"))
    assert try_case(case) is None
    monkeypatch.setattr(shared_server().service, "_options", lambda: 1 // 0)
    assert "a defect" in try_case(case)


def test_a_command_that_takes_too_long_is_noticed(monkeypatch):
    def endless(words):
        while True:
            with contextlib.suppress(Exception):  # what the clock raises is no Exception
                time.sleep(0.01)

    monkeypatch.setattr("tests.fuzz.outcome.LIMIT_S", 0.3)
    fake_verb(monkeypatch, endless)
    assert try_case(Case(arguments=(), files={})).startswith("longer than")
