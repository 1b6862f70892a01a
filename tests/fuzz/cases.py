"""Cases: a command line and the files that it finds, with one of them spoiled, or the line itself.

Files that a command does not name are not written. Commands that measure, start ranks, serve a page or open a browser
get lines that end before they do.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from tests.fuzz.corpus import Document
from tests.fuzz.foreign import foreign_files
from tests.fuzz.mutations import HOSTILE_NUMBERS, HOSTILE_WORDS, any_of, spoil_bytes, spoil_data, tweak_data, written
from tests.fuzz.requests import requests


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What is typed, and the files in the folder where it is typed; or a request to the playground."""

    arguments: tuple[str, ...]
    files: dict[str, bytes]
    request: bytes = b""


# Lines by the kind of the document that is spoiled; {} is its name, other names are sound documents of the corpus.
LINES: dict[str, tuple[str, ...]] = {
    "graph": (
        "show {}",
        "show {} --json --batch-size 3",
        "simulate plan.json --graph {}",
        "plan {} --cluster 2xcpu --batch 4 --precision float32 --top 1",
        "plan {} --cluster 2xA100 --batch 8 --json",
        "capture {}",
        "show {} --html page.html",
        "show --play {}",
        "show plan.json --program --graph {}",
    ),
    "plan": (
        "show {}",
        "show {} --json",
        "show {} --program",
        "show {} --schedule",
        "show {} --as torch-csv",
        "show {} --as megatron",
        "show {} --as torchtitan",
        "show {} --as deepspeed",
        "show {} --as accelerate",
        "simulate {} --graph graph.json",
        "simulate {} --graph graph.json --steps 2 --trace trace.json --out timeline.json",
        "simulate {} --graph graph.json --schedule gpipe --json",
        "simulate {} --graph graph.json --html page.html",
        "simulate {} --graph graph.json --against gpipe",
        "show {} --play",
        "show {} --play --graph graph.json",
        "show {} --program --graph graph.json",
        "show {} --html page.html",
    ),
    "placement": (
        "show {}",
        "show {} --json",
        "show {} --html page.html",
        "show {} --program --graph graph.json",
        "simulate {} --graph graph.json",
        "simulate {} --graph graph.json --steps 2 --trace trace.json --out timeline.json",
        "simulate {} --graph graph.json --json",
    ),
    "program": ("show {}", "show {} --json", "show {} --html page.html"),
    "timeline": (
        "show {}",
        "show {} --json",
        "compare {} measured.json",
        "compare predicted.json {} --json",
        "compare {} {} --trace trace.json --out comparison.json",
        "compare predicted.json {} --html page.html",
        "show {} --html page.html",
    ),
    "cluster": (
        "show {}",
        "show {} --json",
        "plan graph.json --cluster {} --batch 4 --precision float32 --ranks 2 --top 1",
        "simulate plan.json --graph graph.json --cluster {}",
        "simulate plan.json --graph graph.json --cluster {} --html page.html",
        "show {} --html page.html",
    ),
    "scenario": (
        "simulate plan.json --graph graph.json --scenario {}",
        "simulate plan.json --graph graph.json --cluster 2x2xA100 --scenario {} --seeds 2 --json",
        "simulate plan.json --graph graph.json --scenario {} --run-steps 1000 --seeds 2",
        "simulate plan.json --graph graph.json --scenario {} --sweep slow-device.factor=1,2 --seeds 1 --out cases.csv",
    ),
    "measurements": (
        "show {}",
        "show {} --json",
        "simulate plan.json --graph graph.json --measurements {}",
        "plan graph.json --cluster 2xcpu --batch 4 --precision float32 --measurements {} --top 1",
        "measure --from {} --out table.parquet",
    ),
    "workload": ("show {}", "simulate {} --graph graph.json"),
}
_KIND_OF = {"predicted.json": "timeline", "measured.json": "timeline"}
_VERBS = (
    "capture", "measure", "plan", "simulate", "run", "compare", "validate", "show", "doctor", "", "bogus", "-h",
    "--version",
)  # fmt: skip
_OPTIONS = (
    "--cluster", "--batch", "--out", "-o", "--json", "-m", "--microbatch-size", "--schedule", "--measurements", "--top",
    "--stages", "--ranks", "--memory-limit", "--precision", "--optimizer", "--graph", "--steps", "--trace", "--program",
    "--as", "--batch-size", "--sequence-length", "--image-size", "--inference", "--repeats", "--force", "--bogus", "--",
    "--against", "--method", "--fix", "--launch", "--slurm", "--html", "--from", "--device", "--list", "-", "-x",
    "--find-orders", "--scenario", "--sweep", "--plot", "--figure", "--seeds", "--run-steps",
)  # fmt: skip
_SOUND = (
    "graph.json",
    "plan.json",
    "predicted.json",
    "cluster.toml",
    "4xA100",
    "2xcpu",
    "gpt-tiny",
    "1f1b",
    "made.json",
    "4",
)


