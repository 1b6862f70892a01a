"""What strangers write: no file is executed that only a plan names, no character controls the terminal."""

import io
import json

import pytest
from rich.table import Table
from rich.text import Text

from meshwright.cli.main import invoke
from meshwright.cli.output import PlainConsole, escape_controls
from meshwright.program import with_schedule
from meshwright.spec import Plan, read_document, write_document
from meshwright.spec.own_code import source_hash
from tests.fuzz.corpus import TRAP


@pytest.fixture
def folder(tmp_path, monkeypatch, capsys):
    """A plan of the model trap.py:build, and the graph that the plan was made for."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "trap.py").write_text(TRAP)
    assert invoke(["capture", "gpt-tiny", "--out", "graph.json"]) == 0
    line = "plan gpt-tiny --cluster 2xcpu --batch 4 --stages 2 --precision float32 --schedule 1f1b --zero 0"
    assert invoke([*line.split(), "--out", "plan.json"]) == 0
    data = json.loads((tmp_path / "plan.json").read_text())
    (tmp_path / "strange.json").write_text(json.dumps({**data, "model": "trap.py:build"}))
    capsys.readouterr()
    return tmp_path


@pytest.mark.parametrize("option", ["--program", "--as deepspeed", "--as megatron", "--play"])
def test_a_model_that_only_a_plan_names_is_not_executed(folder, capsys, option):
    assert invoke(["show", "strange.json", *option.split()]) == 1
    error = capsys.readouterr().err
    assert "meshwright capture trap.py:build --out graph.json" in error
    assert f"meshwright show strange.json {option} --graph graph.json" in error
    assert not (folder / "harmed").exists()


@pytest.mark.parametrize("option", ["--program", "--as deepspeed", "--as megatron"])
def test_the_graph_stands_in_for_the_model(folder, capsys, option):
    assert invoke(["show", "strange.json", *option.split(), "--graph", "graph.json"]) == 0
    stranger = capsys.readouterr().out
    assert invoke(["show", "plan.json", *option.split()]) == 0
    own = capsys.readouterr().out
    # Megatron-LM gets the sizes of a model of the zoo beside; the number of blocks is in both.
    if option == "--as megatron":
        assert "--num-layers 4" in own
        assert "--num-layers 4" in stranger
    else:
        assert own[-99:] == stranger[-99:]
    assert not (folder / "harmed").exists()


@pytest.mark.parametrize("option", ["--program", "--as deepspeed", "--play"])
@pytest.mark.matrix
def test_the_graph_of_another_model_is_refused(folder, capsys, option):
    assert invoke(["capture", "vgg-tiny", "--out", "other.json"]) == 0
    assert invoke(["show", "strange.json", *option.split(), "--graph", "other.json"]) == 1
    assert "make the plan again" in capsys.readouterr().err


@pytest.mark.parametrize("line", ["show plan.json --graph graph.json", "show plan.json --schedule --graph graph.json"])
def test_a_graph_that_nobody_reads_is_refused(folder, capsys, line):
    assert invoke(line.split()) == 1
    assert "--graph belongs to --program, --as or --play" in capsys.readouterr().err


def test_a_graph_goes_with_a_plan_only(folder, capsys):
    assert invoke(["show", "--play", "gpt-tiny", "--graph", "graph.json"]) == 1
    assert "--graph goes with a plan" in capsys.readouterr().err


def test_a_schedule_that_only_a_plan_names_is_executed_by_schedule_alone(folder, capsys):
    mine = (
        "from pathlib import Path\nPath(__file__).with_name('harmed').touch()\n"
        "from meshwright.program import Backward, Forward\n\n\ndef order(plan, rank):\n"
        "    (stage,) = plan.stages_of(rank)\n"
        "    for kind in (Forward, Backward):\n"
        "        yield from (kind(stage=stage, microbatch=m) for m in range(plan.num_microbatches))\n"
    )
    (folder / "mine.py").write_text(mine)
    write_document(with_schedule(read_document(Plan, "plan.json"), "mine.py:order"), "own.json")
    (folder / "harmed").unlink()
    (folder / "mine.py").write_text(mine + "\n")  # what was loaded is kept by content
    data = json.loads((folder / "own.json").read_text())
    (folder / "own.json").write_text(json.dumps({**data, "schedule_hash": source_hash((mine + "\n").encode())}))
    for option in ("", "--program", "--as deepspeed", "--play"):
        invoke(["show", "own.json", *option.split()])
        assert not (folder / "harmed").exists(), option
    assert "no file that only a plan names" in capsys.readouterr().err
    assert invoke(["show", "own.json", "--schedule"]) == 0
    assert (folder / "harmed").exists()


# --- names that control the terminal ---

CONTROLS = "a\u202eb\x1b]0;c\x07\u2066\x9b\x7f\u200f\u2028"
ESCAPED = r"a\u202eb\x1b]0;c\x07\u2066\x9b\x7f\u200f\u2028"


def printed(*renderables):
    stream = io.StringIO()
    console = PlainConsole(file=stream, width=120, force_terminal=True, color_system=None)
    for item in renderables:
        console.print(item, markup=False)
    return stream.getvalue()


def test_controls_are_written_out_and_other_text_is_not():
    assert escape_controls(CONTROLS) == ESCAPED
    assert escape_controls("é\t→ 中\n") == "é\t→ 中\n"


def test_text_tables_and_strings_print_no_controls():
    table = Table("name", "x")
    table.add_row(CONTROLS, "1")
    table.add_row("plain", "2")
    # rich itself drops the bell from what is styled
    shown = printed(CONTROLS, Text(CONTROLS.replace("\x07", "")), table)
    assert (shown.count(ESCAPED), shown.count(ESCAPED.replace(r"\x07", ""))) == (2, 1)
    assert not {letter for letter in CONTROLS if not letter.isascii() or not letter.isprintable()} & set(shown)
    rows = [line for line in shown.splitlines() if line.endswith("│")]
    assert len({len(line) for line in rows}) == 1


@pytest.mark.parametrize("options", [[], ["--json"], ["--program"], ["--as", "megatron"], ["--as", "accelerate"]])
def test_no_verb_prints_controls_of_a_document(folder, capsys, monkeypatch, options):
    data = json.loads((folder / "plan.json").read_text())
    (folder / "x.json").write_text(json.dumps({**data, "model": CONTROLS}))
    monkeypatch.setenv("TERM", "dumb")  # no styles
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    invoke(["show", "x.json", *options])
    streams = capsys.readouterr()
    assert not set("\u202e\u2066\x1b\x07\x9b\x7f\u200f\u2028") & set(streams.out + streams.err)


def test_a_name_that_is_no_text_is_refused(capsys):
    assert invoke(["show", "a\udcff.json"]) == 1
    assert "not valid UTF-8" in capsys.readouterr().err


@pytest.mark.parametrize("model", ["models/mine.py:build", "models/config.json"])
@pytest.mark.parametrize("command", ["simulate", "run"])
def test_a_model_that_lies_in_another_folder_is_said_before_anything_starts(folder, capsys, command, model):
    data = json.loads((folder / "plan.json").read_text())
    (folder / "moved.json").write_text(json.dumps({**data, "model": model}))
    assert invoke([command, "moved.json"]) == 1
    error = capsys.readouterr().err
    assert f"The plan's model is {model!r}, a path relative to the folder in which it was made" in error
    assert str(folder) in error
    assert "Rank" not in error
