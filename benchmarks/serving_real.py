"""Real models on one core: the rate that this server answers in time beside other servers, and beside the simulator.

resnet18     ResNet-18 (11.7 million parameters), an image of 3 x 224 x 224 in each request
bert-small   BERT of 4 blocks, 512 wide, 8 heads (29 million parameters), 128 tokens in each request

Every server loads one exported program with the same weights, and runs it with one thread on a core that nothing else
has; the load, and all other processes of a server, have another one. The SLO is ten times what one sample takes there.
Requests come at moments of a Poisson process, the same ones for every server. A server's goodput is what it answers
within the SLO per second at the highest rate at which that is 99 %, found by halving an interval below what the core
could compute at most; a round asks each server, in turns from both ends, with a seed of its own.

The other servers (peers/README.md) batch as their documentation says. Sizes of batches and times of waiting are chosen
from `SETTINGS` for each server and model, our policy from `POLICIES`, all by goodput with a seed that is not scored.
Tensors are binary where a server takes them so over HTTP (ours, Ray Serve), and base64 in JSON elsewhere (LitServe,
MLServer).

The simulator gets the latencies that the server's worker measured when it started, the lateness that the server tells
after its best run, and the same requests.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from harness import Row, make_row, parse_options, publish
from serving_live import PEERS, Process, as_measured, free_port, running, serving
from torch import nn

from meshwright.serving import find_goodput, load_policy, simulate_deployment
from meshwright.serving.datatypes import NUMPY_TYPES
from meshwright.serving.load import LoadResult, ModelSignature, RequestStream, decode_outputs, draw_inputs, read_target
from meshwright.serving.load.bodies import RequestBytes, build_requests
from meshwright.serving.load.load_run import run_here
from meshwright.serving.load.responses import TensorMetadata, read_answer
from meshwright.serving.load.result import LoadJob, sum_up
from meshwright.serving.load.target import draw_moments, find_address
from meshwright.spec import Deployment, Latency, Poisson, ServedModel, TensorSpec
from meshwright.spec.units import Seconds
from meshwright.zoo import BERTShape, ResNetShape
from meshwright.zoo.references import seeded

OURS = "meshwright"
# Where a peer says that it is there, and how it takes tensors.
PEERS_READY = {"litserve": "/health", "mlserver": "/v2/health/ready", "ray": "/-/healthz"}
TAKES_BINARY = (OURS, "ray")
# Largest batch, and what it may wait for others, of the time that one sample takes.
SETTINGS = ((1, 0.0), (4, 0.05), (8, 0.05), (8, 0.5))
POLICIES = ("adaptive", "eager")
QUICK_SETTINGS = ((1, 0.0), (8, 0.05))
IN_TIME, RAMP_S, NO_ID = 0.99, 1.0, "0000000000"
TUNING_SEED = 1000


class Paired(nn.Module):
    """BERT for its second task alone: do the two segments belong together?"""

    def __init__(self, bert: nn.Module) -> None:
        super().__init__()
        self.bert = bert

    def forward(self, tokens_BT: torch.Tensor) -> torch.Tensor:
        return self.bert(tokens_BT, torch.zeros_like(tokens_BT), torch.zeros_like(tokens_BT[:, :1]))[1]


def resnet18() -> tuple[nn.Module, TensorSpec]:
    shape = ResNetShape(
        source="He et al. 2015, table 1",
        block="basic",
        blocks_per_stage=(2, 2, 2, 2),
        num_classes=1000,
        batch_size=1,
        image_size=224,
    )
    return shape.build(), TensorSpec(name="x", datatype="FP32", shape=(3, 224, 224))


def bert_small() -> tuple[nn.Module, TensorSpec]:
    shape = BERTShape(
        source="Turc et al. 2019, BERT-small",
        num_layers=4,
        width=512,
        num_heads=8,
        vocabulary=30_522,
        context=512,
        batch_size=1,
        sequence_length=128,
    )
    return Paired(shape.build()), TensorSpec(name="x", datatype="INT64", shape=(128,))


MODELS = {"resnet18": resnet18, "bert-small": bert_small}


@dataclass(frozen=True)
class Effort:
    """How long each rate is tried, how often an interval is halved, and how often all is done."""

    seconds: float
    halvings: int
    rounds: int
    settings: tuple[tuple[int, float], ...]
    tuning_seconds: float
    tuning_halvings: int


FULL = Effort(30.0, 6, 3, SETTINGS, 12.0, 5)
QUICK = Effort(6.0, 4, 1, QUICK_SETTINGS, 4.0, 3)


@dataclass(frozen=True)
class Case:
    """A model as all servers have it, with its answers to each body, the SLO, and what the core computes at most."""

    name: str
    path: Path
    spec: TensorSpec
    core: int
    facts: ModelSignature
    expected: list[np.ndarray]
    alone_s: float
    most_per_s: float

    @property
    def slo_s(self) -> float:
        return round(10 * self.alone_s, 3)

    def deployment(self, latency: Latency | None = None) -> Deployment:
        """What our server is given; for the simulator, with a latency."""
        model = ServedModel(
            name="m", model=str(self.path), slo=Seconds(self.slo_s), inputs=(self.spec,), latency=latency
        )
        return Deployment(models=(model,), devices=1)


def make_case(name: str, folder: Path, core: int) -> Case:
    """Export the model, and time it where servers will run it."""
    with seeded(0):
        module, spec = MODELS[name]()
    tensor = TensorMetadata(name="x", datatype=spec.datatype, shape=(-1, *spec.shape))
    facts = ModelSignature(name="m", inputs=(tensor,), outputs=())
    bodies = [draw_inputs(facts, 1, number=number)["x"] for number in range(8)]
    module.eval()
    with torch.inference_mode():
        expected = [module(torch.from_numpy(body)).numpy() for body in bodies]
    path = folder / f"{name}.pt2"
    example = torch.from_numpy(np.concatenate(bodies[:2]))
    torch.export.save(
        torch.export.export(module, (example,), dynamic_shapes=({0: torch.export.Dim("batch", max=1024)},)), path
    )
    timed = time_batches(path, spec, core)
    found = ", ".join(f"{size} take {1e3 * seconds:.1f} ms" for size, seconds in timed)
    print(f"{name}: batches of {found}", flush=True)
    most_per_s = max(size / seconds for size, seconds in timed)
    return Case(name, path, spec, core, facts, expected, timed[0][1], most_per_s)


def time_batches(path: Path, spec: TensorSpec, core: int) -> list[tuple[int, float]]:
    """Sizes of batches, and what they take on the core."""
    told = {"path": str(path), "core": core, "dtype": NUMPY_TYPES[spec.datatype].__name__, "shape": spec.shape}
    command = [sys.executable, str(PEERS / "network.py"), json.dumps(told)]
    ran = subprocess.run(command, check=True, capture_output=True, text=True)
    return [(size, seconds) for size, seconds in json.loads(ran.stdout)]


# --- servers ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Setting:
    """A server, and how it batches: ours by a policy."""

    server: str
    policy: str = ""
    batch: int = 0
    wait_s: float = 0.0

    def __str__(self) -> str:
        return f"{self.server}, {self.policy or f'{self.batch} at most, {1e3 * self.wait_s:.0f} ms'}"


@contextlib.contextmanager
def started(setting: Setting, case: Case, log: Path) -> Iterator[Process]:
    """A server that has the model, and has answered every body once as the model does."""
    if setting.server == OURS:
        with (
            pinned_worker(case.core),
            serving(case.deployment(), "--policy", setting.policy, "--log", str(log)) as server,
        ):
            check_answers(server, setting, case)
            yield server
        return
    port = free_port(3)
    told = {"port": port, "path": str(case.path), "core": case.core, "shape": case.spec.shape, "slo_s": case.slo_s}
    told |= {"batch": setting.batch, "wait_s": setting.wait_s, "dtype": NUMPY_TYPES[case.spec.datatype].__name__}
    folder = Path(os.environ["MESHWRIGHT_PEERS"]) / setting.server / "bin" / "python"
    command = [str(folder), str(PEERS / f"{setting.server}_real.py"), json.dumps(told)]
    with running(command, f"http://127.0.0.1:{port}", ask=PEERS_READY[setting.server]) as server:
        check_answers(server, setting, case)
        yield server


@contextlib.contextmanager
def pinned_worker(core: int) -> Iterator[None]:
    """Give our server's worker the core before it has loaded anything."""
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(0.02):
            for process in psutil.Process().children(recursive=True):
                with contextlib.suppress(psutil.Error):
                    if "meshwright.serving.server.worker" in process.cmdline():
                        process.cpu_affinity([core])
                        return

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield
    finally:
        ended.set()
        watcher.join()


