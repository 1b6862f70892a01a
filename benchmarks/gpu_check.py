"""What only a GPU can show: tests, steps against plain PyTorch, predictions before and after measuring; in 8 minutes.

    scripts/gpu_check.sh OUT [--device cpu] [--quick] [--seconds 480] [--only TEXT]

Jobs are processes: the tests marked `gpu`, one per case (`gpu/case.py`), `meshwright measure` per model,
the most important ones first. Their rows go to OUT/rows.jsonl as they come (`gpu/rows.py`), so a second call goes on
where the first one ended; what was taken on another device, torch or source is taken anew. On a host with many cores
jobs make themselves ready while another one is timed, which alone has the device then. OUT also gets logs, plans, the
measured table, the report (DATE-gpu-check.md) and, of plain PyTorch, steps_cuda.csv in the form of the table that
`meshwright validate gpu_steps` reads.

Exit code 0: all was run, and met its target; 1: something failed, missed its target or is left; 2: the arguments are
wrong; 3: torch sees no GPU, nothing was run.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from gpu.report import steps_table, write_report
from gpu.rows import PAIRS, PRECISIONS, QUICK_PAIRS, ROOT, Case, RowFile, choose_cases, source_digest

# Kept from the limit for predictions and the report.
RESERVE_S = 20.0
# With less time left no job is begun.
LEAST_S = 10.0
CASE_S, MEASURE_S, TESTS_S, PREDICT_S = 240.0, 150.0, 240.0, 60.0
# Jobs that prepare themselves beside the timed one; hosts with few cores have no core to spare.
MANY_CORES, READY = 8, 3
ASK_TORCH = """
import json, sys, torch
cuda = torch.cuda.is_available()
print(json.dumps({"torch": torch.__version__, "device": torch.cuda.get_device_name(0) if cuda else None}))
"""
STATE = "name,driver_version,clocks.sm,clocks.max.sm,utilization.gpu,memory.used,temperature.gpu,power.limit"


@dataclass(frozen=True, kw_only=True)
class Job:
    """A process. ``lock``: how it has the device, by flock; a case asks for it itself."""

    name: str
    command: tuple[str, ...]
    timeout_s: float
    lock: str = ""


class Running:
    """A job's process, its log and its deadline."""

    def __init__(self, job: Job, out: Path, environment: dict[str, str], held: int) -> None:
        self.job, self.begin = job, time.monotonic()
        self.log = out / "logs" / f"{job.name}.log"
        lock = ("flock", f"--{job.lock}", str(out / "device.lock")) if job.lock else ()
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                (*lock, *job.command),
                cwd=ROOT,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=(held,),
            )

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.begin

    def reason(self) -> str:
        """The last line of the log that says something."""
        lines = [line.strip() for line in self.log.read_text(errors="replace").splitlines() if line.strip(" =╰─╯│")]
        return lines[-1][:300] if lines else "it printed nothing"

    def kill(self) -> None:
        """End the process and all that it started."""
        for pid in family(self.process.pid):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()


def family(pid: int) -> list[int]:
    """A process and its descendants, as Linux tells them."""
    found = [pid]
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):
            found += [one for child in task.read_text().split() for one in family(int(child))]
    return found


def list_jobs(cases: list[Case], options: argparse.Namespace, rows: RowFile, ready: int) -> list[Job]:
    """All jobs, in the order in which they begin."""
    python, out = sys.executable, options.out
    files = [
        str(path.relative_to(ROOT))
        for path in sorted((ROOT / "tests").rglob("test_*.py"))
        if "pytest.mark.gpu" in path.read_text()
    ]
    shared_out = ("-n", str(ready + 1), "--dist", "worksteal") if ready else ()
    tests = (python, "-m", "pytest", "-q", "-m", "gpu", *shared_out, *files)
    jobs = [Job(name="tests", command=tests, timeout_s=TESTS_S, lock="shared")]
    here = json.dumps(rows.here)
    if options.device == "cpu":  # whose ops are timed in float32
        how = ("--ranks", "1", "--repeats", "3")
    else:
        how = tuple(word for precision in PRECISIONS for word in ("--precision", precision))
    measuring = {}
    for case in cases:
        command = (python, "-m", "gpu.case", str(out), case.name, "--device", options.device, "--here", here)
        jobs.append(Job(name=case.name, command=command, timeout_s=CASE_S))
        if name := case.measuring:
            command = (python, "-m", "meshwright", "measure", case.model, "-m", str(case.batch), *how)
            command += ("--out", str(out / "measurements.json"))
            measuring[name] = Job(name=name, command=command, timeout_s=MEASURE_S, lock="exclusive")
    # Ops are measured behind the cases in amp, which come first.
    num_amp = 1 + sum(case.precision == "amp" for case in cases)
    return [*jobs[:num_amp], *measuring.values(), *jobs[num_amp:]]