# Lines with a place for a value; the value is sound, hostile, or somewhere between.
_TEMPLATES = (
    "plan graph.json --cluster 2xcpu --batch {} --precision float32 --top 1",
    "plan graph.json --cluster 2xcpu --batch 4 --precision float32 -m {} --top 1",
    "plan graph.json --cluster {} --batch 4 --precision float32 --top 1",
    "plan graph.json --cluster 2xcpu --batch 4 --precision float32 --stages {}",
    "plan graph.json --cluster 4xA100 --batch 8 --ranks {} --top 2",
    "plan graph.json --cluster 2xA100 --batch 8 --memory-limit {} --top 1",
    "plan graph.json --cluster 2xA100 --batch 8 --schedule {} --top 1",
    "plan graph.json --cluster 2xA100 --batch 8 --top {}",
    "plan {} --cluster 2xA100 --batch 8 --top 1",
    "simulate plan.json --graph graph.json --steps {}",
    "simulate plan.json --graph graph.json --cluster {}",
    "simulate plan.json --graph graph.json --schedule {}",
    "simulate plan.json --graph graph.json --against {}",
    "simulate {} --graph graph.json",
    "simulate plan.json --graph graph.json --scenario {}",
    "simulate plan.json --graph graph.json --scenario scenario.toml --sweep {} --seeds 1",
    "simulate plan.json --graph graph.json --scenario scenario.toml --sweep slow-device.factor={} --seeds 1",
    "simulate plan.json --graph graph.json --scenario scenario.toml --run-steps {} --seeds 1",
    "show {}",
    "show graph.json --batch-size {}",
    "show plan.json --as {}",
    "show --play {}",
    "show plan.json --program --graph {}",
    "compare predicted.json {}",
)
_VALUES = ("1", "2", "3", "4", "8", "12", "64", "2xcpu", "4xA100", "2x2xH100", "gpipe", "1f1b", "mine.py:order", "0.5")
# Schedules that the line itself names; nothing in them does harm.
_SCHEDULES = tuple(
    f"from meshwright.program import Backward, Forward, local_microbatches\n\n\ndef order({given}):\n    {body}\n"
    for given, body in (
        ("plan, rank, stage=0", "mine = local_microbatches(plan, plan.stages_of(rank)[0], rank)\n"
         "    yield from [kind(stage=stage, microbatch=m) for kind in (Forward, Backward) for m in mine]"),
        ("plan, rank, stage=0", "yield Forward(stage=stage, microbatch=-1)"),
        ("plan, rank, stage=0", "yield Backward(stage=10**20, microbatch=None)"),
        ("plan, rank, stage=0", "while True: yield Forward(stage=stage, microbatch=0)"),
        ("plan, rank, stage=0", "return 'abc'"),
        ("plan, rank, stage=0", "yield from ()"),
        ("plan, rank, stage=0", "raise SystemExit('\\u202e')"),
        ("plan, rank, stage=0", "raise Exception('\\ud800')"),
        ("plan, rank, stage=0", "yield order"),
        ("", "pass"),
        ("*given", "return 1 // 0"),
    )
)  # fmt: skip
# Orders for the plan of the corpus, and others.
_ORDERS = (
    "0F0,0F1,0F2,0F3,0B0,0B1,0B2,0B3\n1F0,1B0,1F1,1B1,1F2,1B2,1F3,1B3\n",
    "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1\n1RECV_F0,1F0,1I0,1SEND_B0,1W0,1RECV_F1,(1F1;1B1)OVERLAP_F_B\n",
    "0UNSHARD,0F0,,0B0,0RESHARD,0REDUCE_GRAD\n",
)
_ORDER_LINES = (
    "simulate plan.json --graph graph.json --schedule orders.csv",
    "plan graph.json --cluster 2xcpu --batch 4 -m 1 --precision float32 --schedule orders.csv --stages 2 --top 1",
)
_SCHEDULE_LINES = (
    "simulate plan.json --graph graph.json --schedule mine.py:order",
    "plan graph.json --cluster 2xcpu --batch 4 --precision float32 --schedule mine.py:order --stages 2 --top 1",
    "plan graph.json --cluster 2xcpu --batch 4 --schedule mine.py:nothing",
)


def cases(corpus: dict[str, Document]) -> st.SearchStrategy[Case]:
    """Spoiled documents as many as lines, schedules and requests together; a few models, which take torch seconds."""
    documents = [_document_cases(corpus, document) for document in corpus.values() if _kind(document) in LINES]
    models = [_model_cases(name, corpus[name].data) for name in ("config.json", "shape.toml")]
    asked = requests().map(lambda content: Case(arguments=(), files={}, request=content))
    # Chosen by number, for hypothesis takes equal branches of `one_of` for one.
    kinds = [
        *[st.one_of(documents)] * 100,
        *[_valued_cases(corpus)] * 50,
        *[_line_cases(corpus)] * 15,
        *[asked] * 25,
        *[_schedule_cases(corpus)] * 9,
        *[_order_cases(corpus)] * 9,
        *[_foreign_cases(corpus)] * 25,
        st.one_of(models),
    ]
    return st.integers(0, len(kinds) - 1).flatmap(lambda place: kinds[place])