def bodies_for(server: Process, setting: Setting, case: Case) -> list[RequestBytes]:
    """The requests, as this server takes them."""
    target = read_target(server.url)
    if setting.server in TAKES_BINARY:
        return build_requests(target, [case.facts], [{"timeout": round(case.slo_s * 1e6)}], binary=True)[0]
    made = []
    for number in range(len(case.expected)):
        sample = draw_inputs(case.facts, 1, number=number)["x"].tobytes()
        tensor: dict[str, Any] = {"name": "x", "shape": [1], "datatype": "BYTES"}
        tensor |= {"parameters": {"content_type": "base64"}, "data": [base64.b64encode(sample).decode()]}
        body = json.dumps({"id": NO_ID, "inputs": [tensor]}, separators=(",", ":")).encode()
        head = f"POST /v2/models/m/infer HTTP/1.1\r\nHost: {target.authority}\r\nContent-Type: application/json\r\n"
        head += f"Content-Length: {len(body)}\r\n\r\n"
        made.append(RequestBytes(bytearray(head.encode() + body), len(head) + body.index(NO_ID.encode())))
    return made


def check_answers(server: Process, setting: Setting, case: Case) -> None:
    """Ask every body once. Raises SystemExit for an answer that is not the model's."""
    for body, expected in zip(bodies_for(server, setting, case), case.expected, strict=True):
        found = _ask_once(server, bytes(body.content))
        if not np.allclose(found, expected, rtol=1e-3, atol=1e-3):
            raise SystemExit(f"{setting} gives other answers than {case.name} itself.")


