"""``measure --calibrate`` as it is typed; what it computes is tested in tests/training/test_calibrate.py."""

import json

import pytest

from meshwright.spec import Measurements, read_document, write_document


@pytest.mark.distributed
@pytest.mark.timeout(300)
def test_the_command_corrects_the_table_by_real_steps(run):
    code, _, error = run("measure", "gpt-tiny", "--calibrate", "-m", 1)
    assert code == 1
    assert "no table to correct" in error
    table = Measurements(device="cpu", software="none", date="never", conditions="made up")
    write_document(table, "measurements.json")
    code, out, error = run("measure", "gpt-tiny", "--calibrate", "-m", 1, "--ranks", 1, "--repeats", 4, "--json")
    assert code == 0, error
    report = json.loads(out)
    assert (report["steps_fitted"], report["steps_judged"]) == (2, 2)
    assert [item["part"] for item in report["corrections"]] == ["forward", "backward", "optimizer"]
    assert all(item["factor"] == item["measured_s"] / item["predicted_s"] > 0 for item in report["corrections"])
    corrected = read_document(Measurements, "measurements.json")
    assert corrected.conditions.startswith("made up; calibration by 2 steps of gpt-tiny")


@pytest.mark.parametrize(
    "arguments", [(), ("gpt-tiny", "-m", "1", "-m", "2"), ("gpt-tiny", "--cluster"), ("--from", "trace.json")]
)
def test_what_does_not_go_with_calibrating_is_refused(run, arguments):
    assert run("measure", "--calibrate", *arguments)[0] == 2
