"""The check of a GPU, with the processor as its device: it resumes, names what failed, and judges by its rows alone."""

import csv
import importlib
import io
import itertools
import json
import os
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.project import ROOT

SCRIPT = ROOT / "scripts" / "gpu_check.sh"
H100 = {"torch": "2.11.0+cu130", "device": "NVIDIA H100 80GB HBM3", "source": "0123", "pairs": 40}


@pytest.fixture
def part():
    """A module of the check by its name."""
    return importlib.import_module


def start(out, *options, **environment):
    return subprocess.Popen(
        [SCRIPT, str(out), *options],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def call(out, *options, **environment):
    process = start(out, *options, **environment)
    try:
        told, _ = process.communicate(timeout=500)
    finally:
        end_group(process)
    return process.returncode, told


def end_group(process):
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    process.stdout.close()


def read_lines(out):
    return [json.loads(line) for line in (out / "rows.jsonl").read_text().splitlines() if line.endswith("}")]


def test_without_a_gpu_it_is_not_run(tmp_path):
    code, told = call(tmp_path / "out")
    assert code == 3
    assert told.startswith("not run: torch sees no CUDA device here")
    assert not (tmp_path / "out").exists()


def test_a_file_is_no_folder(tmp_path):
    (tmp_path / "out").write_text("")
    code, told = call(tmp_path / "out", "--device", "cpu")
    assert (code, "a file" in told) == (2, True)


def test_a_python_that_is_not_there_is_named(tmp_path):
    code, told = call(tmp_path / "out", PYTHON="/nowhere/python")
    assert (code, told) == (3, "not run: there is no /nowhere/python; set PYTHON\n")


def test_what_the_time_does_not_suffice_for_is_left(tmp_path):
    code, told = call(tmp_path / "out", "--device", "cpu", "--seconds", "25", "--only", "gpt-tiny-4-mixed")
    assert code == 1
    assert "left: tests, measure-gpt-tiny-4, gpt-tiny-4-mixed; call it again to go on" in told
    assert not (tmp_path / "out" / "rows.jsonl").exists()


@pytest.mark.long
@pytest.mark.compiler
@pytest.mark.timeout(900)
def test_a_killed_check_goes_on_where_it_was(tmp_path):
    out, options = tmp_path / "out", ("--device", "cpu", "--seconds", "420", "--only", "gpt-tiny")
    first = start(out, *options)
    rows = out / "rows.jsonl"
    try:
        while first.poll() is None and (not rows.exists() or b'"repeat"' not in rows.read_bytes()):
            time.sleep(0.05)
        assert first.poll() is None, "it ended before it was killed"
    finally:
        end_group(first)
    kept = rows.read_bytes()
    assert {row["kind"] for row in read_lines(out)} <= {"done", "repeat"}
    assert len(read_lines(out)) < 17
    with rows.open("ab") as file:  # a write that was cut off
        file.write(b'{"kind": "repeat", "jo')

    code, told = call(out, *options, "--ready", "1")
    assert code == 0, told
    assert rows.read_bytes().startswith(kept)
    text = rows.read_text().splitlines()
    assert [line for line in text if not line.endswith("}")] == ['{"kind": "repeat", "jo']
    found = read_lines(out)
    cases = [f"gpt-tiny-4-{word}" for word in ("amp-compiled", "amp", "bfloat16", "mixed")]
    jobs = ["tests", "measure-gpt-tiny-4", *cases]
    assert sorted(row["job"] for row in found if row["kind"] == "done") == sorted(jobs)
    repeats = [(row["job"], row["repeat"]) for row in found if row["kind"] == "repeat"]
    assert sorted(repeats) == sorted((case, number) for case in cases for number in range(3))
    assert all(len(row["own_s"]) == row["pairs"] == 4 for row in found if row["kind"] == "repeat")
    # Two jobs ran at a time, and never two were timed.
    spans = sorted((row["began"], row["began"] + row["seconds"]) for row in found if row["kind"] == "repeat")
    assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(spans))
    assert {row["job"] for row in found if row["kind"] == "predicted"} == {*cases}

    (report,) = out.glob("*-gpu-check.md")
    assert "6 of 6 jobs are done" in report.read_text()
    assert "not run**, there is no GPU" in report.read_text()
    for case in cases:
        assert f"| {case} | device |" in report.read_text()
    before = rows.read_bytes()
    code, told = call(out, *options)
    assert code == 0, told
    assert rows.read_bytes() == before