def _ask_once(server: Process, request: bytes) -> np.ndarray:
    """The output of an answer; asks again while a server that has started still has to load the model."""
    _, address = find_address(read_target(server.url))
    end = time.monotonic() + 60
    while time.monotonic() < end:
        with socket.create_connection(address, timeout=30) as connection:
            connection.sendall(request)
            data, answer = b"", None
            while answer is None and (part := connection.recv(2**16)):
                data += part
                answer = read_answer(data)
        if answer is not None and answer.head.status == 200:
            output = json.loads(answer.text)["outputs"][0]
            if "data" in output:
                return np.frombuffer(base64.b64decode(output["data"][0]), np.float32)[None]
            return decode_outputs(answer)[output["name"]]
        time.sleep(0.2)
    raise SystemExit(f"A server at {server.url} does not answer the model's requests: {answer}.")


# --- rates --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Best:
    """The highest rate that was answered in time, and how; ``status`` is what our server told then."""

    rate: float
    loaded: LoadResult | None = None
    status: dict[str, Any] | None = None

    @property
    def goodput(self) -> float:
        return 0.0 if self.loaded is None else self.loaded.goodput_per_s


def find_best(setting: Setting, case: Case, seconds: float, halvings: int, seed: int, log: Path) -> Best:
    """Start a server, and halve the interval of rates below what its core computes at most."""
    with started(setting, case, log) as server:
        low, high, best = 0.0, 1.1 * case.most_per_s, Best(0.0)
        for _ in range(halvings):
            rate = (low + high) / 2
            loaded = ask(server, setting, case, rate, seconds, seed)
            if (loaded.total.in_time_share or 0.0) >= IN_TIME:
                low, best = rate, Best(rate, loaded, server.status() if setting.server == OURS else None)
            else:
                high = rate
    print(f"{case.name}, {setting}, seed {seed}: {best.goodput:.2f}/s in time", flush=True)
    return best


