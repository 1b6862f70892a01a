"""How large a step is: by default alike whatever else is asked, in samples or in tokens."""

import json

import pytest

from meshwright.cli.main import invoke


def planned(capsys, *options):
    assert invoke(["plan", "gpt-tiny", "--cluster", "4xA100", "--json", "--top", "1", *options]) == 0
    return json.loads(capsys.readouterr().out)["workload"]


@pytest.mark.parametrize(
    "options",
    [(), ("--tensor", "2"), ("--tensor", "1", "--tensor", "4"), ("--context", "2"), ("--ranks", "2"), ("--zero", "3")],
    ids=" ".join,
)
def test_the_default_depends_on_the_cluster_alone(capsys, options):
    assert planned(capsys, *options)["samples_per_step"] == 32


def test_tokens_are_samples_of_a_length(capsys):
    work = planned(capsys, "--tokens", "4096", "--sequence-length", "64")
    assert (work["samples_per_step"], work["tokens_per_step"], work["sequence_length"]) == (64, 4096, 64)


def test_placements_take_tokens(capsys):
    options = ["--cluster", "2xcpu", "--method", "place", "--tokens", "256", "--json"]
    assert invoke(["plan", "gpt-tiny", *options]) == 0
    assert json.loads(capsys.readouterr().out)["workload"]["samples_per_step"] == 2


@pytest.mark.parametrize(
    ("model", "options", "words"),
    [
        (
            "gpt-tiny",
            ["--tokens", "1000"],
            "not a multiple of 128, the tokens of one sample; the nearest is 896 or 1024",
        ),
        ("gpt-tiny", ["--tokens", "100"], "the nearest is 128. Give that"),
        ("gpt-tiny", ["--tokens", "1024", "--batch", "8"], "give one of them"),
        ("vgg-tiny", ["--tokens", "1024"], "whose first input is not a sequence of tokens. Give --batch"),
    ],
)
def test_tokens_that_are_no_samples_are_refused(capsys, model, options, words):
    assert invoke(["plan", model, "--cluster", "4xA100", *options]) == 2
    said = " ".join(word for word in capsys.readouterr().err.split() if word != "│")
    assert words in said