@st.composite
def _document_cases(draw: st.DrawFn, corpus: dict[str, Document], document: Document) -> Case:
    name = f"spoiled{document.suffix}"
    way = draw(st.integers(0, 9))
    if way < 8:
        content = written(tweak_data(draw, document.data), document.suffix)
    elif way < 9:
        content = written(spoil_data(draw, document.data), document.suffix)
    else:
        content = spoil_bytes(draw, written(document.data, document.suffix))
    words = tuple(draw(st.sampled_from(LINES[_kind(document)])).replace("{}", name).split())
    return Case(arguments=words, files={**_named(corpus, words), name: content})


@st.composite
def _valued_cases(draw: st.DrawFn, corpus: dict[str, Document]) -> Case:
    value = (
        st.sampled_from(_VALUES)
        | st.sampled_from(_SOUND)
        | any_of(HOSTILE_WORDS)
        | any_of(HOSTILE_NUMBERS).map(_as_text)
    )
    given = _as_typed(draw(value))
    words = tuple(given if word == "{}" else word for word in draw(st.sampled_from(_TEMPLATES)).split())
    return Case(arguments=words, files={**_named(corpus, words), "mine.py": _SCHEDULES[0].encode()})


@st.composite
def _schedule_cases(draw: st.DrawFn, corpus: dict[str, Document]) -> Case:
    content = draw(any_of(_SCHEDULES)).encode()
    if draw(st.integers(0, 2)) == 0:
        place = draw(st.integers(0, len(content)))
        content = content[:place] + draw(st.sampled_from((b"", b" ", b"\x00", b"\xff", b"(", content[place + 1 :])))
    words = tuple(draw(st.sampled_from(_SCHEDULE_LINES)).split())
    return Case(arguments=words, files={**_named(corpus, words), "mine.py": content})


@st.composite
def _order_cases(draw: st.DrawFn, corpus: dict[str, Document]) -> Case:
    content = spoil_bytes(draw, draw(any_of(_ORDERS)).encode())
    words = tuple(draw(st.sampled_from(_ORDER_LINES)).split())
    return Case(arguments=words, files={**_named(corpus, words), "orders.csv": content})


@st.composite
def _foreign_cases(draw: st.DrawFn, corpus: dict[str, Document]) -> Case:
    files = foreign_files()
    name = draw(st.sampled_from(sorted(files)))
    content, lines = files[name]
    if name.endswith(".json") and draw(st.booleans()):
        content = written(tweak_data(draw, json.loads(content)), ".json")
    else:
        content = spoil_bytes(draw, content)
    words = tuple(draw(st.sampled_from(lines)).replace("{}", name).split())
    return Case(arguments=words, files={**_named(corpus, words), name: content})


@st.composite
def _model_cases(draw: st.DrawFn, name: str, data: Any) -> Case:
    spoiled = (tweak_data if draw(st.booleans()) else spoil_data)(draw, data)
    line = draw(st.sampled_from((f"capture {name}", f"plan {name} --cluster 2xA100 --batch 4 --top 1")))
    return Case(arguments=tuple(line.split()), files={name: written(spoiled, Path(name).suffix)})


@st.composite
def _line_cases(draw: st.DrawFn, corpus: dict[str, Document]) -> Case:
    values = st.sampled_from(_SOUND) | any_of(HOSTILE_WORDS) | any_of(HOSTILE_NUMBERS).map(_as_text)
    rest = st.lists(st.sampled_from(_OPTIONS) | values | st.text(max_size=8), max_size=6)
    words = [draw(st.sampled_from(_VERBS)), *draw(rest)]
    # What would measure, serve, run ranks or look at the machine is made to end before it does so.
    if words[0] in ("measure", "run", "doctor", "capture", "validate"):
        words.append("--no-such-option")
    arguments = tuple(_as_typed(word) for word in words)
    return Case(arguments=arguments, files=_named(corpus, arguments))


def _named(corpus: dict[str, Document], words: tuple[str, ...]) -> dict[str, bytes]:
    return {word: written(corpus[word].data, corpus[word].suffix) for word in words if word in corpus}


def _kind(document: Document) -> str:
    schema = document.data.get("schema", "") if isinstance(document.data, dict) else ""
    return schema.split("/")[1] if schema.count("/") == 2 else ""


def _as_text(number: float) -> str:
    return str(number) if not isinstance(number, int) or number < 10**30 else f"1{'0' * 400}"


def _as_typed(word: str) -> str:
    """The word as Python reads it from a command line: bytes that are no UTF-8 become these code points (PEP 383)."""
    return "".join("\udcff" if "\ud800" <= letter <= "\udfff" else letter for letter in word)
