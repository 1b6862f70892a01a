"""What `plan` says of a precision that was asked for: what it becomes, and what a device does not have."""

import pytest
import typer

from meshwright.cli.planning import choose_precision
from meshwright.spec import Plan, load_cluster, read_document


@pytest.mark.parametrize(
    ("cluster", "options", "word"),
    [
        ("4xA100", {}, "mixed"),
        ("4xA100", {"mode": "inference"}, "bfloat16"),
        ("4xV100", {}, "float32"),
        ("2xcpu", {}, "float32"),
        ("4xA100", {"tf32": True}, "tf32"),
        ("4xA100", {"precision": "float32", "tf32": True}, "tf32"),
        ("4xH100", {"precision": "float8"}, "float8"),
        ("2xcpu", {"precision": "amp"}, "amp"),
        ("4xA100", {"precision": "mixed", "gradients": "bfloat16"}, "mixed-bf16-gradients"),
        ("4xA100", {"precision": "float32", "gradients": "float32"}, "float32"),
        ("4xA100", {"schedules": ["1f1b", "hetpipe"]}, "amp"),
    ],
)
def test_the_precision_of_a_plan(cluster, options, word):
    asked = options.pop("precision", None)
    assert choose_precision(asked, load_cluster(cluster), **options) == word


@pytest.mark.parametrize(
    ("cluster", "options", "words"),
    [
        ("4xV100", {"precision": "bfloat16"}, "bfloat16, for which V100 has no rate.*float32 or amp-float16, or"),
        ("4xV100", {"tf32": True}, "tf32, for which V100 has no rate"),
        ("2xcpu", {"tf32": True}, "tf32, for which cpu has no rate"),
        ("4xA100", {"precision": "float8"}, "float8_e4m3fn, for which A100 has no rate.*or mixed, or"),
        ("4xA100", {"precision": "mixed", "tf32": True}, "--tf32 was given with --precision mixed"),
        ("4xA100", {"precision": "amp", "gradients": "bfloat16"}, "--grad-dtype bfloat16 was given with"),
        ("4xA100", {"precision": "mixed-bf16-gradients", "gradients": "float32"}, "whose gradients are in bfloat16"),
        ("4xA100", {"tf32": True, "gradients": "bfloat16"}, "--grad-dtype bfloat16 was given with --precision tf32"),
    ],
)
def test_what_cannot_be_is_refused(cluster, options, words):
    asked = options.pop("precision", None)
    with pytest.raises(typer.BadParameter, match=words):
        choose_precision(asked, load_cluster(cluster), **options)


def test_the_plan_has_the_word(run, tmp_path):
    options = ["--cluster", "2xA100", "--batch", 16, "--tf32", "--stages", 1, "--out", tmp_path / "plan.json"]
    assert run("plan", "gpt-tiny", *options)[0] == 0
    assert read_document(Plan, tmp_path / "plan.json").workload.precision == "tf32"
