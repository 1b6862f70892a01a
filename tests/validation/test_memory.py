"""Predicted bytes reach their targets, and real training here still needs what the shipped truths say."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from meshwright.spec import MeasurementError
from meshwright.validation import memory
from meshwright.validation.datasets import load_table
from meshwright.validation.memory import predict_row, score_memory
from tests.test_layout import ROOT


@pytest.mark.long
def test_targets_are_reached():
    scores = {(score.part, score.arm): score for score in score_memory()}
    judged = {key: score for key, score in scores.items() if score.target is not None}
    assert len(judged) == 5
    assert all(score.met for score in judged.values()), judged
    cpu = scores["peak of training on a CPU", "ours"]
    assert cpu.num_rows >= 8
    assert cpu.worst <= 3
    assert cpu.mape < scores["peak of training on a CPU", "growth of the process"].mape
    assert scores["peaks of ranks of pipelines", "ours"].num_rows >= 8
    # The formula's shares, in points of per cent.
    assert scores["activation percentages (formula)", "ours"].worst <= 2


def test_predictions_are_made_without_torch():
    code = (
        "import sys; from meshwright.validation.memory import score_percentages, score_published; "
        "score_published(); score_percentages(); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, cwd=ROOT)


@pytest.mark.long
@pytest.mark.parametrize("place", [4, 10])
def test_what_training_needs_now_is_what_was_measured(place):
    row = load_table("memory_training")[place]
    case = [row[name] for name in ("model", "batch_size", "optimizer", "recompute")]
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts/measure_memory.py"), "training", *case],
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=100,
        check=True,
    )
    peak, _ = map(int, done.stdout.split())
    # Other versions of torch's libraries take other workspaces.
    assert peak == pytest.approx(float(row["peak_bytes"]), rel=0.03)
    assert np.isclose(predict_row(row), peak, rtol=0.03)


def test_notes_without_what_simumax_predicts_are_named():
    row = {"id": "simumax-1", "notes": "nothing of it"}
    with pytest.raises(MeasurementError, match="'simumax-1' was to say what SimuMax predicts"):
        memory._simumax_gib(row)
    assert memory._simumax_gib({**row, "notes": "predicted 71.5 GiB"}) == 71.5
