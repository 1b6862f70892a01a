"""Emulated clusters (Linux, root): throughput of shaped links beside the file's, and 20 kills of emulated runs.

`links`: two or four ranks over gloo, each rank under its share of a core; bytes of messages per second in one
direction, beside the bandwidth of the file. On shared NICs two ranks of one node send at once, and each has half.
`shares`: four ranks multiply matrices at once, each under its share of a core; the processor time that they get beside
the share, and their work per second of processor time beside that of one rank per core without quotas.
`limits`: throughput of the fastest link that is emulated, and half the round trip of a byte. `kills`: a run is started
and its launcher, a rank or its janitor is killed (-9) at a random moment; counted is what is left 10 s later:
processes, cgroups, links of this namespace. `steps`: models on clusters of four devices are measured (`measure
--emulate`), planned and run by the command line; the predicted step beside the median of the measured ones.
"""

from __future__ import annotations

import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

from harness import Row, make_row, publish_sections

from meshwright.emulation import Emulated, open_lab
from meshwright.emulation.layout import MAX_BYTES_PER_S, rank_shares
from meshwright.emulation.quotas import find_cpu_groups
from meshwright.spec import Cluster, DeviceGroup, Link, load_cluster

EXAMPLES = Path(__file__).parent.parent / "examples" / "emulated"
MBITS = (50, 100, 500, 1000, 2000)
TIMEOUT_S = 120
TARGET, SECONDS = 0.05, 4.0
# Steps: four devices each. Models of two families, which compute for a tenth of a second or more under their quotas.
CLUSTERS = ("two-labs", "shared-nics", "slow-node")
MODELS = {"gpt-tiny": "8", "resnet-tiny": "8"}
LAYOUTS = {
    "DDP": ("--stages", "1", "--zero", "0", "--tensor", "1"),
    "pipeline": ("--stages", "4", "--schedule", "1f1b", "--zero", "0", "--tensor", "1"),
    "ZeRO 3": ("--stages", "1", "--zero", "3", "--tensor", "1"),
    "tensor": ("--stages", "1", "--zero", "0", "--tensor", "2"),
}
NUM_STEPS, STEP_TARGET, COMMAND_S = "12", 0.10, 600


def cluster_of(bytes_per_s: float, devices: int) -> Cluster:
    """Two nodes with one NIC each."""
    shipped = load_cluster(EXAMPLES / "shared-nics.toml")
    nic = Link(latency_s=0.0, bandwidth_bytes_per_s=bytes_per_s)
    group = (DeviceGroup(kind="cpu", count=devices),)
    return replace(shipped, nodes=tuple(replace(node, devices=group, nic=nic) for node in shipped.nodes))


