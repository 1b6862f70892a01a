"""The server: what it costs, what it serves in time, and what happens under too much load and when processes die.

overhead    CPU time per tiny request of all processes, beside other servers (peers/README.md), and beside one process
            that only reads and writes, with the same libraries (bare_server.py); needs wrk
decisions   decisions of a policy per CPU second, as the scheduler asks for them
sharded     decisions per second of Symphony's scheduler in processes, one shard and two (sharded_decisions.py)
emulated    eight workers that sleep: the rate with 99 % in time, beside the bound, eager batching and the simulator
paces       the same with devices, SLO and rate slowed by a factor: separates the distance to the bound that the
            policy causes from the one that the processors here cause
quiet       the median of an answer where nothing else is asked, and of bare hops through the same number of processes
overload    three times too much: answers in time, how soon others are refused, memory
killed      a worker is killed under load: what is answered wrongly or not at all, and when all is well again

Every rate has the CPU time per request of all processes of the server beside it.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from bare_hops import bare_hops
from harness import Row, make_row, publish_sections
from sharded_decisions import sharded

from meshwright.serving import bound_scale, find_goodput, load_policy, simulate_deployment
from meshwright.serving.load import LoadResult, RequestStream, run_load
from meshwright.serving.policies.pool import RUN
from meshwright.serving.server.live import ARRIVE, EVENT_WIDTH, FREE, UP, Live
from meshwright.spec import Deployment, Latency, Poisson, ServedModel, TensorSpec, write_document
from meshwright.spec.units import Seconds

EXAMPLES = Path(__file__).parents[1] / "examples" / "deployments"
PEERS = Path(__file__).parent / "peers"
# Target of each peer's cost relative to this server (the issue that asked for this server).
PEER_TARGETS = {"fastapi": 5, "litserve": 20, "mlserver": 20, "ray": 100}
BODY = (
    '{"inputs":[{"name":"x","datatype":"FP32","shape":[1,16],"data":[1.5,2.5,3.5,4.5,5,6,7,8,9,10,11,12,13,14,15,16]}]}'
)
WARM_S, START_S = 1.0, 120.0
# A strong batching profile: what does not depend on the batch is a hundred times what a sample takes.
STRONG = Deployment(
    models=(
        ServedModel(
            name="m",
            slo=Seconds(0.12),
            latency=Latency(alpha=Seconds(0.0005), beta=Seconds(0.05), largest=256),
            arrivals=Poisson(rate=1000.0),
            inputs=(TensorSpec(name="x", shape=(16,)),),
            outputs=(TensorSpec(name="y", shape=(10,)),),
        ),
    ),
    devices=8,
)


def free_port(count: int = 1) -> int:
    """The first of ``count`` consecutive free ports."""
    while True:
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
            probes = [stack.enter_context(socket.socket()) for _ in range(count)]
            probes[0].bind(("127.0.0.1", 0))
            first = int(probes[0].getsockname()[1])
            for place, probe in enumerate(probes[1:], 1):
                probe.bind(("127.0.0.1", first + place))
            return first


class Process:
    """A server that runs: its address, and what all of its processes have computed."""

    def __init__(self, process: subprocess.Popen[Any], url: str, admin: str = "") -> None:
        self.process, self.url, self.admin = process, url, admin

    def tree(self) -> list[psutil.Process]:
        top = psutil.Process(self.process.pid)
        return [top, *top.children(recursive=True)]

    def cpu_s(self) -> float:
        total = 0.0
        for one in self.tree():
            with contextlib.suppress(psutil.NoSuchProcess):
                times = one.cpu_times()
                total += times.user + times.system
        return total

    def resident_bytes(self) -> int:
        return sum(one.memory_info().rss for one in self.tree())

    def status(self) -> dict[str, Any]:
        with urllib.request.urlopen(f"{self.admin}/status", timeout=10) as answer:
            return dict(json.load(answer))


@contextlib.contextmanager
def running(command: list[str], url: str, admin: str = "", ask: str = "") -> Iterator[Process]:
    """A server, once it answers; it and all that it started are ended."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
    server = Process(process, url, admin)
    try:
        end = time.monotonic() + START_S
        while not _answers(url + ask):
            if time.monotonic() > end or process.poll() is not None:
                raise SystemExit(f"{' '.join(command)} does not answer")
            time.sleep(0.2)
        yield server
    finally:
        tree = server.tree() if process.poll() is None else []
        process.send_signal(signal.SIGINT)
        _, alive = psutil.wait_procs(tree, timeout=15)
        for one in alive:
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()
        process.wait()