class Check:
    """Runs jobs until they are done or the time is over."""

    def __init__(self, options: argparse.Namespace, rows: RowFile, environment: dict[str, str], held: int) -> None:
        self.out, self.rows, self.environment, self.held = options.out, rows, environment, held
        self.begin = time.monotonic()
        self.deadline = self.begin + options.seconds - RESERVE_S
        self.failed: dict[str, str] = {}

    def say(self, text: str) -> None:
        print(f"[{time.monotonic() - self.begin:4.0f} s] {text}", flush=True)

    def run(self, jobs: list[Job], at_once: int) -> None:
        """Run at most ``at_once`` jobs at a time, in their order; kill running ones when the time is over."""
        waiting, running = list(jobs), list[Running]()
        try:
            while (waiting or running) and time.monotonic() < self.deadline:
                for one in list(running):
                    if one.process.poll() is not None or one.seconds > one.job.timeout_s:
                        running.remove(one)
                        self.end(one)
                if waiting and len(running) < at_once and self.deadline - time.monotonic() > LEAST_S:
                    running.append(Running(waiting.pop(0), self.out, self.environment, self.held))
                elif not running:
                    break
                time.sleep(0.05)
        finally:
            for one in running:
                one.kill()

    def end(self, one: Running) -> None:
        """Write down what became of a job."""
        job, code = one.job, one.process.poll()
        if code is None:
            one.kill()
            self.fail(job, f"it took longer than {job.timeout_s:g} s; {one.reason()}")
        elif job.name == "tests" and code in (0, 5):
            summary = one.reason()
            self.rows.add("done", job.name, summary=summary, ran=" passed" in summary, seconds=round(one.seconds, 1))
            self.say(f"{job.name}: {summary}")
        elif code == 0:
            if job.lock:
                self.rows.add("done", job.name, seconds=round(one.seconds, 1))
            self.say(f"{job.name}: done in {one.seconds:.0f} s")
        else:
            self.fail(job, f"ended by signal {-code}; {one.reason()}" if code < 0 else one.reason())

    def fail(self, job: Job, reason: str) -> None:
        self.rows.add("failed", job.name, reason=reason)
        self.failed[job.name] = reason
        self.say(f"{job.name}: FAILED: {reason} (logs/{job.name}.log)")

    def predict(self) -> None:
        """Steps by the measured table."""
        if (self.out / "measurements.json").exists():
            command = (sys.executable, "-m", "gpu.predict", str(self.out), json.dumps(self.rows.here))
            self.deadline = time.monotonic() + PREDICT_S
            self.run([Job(name="predict", command=command, timeout_s=PREDICT_S)], 1)

    def note_state(self) -> None:
        """What the driver says of a GPU now."""
        if self.rows.here["device"] == "cpu":
            return
        with suppress(OSError, subprocess.SubprocessError):
            command = ("nvidia-smi", f"--query-gpu={STATE}", "--format=csv,noheader")
            done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
            when = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
            self.rows.add("state", "", when=when, state=done.stdout.strip())