def ask(server: Process, setting: Setting, case: Case, rate: float, seconds: float, seed: int) -> LoadResult:
    """Poisson requests, in the form that the server takes, at the moments of the simulator's."""
    streams = [RequestStream(model="m", arrivals=Poisson(rate=rate), deadline_s=case.slo_s)]
    family, address = find_address(read_target(server.url))
    moments, whose = draw_moments(streams, seconds, seed=seed, scale=1.0, ramp_s=RAMP_S)
    job = LoadJob(
        family=family,
        address=address,
        moments=moments,
        whose=whose,
        names=["m"],
        requests=[bodies_for(server, setting, case)],
        first=0,
        step=1,
        connections=2048,
        at_first=16,
        grace_s=10 * case.slo_s,
        check=None,
    )
    began = time.time()
    loaded = sum_up(streams, moments, whose, run_here(job, None), ramp_s=RAMP_S, seconds=seconds, began=began)
    if loaded.num_wrong:
        raise SystemExit(f"{setting} gave {loaded.num_wrong} answers to other requests.")
    row = loaded.row()
    shown = ", ".join(f"{name[:-2]} {1e3 * (row[name] or 0):.0f} ms" for name in ("p50_s", "p99_s", "lateness_p99_s"))
    print(f"  {setting}: {rate:.2f}/s, {100 * row['in_time_share']:.2f} % in time, {shown}", flush=True)
    return loaded


# --- rows ---------------------------------------------------------------------------------------


def rows_of(name: str, effort: Effort, folder: Path, core: int) -> list[Row]:
    """Everything about one model."""
    case, log = make_case(name, folder, core), folder / "decisions.log"
    own = tune([Setting(OURS, policy) for policy in POLICIES], case, effort, log)
    grids = [
        [Setting(peer, "", size, wait * case.alone_s) for size, wait in effort.settings]
        for peer in PEERS_READY
        if has_peer(peer)
    ]
    chosen = [tune(grid, case, effort, log) for grid in grids]
    settings = [own, *chosen]
    found: dict[Setting, list[Best]] = {setting: [] for setting in settings}
    predicted = []
    for seed in range(1, effort.rounds + 1):
        for setting in settings if seed % 2 else reversed(settings):
            best = find_best(setting, case, effort.seconds, effort.halvings, seed, log)
            found[setting].append(best)
            if setting is own and best.loaded is not None:
                predicted.append(predict(case, best, effort.seconds, seed, log))
    ours = np.array([best.goodput for best in found[own]])
    typical = f"{name}, {own} (one takes {1e3 * case.alone_s:.1f} ms, SLO {1e3 * case.slo_s:.0f} ms)"
    rows = [make_row(f"{typical}: answers in time per second", np.median(ours), "/s", spread=_spread(ours))]
    theirs = {setting: np.array([best.goodput for best in found[setting]]) for setting in chosen}
    for setting, goodputs in theirs.items():
        rows.append(_compared(f"{name}: {setting}, over ours", ours, goodputs))
    if theirs:
        best_of_all = np.max(list(theirs.values()), axis=0)
        rows.append(_compared(f"{name}: the best of these in each round, over ours", ours, best_of_all, target=1.0))
    if predicted:
        rows += _prediction_rows(name, predicted)
    after_s = time_batches(case.path, case.spec, core)[0][1]
    quietness = f"{name}: one sample after all this, over before (1 on a quiet machine)"
    return [*rows, make_row(quietness, after_s, "s", baseline=case.alone_s, ratio=after_s / case.alone_s)]


def has_peer(name: str) -> bool:
    """Is there an environment for it?"""
    python = Path(os.environ.get("MESHWRIGHT_PEERS", "")) / name / "bin" / "python"
    if not python.exists():
        print(f"{name}: no {python}; left out (see benchmarks/peers/README.md)")
    return python.exists()


def tune(grid: list[Setting], case: Case, effort: Effort, log: Path) -> Setting:
    """The setting with the highest goodput; among several, the one with the lowest p99 there."""
    scores = {}
    for setting in grid:
        best = find_best(setting, case, effort.tuning_seconds, effort.tuning_halvings, TUNING_SEED, log)
        scores[setting] = (best.rate, -(best.loaded.row()["p99_s"] or 0.0) if best.loaded else 0.0)
    return max(scores, key=lambda setting: scores[setting])