def _answers(url: str) -> bool:
    post = urllib.request.Request(url, data=BODY.encode(), headers={"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(url if "/infer" not in url else post, timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


@contextlib.contextmanager
def serving(deployment: Deployment | Path, *options: str) -> Iterator[Process]:
    """Our server of a deployment."""
    with tempfile.TemporaryDirectory() as folder:
        path = deployment if isinstance(deployment, Path) else Path(folder) / "deployment.json"
        if not isinstance(deployment, Path):
            write_document(deployment, path)
        port, admin = free_port(), free_port()
        command = [sys.executable, "-m", "meshwright", "serve", str(path), "--port", str(port)]
        command += ["--grpc-port", "0", "--admin-port", str(admin), *options]
        with running(command, f"http://127.0.0.1:{port}", f"http://127.0.0.1:{admin}", "/v2/health/ready") as server:
            time.sleep(2.0)  # what is late here has to be measured before it counts
            yield server


# --- overhead -----------------------------------------------------------------------------------


def overhead(quick: bool) -> list[Row]:
    wrk = shutil.which("wrk")
    if wrk is None:
        raise SystemExit("The overhead is measured with wrk, which is not installed (apt-get install wrk).")
    folder = Path(os.environ.get("MESHWRIGHT_PEERS", ""))
    arms = {"meshwright": None, "bare": Path(sys.executable)}
    for name in PEER_TARGETS:
        python = folder / name / "bin" / "python"
        if python.exists():
            arms[name] = python
        else:
            print(f"{name}: no {python}; left out (see benchmarks/peers/README.md)")
    found: dict[str, list[float]] = {name: [] for name in arms}
    rates: dict[str, list[float]] = {name: [] for name in arms}
    for round_ in range(2 if quick else 3):
        for name in list(arms) if round_ % 2 == 0 else reversed(list(arms)):
            per_request, rate = _cost(name, arms[name], wrk, 3 if quick else 6)
            found[name].append(per_request)
            rates[name].append(rate)
            print(f"{name}: {per_request * 1e6:.1f} us of CPU per request at {rate:.0f} per second", flush=True)
    ours = np.array(found["meshwright"])
    typical = float(np.median(ours)) * 1e6
    rows = [make_row("CPU per tiny JSON request, all processes", typical, "us", spread=_spread(ours), target=15.0)]
    for name, factor in {**PEER_TARGETS, "bare": None}.items():
        if name in arms:
            ratios = ours / np.array(found[name])
            rows.append(
                make_row(
                    f"CPU per request over that of {name} ({np.median(rates[name]):.0f} requests/s)",
                    typical,
                    "us",
                    baseline=float(np.median(found[name])) * 1e6,
                    ratio=float(np.median(ratios)),
                    spread=_spread(ratios),
                    target=None if factor is None else 1 / factor,
                )
            )
    return rows


def _cost(name: str, python: Path | None, wrk: str, seconds: int) -> tuple[float, float]:
    """CPU seconds per request, and requests per second, with 256 connections that ask again when they are answered."""
    if python is None:
        context = serving(EXAMPLES / "tiny.toml", "--policy", "eager")
    else:
        port = free_port(3)  # MLServer takes the two behind it for gRPC and metrics
        folder = PEERS.parent if name == "bare" else PEERS
        command = [str(python), str(folder / f"{name}_server.py"), str(port)]
        context = running(command, f"http://127.0.0.1:{port}", ask="/v2/models/tiny/infer")
    with context as server, tempfile.NamedTemporaryFile("w", suffix=".lua", encoding="utf-8") as script:
        script.write(f"wrk.method='POST'\nwrk.body='{BODY}'\nwrk.headers['Content-Type']='application/json'\n")
        script.flush()
        command = [wrk, "-t1", "-c256", "--timeout", "10s", "-s", script.name, f"{server.url}/v2/models/tiny/infer"]
        subprocess.run([*command, "-d", f"{WARM_S:.0f}"], check=True, capture_output=True)
        before = server.cpu_s()
        told = subprocess.run([*command, "-d", str(seconds)], check=True, capture_output=True, text=True).stdout
        time.sleep(0.2)
        spent = server.cpu_s() - before
    refused = re.search(r"Non-2xx or 3xx responses: (\d+)", told)
    done = int(re.search(r"(\d+) requests in", told)[1]) - (int(refused[1]) if refused else 0)  # type: ignore[index]
    return spent / max(done, 1), done / seconds


def _spread(values: np.ndarray) -> float:
    low, middle, high = np.quantile(values, [0.1, 0.5, 0.9])
    return float((high - low) / 2 / middle)


# --- decisions ----------------------------------------------------------------------------------


def decisions(quick: bool) -> list[Row]:
    rows = []
    for policy in ("adaptive", "symphony", "eager"):
        per_second = [_decide(policy, 200_000 if quick else 2_000_000) for _ in range(3)]
        rows.append(
            make_row(
                f"{policy}: 10^6 decisions over those of a CPU second",
                float(np.median(per_second)),
                "/s",
                baseline=1e6,
                ratio=1e6 / float(np.median(per_second)),
                spread=_spread(np.array(per_second)),
                target=1.0,
            )
        )
    return rows


def _decide(policy: str, count: int) -> float:
    """Requests that a policy has decided about per CPU second, in calls of 256 arrivals, with 8 devices at work."""
    largest, ns = 512, 1_000_000
    facts = {
        "latency": [[0, *(2 * ns + 4000 * size for size in range(1, largest + 1))]],
        "slo": [20 * ns],
        "num_devices": 8,
        "capacity": 65_536,
    }
    live = Live(policy, facts)
    up = np.zeros((8, EVENT_WIDTH), np.int64)
    up[:, 0], up[:, 2] = UP, np.arange(8)
    live.take(up)
    now, decided, ends = 0, 0, []
    events = np.zeros((256, EVENT_WIDTH), np.int64)
    events[:, 0] = ARRIVE
    begin = time.process_time()
    for first in range(0, count, 256):
        now += 256 * 1000  # a million requests per second
        events[:, 1], events[:, 3], events[:, 4] = now, np.arange(first, first + 256), now + 20 * ns
        over = [end for end in ends if end[0] <= now]
        ends = [end for end in ends if end[0] > now]
        free = np.array([[FREE, now, device, 0, 0, taken] for _, device, taken in over], np.int64).reshape(
            -1, EVENT_WIDTH
        )
        for rows, _ in live.take(np.concatenate([free, events])):
            for kind, target, _, _, number, when in rows.tolist():
                decided += number
                if kind == RUN:
                    taken = facts["latency"][0][number]
                    ends.append((when + taken, target, taken))
    return decided / (time.process_time() - begin)


# --- emulated -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tried:
    """A rate that was tried on a server, what came of it, and what it cost."""

    rate: float
    loaded: LoadResult
    cpu_s: float

    @property
    def share(self) -> float:
        return self.loaded.total.num_in_time / max(self.loaded.total.num_requests, 1)


def ask(server: Process, rate: float, seconds: float, seed: int, slo: float = float(STRONG.models[0].slo)) -> Tried:
    """Poisson requests for the emulated model, whose deadline is its SLO."""
    stream = RequestStream(model="m", arrivals=Poisson(rate=rate), deadline_s=slo)
    before = server.cpu_s()
    loaded = run_load(server.url, [stream], seconds, seed=seed, ramp_s=1.0)
    tried = Tried(rate, loaded, (server.cpu_s() - before) / max(loaded.total.num_requests, 1))
    print(f"  {rate:.0f}/s: {100 * tried.share:.2f} % in time, {tried.cpu_s * 1e6:.0f} us of CPU each", flush=True)
    return tried


def bound_of(deployment: Deployment) -> float:
    """Requests per second that the devices could serve in time, if they took turns."""
    return 1000.0 * bound_scale(deployment.models, [1000.0], deployment.devices)


def emulated(quick: bool) -> list[Row]:
    rows, best = [], {}
    for policy in ("adaptive", "symphony", "eager"):
        found, more = _emulate(policy, replace(STRONG, policy=policy), quick, None if policy == "eager" else 1 / 0.95)
        rows += more
        best[policy] = found.rate
    eager, own = best["eager"], best["adaptive"]
    name = "eager over adaptive, rates with 99 % in time"
    return [*rows, make_row(name, own, "/s", baseline=eager, ratio=eager / own, target=1 / 1.25)]


def paces(quick: bool) -> list[Row]:
    rows = []
    for pace in (2, 4):
        (model,) = STRONG.models
        slow = replace(_slowed(model, pace), slo=Seconds(pace * model.slo))
        deployment = replace(STRONG, models=(slow,), policy="adaptive")
        rows += _emulate(f"adaptive, {pace} times as slow", deployment, quick, 1 / 0.95)[1]
    return rows


def _slowed(model: ServedModel, factor: float) -> ServedModel:
    """A model whose batches take ``factor`` times as long."""
    line = model.line
    return replace(model, latency=replace(line, alpha=Seconds(factor * line.alpha), beta=Seconds(factor * line.beta)))


def _emulate(name: str, deployment: Deployment, quick: bool, target: float | None) -> tuple[Tried, list[Row]]:
    """The rate that a server answers in time with workers that sleep: beside the bound, and simulated."""
    seconds, bound = 5.0 if quick else 15.0, bound_of(deployment)
    with serving(deployment) as server:
        # How late answers are is learned under load, from hundreds of batches.
        ask(server, bound / 2, 3.0 if quick else 10.0, seed=0, slo=deployment.models[0].slo)
        found, status = _find_live_goodput(server, bound, seconds, quick, deployment.models[0].slo)
    given, known = as_measured(deployment, status), load_policy(deployment.policy)
    late = {key: status[key] for key in ("delay_s", "notice_s", "slack_s", "guard_s", "stretch")}
    rate = 1000 * find_goodput(given, known, seconds, seed=1)[0]
    result = simulate_deployment(given, known, seconds, seed=1, scale=found.rate / 1000)
    print(f"{name}: {found.rate:.0f}/s live, {rate:.0f}/s simulated, with {late}", flush=True)
    live_s = found.loaded.total.row(found.loaded.seconds)["p99_s"]
    simulated_s = result.row()["worst_p99_s"] or 0.0  # none where it is over four SLOs
    return found, [
        make_row(
            f"{name}: bound over the rate with 99 % in time ({found.cpu_s * 1e6:.0f} us of CPU per request)",
            found.rate,
            "/s",
            baseline=bound,
            ratio=bound / found.rate,
            target=target,
        ),
        make_row(f"{name}: this rate simulated, relative error", abs(rate / found.rate - 1), "", target=0.03),
        make_row(
            f"{name}: p99 simulated, error over the larger of 5 % and 1 ms",
            simulated_s,
            "s",
            baseline=live_s,
            ratio=abs(live_s - simulated_s) / max(0.05 * live_s, 1e-3),
            target=1.0,
        ),
    ]


def as_measured(deployment: Deployment, status: dict[str, Any]) -> Deployment:
    """A deployment for the simulator, with what a server has measured of itself while it served it.

    From the end of a batch until the next one begins passes what the scheduler needs to know of the end, and the delay;
    a batch takes what workers took for it, in the median.
    """
    return replace(
        deployment,
        models=tuple(_slowed(model, status["stretch"]) for model in deployment.models),
        delay=Seconds(status["delay_s"] + status["notice_s"]),
        slack=Seconds(status["slack_s"]),
        guard=Seconds(status["guard_s"]),
    )


def _find_live_goodput(
    server: Process, bound: float, seconds: float, quick: bool, slo: float
) -> tuple[Tried, dict[str, Any]]:
    """The highest rate with 99 % in time, by bisection, and the server's own figures then."""
    low, high, best = 0.0, 1.1 * bound, None
    for _ in range(4 if quick else 7):
        tried = ask(server, (low + high) / 2, seconds, seed=1, slo=slo)
        if tried.share >= 0.99:
            low, best = tried.rate, (tried, server.status())
        else:
            high = tried.rate
    if best is None:
        raise SystemExit("Not even a small rate is served in time here.")
    return best


# --- quiet, overload, killed --------------------------------------------------------------------


def quiet(quick: bool) -> list[Row]:
    alone = STRONG.models[0].line.of(1)
    hops = bare_hops(alone, 50 if quick else 300)
    with serving(replace(STRONG, policy="adaptive")) as server:
        loaded = ask(server, 10.0, 5.0 if quick else 30.0, seed=2).loaded
    beyond = loaded.total.row(loaded.seconds)["p50_s"] - alone
    return [
        make_row("median of a quiet server less a batch of one", beyond, "s", target=0.001),
        make_row("median through three processes that do nothing else, less the same", float(np.median(hops)), "s"),
    ]


def overload(quick: bool) -> list[Row]:
    """Two devices, so that three times too much can be sent and refused on two cores."""
    few = replace(STRONG, devices=2, policy="adaptive")
    bound, seconds = bound_of(few), 10.0 if quick else 30.0
    with serving(few) as server:
        ask(server, bound / 2, 3.0 if quick else 10.0, seed=0)
        best = max(ask(server, share * bound, seconds, seed=3).loaded.goodput_per_s for share in (0.9, 0.95, 1.0))
        ask(server, 3 * bound, seconds, seed=3)
        memory = server.resident_bytes()
        flood = ask(server, 3 * bound, seconds if quick else 600.0, seed=3)
        grown = server.resident_bytes() / memory - 1
    row = flood.loaded.total.row(flood.loaded.seconds)
    print(json.dumps(row))
    goodput, cpu = flood.loaded.goodput_per_s, f"{flood.cpu_s * 1e6:.0f} us of CPU per request"
    return [
        make_row(
            f"peak over answers in time at three times the bound ({cpu})",
            goodput,
            "/s",
            baseline=best,
            ratio=best / goodput,
            target=1 / 0.95,
        ),
        make_row("99 % of refusals were answered within", row["rejected_p99_s"], "s", target=0.005),
        make_row("growth of all processes' memory, of what it was", grown, "", target=0.05),
    ]


# Kills a worker every two seconds, each time the next one.
KILLER = """
import json, os, signal, sys, time, urllib.request
for turn in range(int(sys.argv[2])):
    time.sleep(2)
    found = json.load(urllib.request.urlopen(sys.argv[1] + "/status"))["processes"]
    os.kill(next(one["pid"] for one in found if one["name"] == f"worker-{turn % 8}"), signal.SIGKILL)
"""


def killed(quick: bool) -> list[Row]:
    turns = 3 if quick else 10
    with serving(replace(STRONG, policy="adaptive")) as server, contextlib.ExitStack() as stack:
        killer = subprocess.Popen([sys.executable, "-c", KILLER, server.admin, str(turns)])
        stack.callback(killer.wait, 60)
        loaded = ask(server, bound_of(STRONG) / 2, 2.0 * turns + 3.0, seed=4).loaded
    row = loaded.total.row(loaded.seconds)
    print(json.dumps(row))
    without = float(row["num_unanswered"] + row["num_failed"])
    return [
        make_row(f"wrong answers, {turns} workers killed", float(loaded.num_wrong), "", target=0.0),
        make_row(f"requests without an answer, {turns} workers killed", without, "", target=0.0),
        make_row("answered in time meanwhile", 100 * row["in_time_share"], "%"),
    ]


SECTIONS = {
    "overhead": overhead,
    "decisions": decisions,
    "sharded": sharded,
    "emulated": emulated,
    "paces": paces,
    "quiet": quiet,
    "overload": overload,
    "killed": killed,
}


if __name__ == "__main__":
    sys.exit(publish_sections("serving_live", __doc__, SECTIONS))