def send_all(num_bytes: int, repeats: int, replies: int) -> None:
    """As a rank: the first half of the ranks send to the second half, which may reply; receivers print the seconds."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=TIMEOUT_S))
    rank, half = dist.get_rank(), dist.get_world_size() // 2
    data = torch.zeros(num_bytes, dtype=torch.uint8)

    def once() -> None:
        dist.send(data, rank + half) if rank < half else dist.recv(data, rank - half)
        if replies:
            dist.recv(data, rank + half) if rank < half else dist.send(data, rank - half)

    # The first messages open the connection and empty the bursts of the queues.
    for _ in range(2):
        once()
    start = time.perf_counter()
    for _ in range(repeats):
        once()
    if rank >= half:
        print(time.perf_counter() - start, flush=True)
    dist.barrier()


def time_messages(cluster: Cluster, num_bytes: int, repeats: int, *, replies: bool = False) -> list[float]:
    """Seconds that each receiver waited for all messages."""
    with (
        tempfile.TemporaryDirectory() as folder,
        open_lab(Emulated(cluster=cluster, devices=tuple(range(cluster.num_ranks))), Path(folder)) as lab,
    ):
        lab.start_clock()
        arguments = [*lab.arguments, "emulation", *map(str, (num_bytes, repeats, int(replies)))]
        outputs = start_ranks(cluster.num_ranks, arguments)
    return [seconds for output in outputs for seconds in output]


def throughput(cluster: Cluster, bytes_per_s: float) -> list[float]:
    """Bytes per second that each receiver got, in messages of about a quarter of a second."""
    message, repeats = max(2**16, int(bytes_per_s / 4)), int(SECONDS * 4)
    return [message * repeats / seconds for seconds in time_messages(cluster, message, repeats)]


def path() -> str:
    """The module path of the ranks, which import this file."""
    return os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])


def measure_links(quick: bool) -> list[Row]:
    """Throughput over one link, and of two ranks that share a NIC."""
    rows = []
    for mbits in MBITS[:2] if quick else MBITS:
        rate = mbits * 1e6 / 8
        rows.append(link_row(f"{mbits} Mbit/s", rate, throughput(cluster_of(rate, 1), rate)))
    for mbits in MBITS[:1] if quick else (100, 1000):
        rate = mbits * 1e6 / 8
        found = throughput(cluster_of(rate, 2), rate / 2)
        rows.append(link_row(f"{mbits} Mbit/s shared, both", rate, [sum(found)]))
        rows.append(link_row(f"{mbits} Mbit/s shared, the slower", rate / 2, [min(found)]))
    return rows


def multiply(seconds: float) -> None:
    """As a rank: multiply matrices, and print products per second and the processor time used per second."""
    import torch

    torch.set_num_threads(1)
    left, right = torch.randn(1024, 128), torch.randn(128, 512)
    count, begin_s, start = 0, 0.0, 0.0
    # The first second does not count: it makes everything resident.
    end = time.perf_counter() + 1 + seconds
    while (now := time.perf_counter()) < end:
        if not start and now > end - seconds:
            count, begin_s, start = 0, time.process_time(), now
        left @ right
        count += 1
    taken = time.perf_counter() - start
    print(count / taken, (time.process_time() - begin_s) / taken, flush=True)


def start_ranks(count: int, arguments: list[str]) -> list[list[float]]:
    """What ranks print, started with these arguments of Python."""
    ranks = [
        subprocess.Popen(
            [sys.executable, *arguments],
            env={**os.environ, "RANK": str(rank), "WORLD_SIZE": str(count), "PYTHONPATH": path()},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(count)
    ]
    return [list(map(float, rank.communicate(timeout=TIMEOUT_S)[0].split())) for rank in ranks]


def measure_shares(quick: bool) -> list[Row]:
    """Processor time and work of ranks under quotas."""
    cluster, seconds = load_cluster(EXAMPLES / "two-labs.toml"), "2" if quick else "6"
    cores = len(os.sched_getaffinity(0))
    share = rank_shares(cluster, cores)[0]
    alone = start_ranks(cores, [__file__, "multiply", seconds])
    with (
        tempfile.TemporaryDirectory() as folder,
        open_lab(Emulated(cluster=cluster, devices=tuple(range(cluster.num_ranks))), Path(folder)) as lab,
    ):
        lab.start_clock()
        shared = start_ranks(cluster.num_ranks, [*lab.arguments, "emulation", "multiply", seconds])
    used = statistics.mean(time_share for _, time_share in shared)
    per_s = [statistics.mean(work / time_share for work, time_share in ranks) for ranks in (shared, alone)]
    return [
        make_row("share of a core that ranks got", used, "cores", baseline=share),
        make_row("work per second of processor time", per_s[0], "products", baseline=per_s[1]),
    ]


def measure_limits(quick: bool) -> list[Row]:
    """Throughput of the fastest link that is emulated, and the latency of a message of one byte."""
    cluster, repeats = cluster_of(MAX_BYTES_PER_S, 1), 200 if quick else 2000
    (seconds,) = time_messages(cluster, 1, repeats, replies=True)
    return [
        make_row("fastest link", throughput(cluster, MAX_BYTES_PER_S)[0], "B/s", baseline=MAX_BYTES_PER_S),
        make_row("latency", seconds / repeats / 2, "s"),
    ]


def link_row(name: str, expected: float, found: list[float]) -> Row:
    """How far off the throughput is, relative to the file's bandwidth."""
    return make_row(
        f"{name}: {found[0] * 8 / 1e6:.4g} Mbit/s",
        abs(found[0] / expected - 1),
        "off",
        baseline=expected,
        target=TARGET,
    )


def left_over(before: set[str]) -> list[str]:
    """Processes of labs, their cgroups, and new links of this namespace."""
    groups = [str(folder) for folder in find_cpu_groups()[0].glob("meshwright-lab-*")]
    links = sorted({path.name for path in Path("/sys/class/net").iterdir()} - before)
    words = ("meshwright.emulation.enter", "emulation/janitor.py")
    processes = [name for pid in Path("/proc").glob("[0-9]*") if any(word in (name := line_of(pid)) for word in words)]
    return groups + links + processes


