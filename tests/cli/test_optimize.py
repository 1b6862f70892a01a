"""``optimize rules``: verify, explain, generate, and what is wrong with what was given."""

import json

import pytest
import torch

from meshwright.cli.main import invoke
from meshwright.rewrite.rulebook import BookRule, RuleBook, write_rule_book
from meshwright.rewrite.rules import rule_of
from meshwright.rewrite.special import Special

RULES = """
[[rule]]
name = "twice"
left = "relu(relu(x))"
right = "relu(x)"

[[rule]]
name = "turned"
left = "sub(x, y)"
right = "sub(y, x)"
ranks = { x = 1, y = 1 }
"""


@pytest.fixture
def file(tmp_path):
    place = tmp_path / "mine.toml"
    place.write_text(RULES)
    return place


def test_false_rules_end_with_1_and_a_counter_example(file, capsys):
    assert invoke(["optimize", "rules", "verify", str(file), "--json"]) == 1
    document = json.loads(capsys.readouterr().out)
    assert document["counts"] == {"proved": 1, "refuted": 1, "tested": 0, "never fits": 0}
    assert [row["status"] for row in document["rules"]] == ["proved", "refuted"]
    assert "output 0" in document["rules"][1]["why"]


def test_true_rules_are_listed_when_asked_for(file, capsys):
    file.write_text(RULES.split('[[rule]]\nname = "turned"')[0])
    assert invoke(["optimize", "rules", "verify", str(file)]) == 0
    assert capsys.readouterr().out.splitlines()[0].startswith("mine.toml: 1 rules, 1 proved")
    assert invoke(["optimize", "rules", "verify", str(file), "--all"]) == 0
    assert "twice  proved" in capsys.readouterr().out


def test_a_rule_is_explained(file, capsys):
    assert invoke(["optimize", "rules", "explain", "twice", str(file)]) == 0
    assert "max(" in capsys.readouterr().out
    assert invoke(["optimize", "rules", "explain", "twic", str(file)]) == 1
    assert "did you mean 'twice'" in capsys.readouterr().err


def test_rules_that_ship_are_explained_by_name(capsys):
    assert invoke(["optimize", "rules", "explain", "add commutes"]) == 0
    assert "add(x, y)  =  add(y, x)" in capsys.readouterr().out


def test_rules_are_generated_and_read_again(tmp_path, capsys):
    out = tmp_path / "book.json"
    assert invoke(["optimize", "rules", "generate", "--operators", "1", "--out", str(out)]) == 0
    assert "rules, which follow from" in capsys.readouterr().out
    assert invoke(["optimize", "rules", "verify", str(out)]) == 0


@pytest.mark.long
def test_an_own_operator_is_declared_and_gets_its_rules(tmp_path, capsys):
    own = tmp_path / "own.py"
    own.write_text(
        "from meshwright.rewrite.calculus import Indexed\n"
        "from meshwright.rewrite.operators import operator\n\n\n"
        "@operator\n"
        "def doubled_for_this_test(a, x):\n"
        "    return Indexed(x.shape, lambda *i: x[i] + x[i])\n"
    )
    out = tmp_path / "book.json"
    command = ["optimize", "rules", "generate", "--operators", "2", "--out", str(out)]
    assert invoke([*command, "--op", f"{own}:doubled_for_this_test"]) == 0
    texts = [entry["left"][0] + " = " + entry["right"][0] for entry in json.loads(out.read_text())["rules"]]
    assert "doubled_for_this_test(x) = add(x, x)" in texts
    assert all("doubled_for_this_test" in text for text in texts)


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["verify", "none.toml"], 1, "There is no file"),
        (["generate", "-o", "x.json", "--op", "nothing"], 1, "No operator 'nothing' is declared"),
        (["generate", "-o", "x.json", "--attribute", "axis=0"], 2, "--op, which was not given"),
        (["generate", "-o", "x.json", "--op", "clamp", "--attribute", "low"], 2, "expected name=value"),
        (["generate", "-o", "x.json", "--op", "clamp", "--attribute", "low=0"], 1, "no default value"),
        (["generate", "-o", "x.json", "--operators", "9"], 2, "less than or equal to 4"),
    ],
)
def test_what_cannot_be_done_is_said(arguments, code, words, capsys):
    assert invoke(["optimize", "rules", *arguments]) == code
    assert words in " ".join(capsys.readouterr().err.replace("│", " ").split())


MODEL = """
import torch
from torch import nn


class Scores(nn.Module):
    def forward(self, q, k, v):
        return torch.matmul(torch.matmul(q, k.transpose(-1, -2)), v)


def scores():
    return Scores(), tuple(torch.randn(512, 8) for _ in range(3))
"""


@pytest.fixture
def scores(tmp_path):
    (tmp_path / "mine.py").write_text(MODEL)
    return tmp_path


def test_a_model_is_rewritten_and_loaded_again(scores, capsys, monkeypatch):
    monkeypatch.chdir(scores)
    words = ["optimize", "mine.py:scores", "-o", "fast.pt2", "--report", "fast.html", "--budget", "2"]
    assert invoke(words) == 0
    assert "× as fast as the model, measured" in capsys.readouterr().out
    assert "<h3>" in (scores / "fast.html").read_text()
    batch = tuple(torch.randn(512, 8) for _ in range(3))
    found = torch.export.load(scores / "fast.pt2").module()(*batch)
    torch.testing.assert_close(found, batch[0] @ (batch[1].T @ batch[2]), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["mine.py:scores", "-o", "fast.onnx"], "expected a file name that ends"),
        (["mine.py:other"], "other"),
        (["mine.py:scores", "--unproved", "x"], "no file was given"),
        (["mine.py:scores", "--rules", "false.toml"], "is refuted, not proved"),
        (["mine.py:scores", "--rules", "none.toml"], "There is no file none.toml"),
    ],
)
def test_what_cannot_be_used_is_said(scores, capsys, monkeypatch, arguments, message):
    monkeypatch.chdir(scores)
    (scores / "false.toml").write_text('[[rule]]\nname = "a"\nleft = "matmul(x, y)"\nright = "matmul(y, x)"\n')
    assert invoke(["optimize", *arguments]) in (1, 2)
    assert message in " ".join(capsys.readouterr().err.split())
    assert not list(scores.glob("fast*"))


def test_what_a_rule_book_says_of_itself_is_no_proof(scores, tmp_path, capsys):
    every = tuple((dims,) for dims in range(5))
    forged = BookRule(rule=rule_of("relu is nothing", "relu(x)", "x"), ranks=every, special=Special())
    write_rule_book(RuleBook(rules=(forged,), provenance={}), tmp_path / "forged.json")
    assert (
        invoke(["optimize", f"{scores}/mine.py:scores", "--rules", f"{tmp_path}/forged.json", "--budget", "0.5"]) == 1
    )
    assert "'relu is nothing'" in (said := " ".join(capsys.readouterr().err.split()))
    assert "is refuted, not proved" in said