def ask_torch(device: str, environment: dict[str, str]) -> tuple[dict[str, Any] | None, str]:
    """The device's name and torch's version; None, and why, where there is nothing to check."""
    done = subprocess.run(
        (sys.executable, "-c", ASK_TORCH), env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    if done.returncode:
        return None, f"{sys.executable} cannot import torch: {(done.stderr.strip().splitlines() or ['?'])[-1]}"
    found = json.loads(done.stdout.strip().splitlines()[-1])
    if device == "cpu":
        return {**found, "device": "cpu"}, ""
    return (found if found["device"] else None), "torch sees no CUDA device here"


def lock_folder(out: Path, patience_s: float = 10.0) -> int | None:
    """Hold the folder until this process and all that it started have ended; None if others hold it."""
    held = os.open(out / "check.lock", os.O_RDWR | os.O_CREAT)
    end = time.monotonic() + patience_s
    while True:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return held
        except BlockingIOError:
            if time.monotonic() > end:
                return None
            time.sleep(0.1)


def count_cores() -> int:
    return len(os.sched_getaffinity(0))


def main() -> int:
    options = parse()
    if options.out.exists() and not options.out.is_dir():
        print(f"OUT is {options.out}, a file. Give a folder; it is made if need be.", file=sys.stderr)
        return 2
    environment = {**os.environ}
    folders = [str(ROOT / "src"), str(ROOT / "benchmarks")]
    environment["PYTHONPATH"] = os.pathsep.join([*folders, *filter(None, [os.environ.get("PYTHONPATH", "")])])
    facts, reason = ask_torch(options.device, environment)
    if facts is None:
        print(f"not run: {reason}. Set PYTHON to one whose torch does, or give --device cpu to try the check itself.")
        return 3
    if shutil.which("flock") is None:
        print("There is no flock here, by which jobs take turns. Install util-linux.", file=sys.stderr)
        return 2
    try:
        (options.out / "logs").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        print(f"OUT is {options.out}, which cannot be made ({error.strerror}). Give another.", file=sys.stderr)
        return 2
    held = lock_folder(options.out)
    if held is None:
        print(
            f"Another check writes to {options.out}, or a process that one left. Wait for it, or give another folder."
        )
        return 1
    quick = options.quick or options.device == "cpu"
    here = {**facts, "source": source_digest(), "pairs": QUICK_PAIRS if quick else PAIRS}
    rows = RowFile(options.out, here)
    rows.mend()
    cores = count_cores()
    ready = options.ready if options.ready is not None else READY if cores >= MANY_CORES else 0
    if options.device == "cpu":
        environment["CUDA_VISIBLE_DEVICES"] = ""
    environment["OMP_NUM_THREADS"] = "1" if options.device == "cpu" else str(max(1, cores // (ready + 1)))
    cases = [case for case in choose_cases(quick) if options.only in case.name]
    if not cases:
        print(f"--only {options.only!r} is in no case: {', '.join(case.name for case in choose_cases(quick))}")
        return 2
    jobs = list_jobs(cases, options, rows, ready)
    check = Check(options, rows, environment, held)
    check.say(f"{facts['device']}, torch {facts['torch']}; {len(jobs)} jobs, {ready} made ready beside the one timed")
    check.note_state()
    check.run([job for job in jobs if not rows.is_done(job.name)], 1 + ready)
    check.note_state()
    check.predict()
    return report(check, rows, jobs, options)


def report(check: Check, rows: RowFile, jobs: list[Job], options: argparse.Namespace) -> int:
    """Write the report, print it, and say in the exit code whether all is well."""
    failed = check.failed
    left = [job.name for job in jobs if not rows.is_done(job.name) and job.name not in failed]
    date = datetime.now(UTC).strftime("%Y-%m-%d")
    here = rows.here
    commit = subprocess.run(
        ("git", "rev-parse", "HEAD"), cwd=ROOT, capture_output=True, text=True, check=False
    ).stdout.strip()[:12]
    written = write_report(
        rows,
        f"# GPU check, {date}\n\n`scripts/gpu_check.sh` on {here['device']}, torch {here['torch']}, "
        f"{count_cores()} host cores; commit {commit or 'not known'}, sources {here['source']}. "
        f"{len(jobs) - len(left) - len(failed.keys() - {'predict'})} of {len(jobs)} jobs are done; this call took "
        f"{time.monotonic() - check.begin:.0f} s.",
        left,
        failed,
    )
    place = options.out / f"{date}-gpu-check.md"
    place.write_text(written.text)
    if table := steps_table(rows):
        (options.out / "steps_cuda.csv").write_text(table)
    print(written.text)
    print(f"report: {place}; raw rows: {rows.path}")
    if failed:
        print(f"failed: {', '.join(failed)}")
    if written.missed:
        print(f"missed: {', '.join(written.missed)}")
    if left:
        print(f"left: {', '.join(left)}; call it again to go on")
    return int(bool(failed or written.missed or left))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=lambda text: Path(text).resolve(), metavar="OUT", help="a folder, made if need be")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: try the check itself")
    parser.add_argument("--quick", action="store_true", help="tiny models, few pairs; what cpu always has")
    parser.add_argument("--seconds", type=float, default=480.0, help="the time limit (480)")
    parser.add_argument("--only", default="", metavar="TEXT", help="only cases with this text in their names")
    parser.add_argument("--ready", type=int, help=f"jobs made ready beside the one timed ({READY}; 0 on few cores)")
    return parser.parse_args()


if __name__ == "__main__":
    # Ending this process also ends its child processes.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit("interrupted; call it again to go on")