def line_of(pid: Path) -> str:
    """The command line of a process; empty if it has ended."""
    try:
        return (pid / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


def kill_runs(quick: bool) -> list[Row]:
    """Kill launcher, rank or janitor of a run at a random moment; count what is left."""
    before, draws, left, ended = (
        {path.name for path in Path("/sys/class/net").iterdir()},
        random.Random(0),
        list[str](),
        0,
    )
    victims = ("launcher", "rank", "janitor") * 7
    with tempfile.TemporaryDirectory() as folder:
        labs = str(EXAMPLES / "two-labs.toml")
        plan = ["plan", "gpt-tiny", "--cluster", labs, "--precision", "float32", "--batch", "16", "--stages", "2"]
        meshwright = [sys.executable, "-m", "meshwright"]
        subprocess.run(
            [*meshwright, *plan, "-m", "4", "--schedule", "1f1b", "--out", "plan.json"],
            cwd=folder,
            check=True,
            capture_output=True,
            timeout=300,
        )
        for victim in victims[: 3 if quick else 20]:
            run = subprocess.Popen(
                [*meshwright, "run", "plan.json", "--steps", "1000", "--emulate", labs, "--out", "out"],
                cwd=folder,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            ended += kill_one(run, victim, draws.uniform(0, 15))
            run.wait(60)
            time.sleep(10)
            left += left_over(before)
    return [
        make_row("runs in which the victim was killed", ended, ""),
        make_row("things left", len(left), "", target=0),
    ]


def kill_one(run: subprocess.Popen[bytes], victim: str, after_s: float) -> bool:
    """Wait until the victim exists and some seconds more, then kill it. A run whose janitor died is ended, too."""
    words = {"rank": "meshwright.emulation.enter", "janitor": "emulation/janitor.py"}
    end = time.monotonic() + TIMEOUT_S
    found = [run.pid] if victim == "launcher" else []
    while time.monotonic() < end and run.poll() is None:
        ready = [int(pid.name) for pid in Path("/proc").glob("[0-9]*") if words["rank"] in line_of(pid)]
        if ready:
            time.sleep(after_s)
            if victim != "launcher":
                found = [int(pid.name) for pid in Path("/proc").glob("[0-9]*") if words[victim] in line_of(pid)]
            break
        time.sleep(0.1)
    if not found or run.poll() is not None:
        return False
    os.kill(found[-1], signal.SIGKILL)
    if victim == "janitor":
        run.terminate()
    return True


def compare_steps(quick: bool) -> list[Row]:
    """Predicted and measured seconds of a step of every model, cluster and layout that can be planned."""
    rows, errors, failed = list[Row](), list[float](), 0
    for cluster in CLUSTERS[:1] if quick else CLUSTERS:
        file = str(EXAMPLES / f"{cluster}.toml")
        for model, size in list(MODELS.items())[: 1 if quick else None]:
            with tempfile.TemporaryDirectory() as folder:
                call(folder, "measure", model, "-m", size, "--emulate", file, "--out", "table.parquet")
                for layout, options in LAYOUTS.items():
                    try:
                        predicted_s, measured_s = run_layout(folder, model, size, file, options)
                    except RuntimeError as error:
                        print(f"{model}, {cluster}, {layout}: {error}", file=sys.stderr)
                        failed += 1
                        continue
                    errors.append(abs(predicted_s / measured_s - 1))
                    row = make_row(f"{model}, {cluster}, {layout}: predicted", predicted_s, "s", baseline=measured_s)
                    rows.append(row)
                    print(row, flush=True)
    middle = statistics.median(errors) if errors else float("nan")
    return [
        *rows,
        make_row("runs that failed", failed, "", target=0),
        make_row("error, median", middle, "off", target=STEP_TARGET),
    ]


def run_layout(folder: str, model: str, size: str, cluster: str, options: tuple[str, ...]) -> tuple[float, float]:
    """Predicted and measured seconds of a step of one plan, in microbatches of a table that is in the folder."""
    common = ("--cluster", cluster, "--precision", "float32", "--measurements", "table.parquet")
    call(folder, "plan", model, *common, "--batch", "32", "-m", size, *options, "--out", "plan.json")
    text = call(folder, "run", "plan.json", "--steps", NUM_STEPS, "--emulate", cluster, "--json", "--out", "out")
    found = json.loads(text)
    return found["predicted_step_s"], found["median_step_s"]


def call(folder: str, *arguments: str) -> str:
    """The standard output of a command of meshwright."""
    command = [sys.executable, "-m", "meshwright", *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=COMMAND_S, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(arguments)} failed: {done.stderr[-2000:]}")
    return done.stdout


def main() -> int:
    """Run the sections; 1 if a target was missed."""
    return publish_sections(
        "emulation",
        __doc__ or "",
        {
            "links": measure_links,
            "shares": measure_shares,
            "limits": measure_limits,
            "steps": compare_steps,
            "kills": kill_runs,
        },
    )


if __name__ == "__main__":
    if "RANK" in os.environ and sys.argv[1] == "multiply":
        multiply(float(sys.argv[2]))
    elif "RANK" in os.environ:
        send_all(*map(int, sys.argv[1:]))
    else:
        sys.exit(main())
