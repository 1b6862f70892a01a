"""``measure --calibrate`` as it is typed; what it computes is tested in tests/training/test_calibrate.py."""

import json
from dataclasses import replace

import pytest

from meshwright.spec import Measurements, read_document, write_document
from meshwright.training import Calibration


@pytest.mark.long
@pytest.mark.distributed
@pytest.mark.timeout(300)
def test_the_command_corrects_the_table_by_real_steps(run, warm_ranks):
    assert "no table to correct" in run("measure", "gpt-tiny", "--calibrate", "-m", 1, code=1)[2]
    assert run("measure", "gpt-tiny", "-m", 1, "--ranks", 1, "--repeats", 3)[0] == 0
    table = read_document(Measurements, "measurements.json")
    # So wrong that no noise of this machine hides it.
    ops = tuple(replace(op, forward_s=1e3 * op.forward_s, backward_s=1e3 * op.backward_s) for op in table.ops)
    write_document(replace(table, ops=ops, conditions="made up"), "measurements.json")
    _, out, _ = run("measure", "gpt-tiny", "--calibrate", "-m", 1, "--ranks", 1, "--repeats", 4, "--json", code=0)
    report = json.loads(out)
    assert (report["steps_fitted"], report["steps_judged"]) == (2, 2)
    assert [item["part"] for item in report["corrections"]] == ["forward", "backward", "optimizer"]
    assert all(item["factor"] == item["measured_s"] / item["predicted_s"] > 0 for item in report["corrections"])
    assert abs(report["error_after"]) + report["scatter"] < abs(report["error_before"])
    corrected = read_document(Measurements, "measurements.json")
    assert corrected.conditions.startswith("made up; calibration by 2 steps of gpt-tiny")


def test_a_table_that_got_no_better_is_kept(run, monkeypatch):
    import meshwright.training as training

    table = Measurements(device="cpu", software="none", date="never", conditions="made up")
    path = write_document(table, "measurements.json")
    before = path.read_bytes()
    worse = Calibration(
        table=replace(table, conditions="worse"),
        corrections=(),
        num_fitted=2,
        num_judged=2,
        measured_s=1.0,
        before_s=1.1,
        after_s=1.2,
        scatter=0.0,
    )
    monkeypatch.setattr(training, "calibrate_here", lambda *_, **__: worse)
    _, out, _ = run("measure", "gpt-tiny", "--calibrate", "-m", 1, code=0)
    assert "kept as it was" in " ".join(out.split())
    assert "kept as it was" in json.loads(run("measure", "gpt-tiny", "--calibrate", "-m", 1, "--json")[1])["why_kept"]
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    "arguments", [(), ("gpt-tiny", "-m", "1", "-m", "2"), ("gpt-tiny", "--cluster"), ("--from", "trace.json")]
)
def test_what_does_not_go_with_calibrating_is_refused(run, arguments):
    assert run("measure", "--calibrate", *arguments)[0] == 2