@dataclass(frozen=True)
class Predicted:
    """The simulator's figures for our server's best run, beside its own; ``rate`` is the simulated highest."""

    rate: float
    goodput: float
    p99_s: float
    live: Best


def predict(case: Case, best: Best, seconds: float, seed: int, log: Path) -> Predicted:
    """Simulate what our server was asked, with what it has measured."""
    assert best.status is not None
    with log.open("rb") as file:
        table = json.loads(file.readline())["facts"]["latency"][0]
    latency = Latency.through((size, ns / 1e9) for size, ns in enumerate(table) if size)
    deployment = as_measured(replace(case.deployment(latency), policy=best.status["policy"]), best.status)
    policy = load_policy(deployment.policy)
    (model,) = deployment.models
    asked = replace(deployment, models=(replace(model, arrivals=Poisson(rate=best.rate)),))
    result = simulate_deployment(asked, policy, seconds, seed=seed, warm_up_s=RAMP_S)
    scale, _ = find_goodput(asked, policy, seconds, seed=seed, in_time=IN_TIME, warm_up_s=RAMP_S)
    p99_s = result.row()["worst_p99_s"] or 0.0
    late = {name: getattr(deployment, name) for name in ("delay", "slack", "guard")}
    told = ", ".join(f"{what} {1e3 * one:.2f} ms" for what, one in late.items())
    told = f"at most {scale * best.rate:.2f}/s; {told}"
    print(f"  simulated: {result.goodput_per_s:.2f}/s, p99 {1e3 * p99_s:.0f} ms, {told}", flush=True)
    return Predicted(scale * best.rate, result.goodput_per_s, p99_s, best)


def _prediction_rows(name: str, predicted: list[Predicted]) -> list[Row]:
    """Medians over the rounds of what is off; the value is the simulator's, the baseline ours."""
    rows = []
    for what, target, simulated, live in (
        (
            "answers in time, simulated, relative error",
            0.05,
            [p.goodput for p in predicted],
            _live(predicted, "goodput_per_s"),
        ),
        ("p99 simulated, relative error", 0.15, [p.p99_s for p in predicted], _live(predicted, "p99_s")),
        ("highest rate simulated, relative error", 0.05, [p.rate for p in predicted], [p.live.rate for p in predicted]),
    ):
        errors = np.abs(np.array(simulated) / np.array(live) - 1)
        rows.append(
            make_row(
                f"{name}: {what}",
                np.median(simulated),
                "s" if "p99" in what else "/s",
                baseline=np.median(live),
                ratio=np.median(errors),
                target=target,
            )
        )
    return rows


def _live(predicted: list[Predicted], figure: str) -> list[float]:
    return [p.live.loaded.row()[figure] for p in predicted if p.live.loaded is not None]


def _compared(name: str, ours: np.ndarray, theirs: np.ndarray, target: float | None = None) -> Row:
    ratios = theirs / np.maximum(ours, 1e-9)
    return make_row(
        name,
        np.median(ours),
        "/s",
        baseline=np.median(theirs),
        ratio=np.median(ratios),
        spread=_spread(ratios),
        target=target,
    )


def _spread(values: np.ndarray) -> float:
    low, middle, high = np.quantile(values, [0.1, 0.5, 0.9])
    return float((high - low) / 2 / middle) if middle else 0.0


def main() -> int:
    options = parse_options(__doc__, tuple(MODELS))
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        raise SystemExit("Real models are served on a core of their own; this process has one core, and needs two.")
    os.sched_setaffinity(0, cores[:1])  # child processes inherit it, except the one that runs the model
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    effort, rows = QUICK if options.quick else FULL, []
    with tempfile.TemporaryDirectory() as folder:
        for name in options.only or MODELS:
            rows += rows_of(name, effort, Path(folder), cores[-1])
    label = "-".join(options.only) if options.only else ""
    return publish("serving_real", rows, options, label=label)


if __name__ == "__main__":
    sys.exit(main())