@pytest.mark.long
@pytest.mark.timeout(600)
def test_what_fails_is_named_and_the_rest_goes_on(tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    table = {"schema": "Measurements", "version": 1, "device": "V100", "software": "torch 2.13.0"}
    (out / "measurements.json").write_text(json.dumps(table))
    # Without a compiler torch compiles nothing; ours would run layers as they are, plain PyTorch fails.
    code, told = call(
        out,
        *("--device", "cpu", "--seconds", "420", "--only", "gpt-tiny-4-amp"),
        CXX="/bin/false",
        TORCHINDUCTOR_CACHE_DIR=str(tmp_path / "cache"),
    )
    assert code == 1
    failed = {row["job"]: row["reason"] for row in read_lines(out) if row["kind"] == "failed"}
    assert set(failed) == {"gpt-tiny-4-amp-compiled", "measure-gpt-tiny-4"}, told
    (report,) = out.glob("*-gpu-check.md")
    assert all(f"- {job}: {reason}" in report.read_text() for job, reason in failed.items())
    assert "failed: gpt-tiny-4-amp-compiled, measure-gpt-tiny-4" in told
    assert [row["job"] for row in read_lines(out) if row["kind"] == "done"] == ["tests", "gpt-tiny-4-amp"]


def test_rows_of_another_device_torch_or_source_do_not_count(tmp_path, part):
    rows = part("gpu.rows")
    for other in ("device", "torch", "source", "pairs"):
        rows.RowFile(tmp_path, {**H100, other: "another"}).add("done", "tests")
    own = rows.RowFile(tmp_path, H100)
    assert not own.is_done("tests")
    with own.path.open("ab") as file:
        file.write(b"[1]\n\xff\n{}\n" + b'{"kind": "done", "job"')
    own.mend()
    own.add("done", "tests")
    assert own.is_done("tests")
    assert len(own.read("done")) == 1


def test_six_models_in_three_precisions_and_three_compiled(part):
    cases = part("gpu.rows").choose_cases(quick=False)
    eager = {(case.model, case.batch, case.precision) for case in cases if not case.compiled}
    assert len(eager) == 18
    assert len({case[:2] for case in eager}) == 6
    assert [case.precision for case in cases if case.compiled] == ["amp"] * 3
    assert [case.precision for case in cases[:9]] == ["amp"] * 9
    assert len({case.name for case in cases}) == 21


def test_measuring_comes_behind_the_cases_in_amp(tmp_path, part):
    rows, check = part("gpu.rows"), part("gpu_check")
    options = SimpleNamespace(out=tmp_path, device="cuda")
    jobs = check.list_jobs(rows.choose_cases(quick=False), options, rows.RowFile(tmp_path, H100), 3)
    names = [job.name for job in jobs]
    assert names[0] == "tests"
    assert names.index("mixtral-tiny-64-amp") < names.index("measure-gpt2-small-8")
    assert names.index("measure-bert-base-32") < names.index("gpt2-small-8-bfloat16")
    assert len(names) == len(set(names)) == 1 + 21 + 3
    assert any("tests/runtime/test_device.py" in word for word in jobs[0].command)


@pytest.fixture
def check(tmp_path, part):
    """A check that has a second, in a folder."""
    module = part("gpu_check")
    (tmp_path / "logs").mkdir()
    options = SimpleNamespace(out=tmp_path, seconds=module.RESERVE_S + module.LEAST_S + 1.0)
    return module.Check(
        options, part("gpu.rows").RowFile(tmp_path, H100), dict(os.environ), module.lock_folder(tmp_path)
    )


def test_who_takes_too_long_is_ended_with_all_it_started(check, part):
    job = part("gpu_check").Job
    slow = job(name="slow", command=("bash", "-c", "sleep 321 & echo $!; echo so far; wait"), timeout_s=0.5)
    check.run([slow, job(name="next", command=("true",), timeout_s=5.0)], 1)
    assert check.failed == {"slow": "it took longer than 0.5 s; so far"}
    child = int((check.out / "logs" / "slow.log").read_text().split()[0])
    assert not is_running(child)


def test_what_runs_when_the_time_is_over_is_left(check, part, monkeypatch):
    job = part("gpu_check").Job
    monkeypatch.setattr(part("gpu_check"), "LEAST_S", 0.5)
    check.deadline = time.monotonic() + 1.0
    begin = time.monotonic()
    jobs = [
        job(name="long", command=("sleep", "60"), timeout_s=50.0, lock="exclusive"),
        job(name="late", command=("true",), timeout_s=1.0),
    ]
    check.run(jobs, 1)
    assert time.monotonic() - begin < 20
    assert (check.failed, check.rows.read("failed", "done")) == ({}, [])


def is_running(pid):
    status = Path(f"/proc/{pid}/status")
    return status.exists() and "State:\tZ" not in status.read_text()


def test_one_check_at_a_time_writes_to_a_folder(tmp_path, part):
    module = part("gpu_check")
    held = module.lock_folder(tmp_path)
    assert module.lock_folder(tmp_path, patience_s=0.1) is None
    os.close(held)
    assert module.lock_folder(tmp_path, patience_s=0.1) is not None


def case_rows(rows, name, own_s, plain_s, *, issue=(0.5, 0.5), predicted_s=None, after_s=None):
    """Rows of a case: of each repeat the steps of two pairs, of which issuing takes shares."""
    model, batch, precision, *rest = name
    job = "-".join(map(str, name))
    for repeat in range(3):
        columns = {
            "own_s": [own_s] * 2,
            "plain_s": [plain_s, plain_s * 1.01],
            "own_issue_s": [issue[0] * own_s] * 2,
            "plain_issue_s": [issue[1] * plain_s] * 2,
        }
        rows.add("repeat", job, repeat=repeat, in_a_row_s=own_s, **columns)
    facts = dict.fromkeys(
        ("seconds_in_a_row", "seconds_waited", "forward_s", "backward_s", "optimizer_s", "device_s", "issue_s"), plain_s
    )
    rows.add(
        "done",
        job,
        model=model,
        batch=batch,
        precision=precision,
        compiled=bool(rest),
        plan_precision=precision,
        predicted_s=predicted_s,
        plain={} if rest else {**facts, "peak_bytes": 10, "reserved_bytes": 20},
        compiled_units=12 if rest else 0,
        left_out={"no triton": 2} if rest else {},
        date="2026-11-28",
    )
    if after_s is not None:
        rows.add("predicted", job, predicted_s=after_s, table="t")


@pytest.fixture
def judged(tmp_path, part):
    rows = part("gpu.rows").RowFile(tmp_path, H100)
    case_rows(rows, ("gpt2-small", 8, "amp"), 0.0402, 0.04, predicted_s=0.05, after_s=0.0410)
    case_rows(rows, ("resnet50", 128, "amp"), 0.0640, 0.06, predicted_s=0.03, after_s=0.0650)
    case_rows(rows, ("gpt2-small", 8, "amp", "compiled"), 0.0297, 0.0285, predicted_s=0.03)
    case_rows(rows, ("gpt2-small", 1, "amp"), 0.022, 0.02, issue=(0.97, 0.95))
    case_rows(rows, ("t5-small", 8, "mixed"), 0.05, 0.04, issue=(0.97, 0.95))
    return rows


def test_the_report_judges_each_case_by_what_bounds_it(judged, part):
    report = part("gpu.report").write_report(judged, "# GPU check", ["tests"], {"x": "out of memory"})
    assert report.missed == ("step of resnet50-128-amp", "issue of t5-small-8-mixed")
    for line in (
        "| gpt2-small-8-amp | device | 40.20 | 40.20 | 1.000 | 0.005 | 1.000 to 1.000 | 1.010 ± 0.000 | 1.03 | yes |",
        "| 29.70 | 28.64 | 1.037 | 0.005 | 1.037 to 1.037 | 1.010 ± 0.000 | 1.05 | yes |",
        "| gpt2-small-1-amp | host | 21.34 | 19.00 | 1.123 | 0.000 | 1.123 to 1.123 | 1.000 ± 0.000 | 1.15 | yes |",
        "| resnet50-128-amp | device | 64.00 | 30.00 | -53.1% | 65.00 | +1.6% |",
        # Of three errors 24 %, 53 % and 1 %, then of 2.0 % and 1.6 %.
        "| before | 24.4% | 20.8% |  |  |",
        "| after | 1.8% | 0.2% | 5% | yes |",
        "- gpt2-small-8-amp-compiled: 12 parts; 2 ran eagerly: no triton",
        "- x: out of memory",
        "before the time was over: tests.",
    ):
        assert line in report.text


def test_without_rows_there_is_a_report(tmp_path, part):
    report = part("gpu.report").write_report(part("gpu.rows").RowFile(tmp_path, H100), "# GPU check", ["tests"], {})
    assert (report.missed, "**Not run** to the end." in report.text) == ((), True)


def test_steps_of_plain_pytorch_have_the_form_of_the_shipped_table(judged, part):
    from meshwright.validation import load_table
    from meshwright.validation.gpu_steps import predict_on_gpu

    made = list(csv.DictReader(io.StringIO(part("gpu.report").steps_table(judged))))
    assert list(made[0]) == list(load_table("steps_cuda")[0])
    assert [row["model"] for row in made] == ["gpt2-small", "resnet50", "gpt2-small", "t5-small"]
    assert predict_on_gpu(made[0]).seconds > 0


def test_plain_pytorch_is_described_by_events_and_the_profiler(tmp_path, part, monkeypatch):
    """With a clock in place of CUDA's events."""
    import torch

    class Event:
        def __init__(self, **_):
            self.at = None

        def record(self):
            self.at = time.perf_counter()

        def elapsed_time(self, other):
            return (other.at - self.at) * 1e3

    monkeypatch.setattr(torch.cuda, "Event", Event)
    for name in ("reset_peak_memory_stats", "max_memory_allocated", "max_memory_reserved"):
        monkeypatch.setattr(torch.cuda, name, lambda: 1)
    module, rows = part("gpu.case"), part("gpu.rows")
    case = rows.Case(model="gpt-tiny", batch=2, precision="mixed")
    step = module.PlainStep(case, module.prepare_case(case, tmp_path, "cpu"), torch.device("cpu"))
    with pytest.warns(UserWarning, match="CUDA is not available"):
        found = module.describe_plain(step, module.Arm(step, torch.device("cpu")))
    report = part("gpu.report")
    assert set(found) == {*report.FACTS, *report.BYTES}
    parts = found["forward_s"] + found["backward_s"] + found["optimizer_s"]
    assert 0.2 * found["seconds_waited"] < parts < 5 * found["seconds_waited"]
    # The masters were updated, and copied back.
    assert step._parameters[0].dtype is torch.bfloat16
    assert all(item.grad is None for item in (*step._parameters, *step._masters))


def test_few_pairs_are_not_judged(tmp_path, part):
    rows = part("gpu.rows").RowFile(tmp_path, {**H100, "pairs": 4})
    case_rows(rows, ("gpt-tiny", 4, "amp"), 0.08, 0.04, issue=(0.97, 0.95), predicted_s=0.05, after_s=0.3)
    report = part("gpu.report").write_report(rows, "# GPU check", [], {})
    assert "**Nothing is judged.**" in report.text
    assert "| gpt-tiny-4-amp | host |" in report.text
    assert report.missed == ()
