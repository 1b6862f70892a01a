"""Facts from torch, determined in separate processes.

Importing torch takes seconds, and a broken driver can hang or kill the importing process. So two child processes run
`meshwright.measurement.machine_table` with a time limit. They meet over a TCP store and all-reduce a tensor with gloo.
The first process prints versions, devices and the result as JSON lines. Lines printed before a failure are kept.
"""

from __future__ import annotations

import importlib.util
import json
import socket
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from meshwright.host.findings import Finding
from meshwright.host.host import Host, Ran
from meshwright.host.reach import LOOPBACK, can_bind, find_address
from meshwright.spec import format_bytes

PROBE_TIMEOUT_S = 40.0
# -P: ignore a json.py in the user's folder.
_PROBE = (sys.executable, "-P", "-W", "ignore", "-m", "meshwright.measurement.machine_table")


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchFacts:
    """Facts that the child processes printed about torch.

    ``build``: versions of torch, CUDA and NCCL. ``devices``: one dict per GPU. ``pairs``: by address, the JSON row on
    the meeting of the two processes (key ``error`` if it failed). ``failure``: why the first process failed, else "".
    """

    installed: bool
    build: dict[str, Any]
    devices: tuple[dict[str, Any], ...]
    pairs: dict[str, dict[str, Any]]
    failure: str = ""


def ask_torch(host: Host, timeout_s: float = PROBE_TIMEOUT_S) -> TorchFacts:
    """Run the two child processes for at most ``timeout_s`` seconds; their errors are reported, not raised."""
    if importlib.util.find_spec("torch") is None:
        return TorchFacts(installed=False, build={}, devices=(), pairs={})
    addresses = [LOOPBACK]
    own = find_address(host.name)
    if own is not None and own != LOOPBACK and can_bind(own) is None:
        addresses.append(own)
    meetings = [f"{address}:{_free_port(address)}" for address in addresses]
    with ThreadPoolExecutor(2) as pool:
        asked = [pool.submit(host.run, (*_PROBE, str(rank), *meetings), timeout_s) for rank in (0, 1)]
        return read_probe(asked[0].result(), timeout_s)


def read_probe(ran: Ran, timeout_s: float) -> TorchFacts:
    """Parse what the first child process printed; unknown lines are ignored. ``timeout_s`` is for the message only."""
    build: dict[str, Any] = {}
    devices: list[dict[str, Any]] = []
    pairs: dict[str, dict[str, Any]] = {}
    for row in _rows(ran.output):
        match row:
            case {"build": dict(found)}:
                build = found
            case {"device": dict(found)}:
                devices.append(found)
            case {"pair": str(address)}:
                pairs[address] = row
            case _:
                pass
    failure = ""
    if ran.code is None:
        failure = f"torch did not answer within {timeout_s:g} s"
    elif ran.code != 0:
        words = [line.strip() for line in ran.error.splitlines() if line.strip()]
        how = f"was killed by signal {-ran.code}" if ran.code < 0 else f"ended with {ran.code}"
        failure = f"the process that imported torch {how}{f': {words[-1][:200]}' if words else ''}"
    return TorchFacts(installed=True, build=build, devices=tuple(devices), pairs=pairs, failure=failure)


def check_torch(host: Host, facts: TorchFacts) -> Iterator[Finding]:
    """Report whether torch can be imported, the CUDA and NCCL of its build, and the GPUs that torch sees."""
    if not facts.installed:
        return
    if facts.failure:
        yield Finding(
            area="versions",
            name="torch",
            found=facts.failure,
            status="problem",
            remedy="Try: python -c 'import torch'. If it fails, install torch again; if it hangs, check the driver.",
            topic="torch-cannot-be-imported",
        )
    cuda, nccl = facts.build.get("cuda"), facts.build.get("nccl")
    if facts.build:
        yield Finding(area="versions", name="CUDA of torch", found=str(cuda or "none (a build for CPUs)"))
        if nccl:
            yield Finding(area="versions", name="NCCL of torch", found=str(nccl))
    for device in facts.devices:
        memory = device.get("memory_bytes")
        size = f", {format_bytes(memory)}" if isinstance(memory, int) else ""
        yield Finding(area="devices", name="GPU of torch", found=f"{device.get('name', 'not known')}{size}")
    hidden = facts.build.get("cuda_error")
    if facts.build and not facts.devices and (hidden or _driver_is_there(host)):
        yield Finding(
            area="devices",
            name="GPU of torch",
            found=f"torch sees none: {hidden}" if hidden else "torch sees none, although a driver is loaded",
            status="problem" if host.environment.get("CUDA_VISIBLE_DEVICES") is None else "note",
            remedy="Install a torch built for the driver's CUDA, and check CUDA_VISIBLE_DEVICES.",
            topic="no-gpu-is-seen",
        )


def check_pair(_host: Host, facts: TorchFacts) -> Iterator[Finding]:
    """Check that two processes met over a TCP store and all-reduced a tensor with gloo."""
    if not facts.installed:
        yield Finding(
            area="reach",
            name="two ranks",
            found="not tried without torch",
            status="note",
            remedy="Run: pip install 'meshwright[torch]'",
        )
    elif not facts.pairs and not facts.failure:
        yield _pair_problem("two ranks", "not tried: this torch has no gloo")
    for address, row in facts.pairs.items():
        name = f"two ranks, {address}"
        if row.get("error"):
            yield _pair_problem(name, str(row["error"])[:200])
        else:
            yield Finding(area="reach", name=name, found="meet and add up (TCP store, gloo)")


def _pair_problem(name: str, found: str) -> Finding:
    return Finding(
        area="reach",
        name=name,
        found=found,
        status="problem",
        remedy="Check the host name, GLOO_SOCKET_IFNAME and firewalls; two ranks on one host must be able to meet.",
        topic="no-ranks-meet",
    )


def _rows(output: str) -> Sequence[dict[str, Any]]:
    rows = []
    for line in output.splitlines():
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(row, dict):
            rows.append(row)
    return rows


def _driver_is_there(host: Host) -> bool:
    return host.exists("/proc/driver/nvidia/version")


def _free_port(address: str) -> int:
    with socket.socket() as server:
        server.bind((address, 0))
        return int(server.getsockname()[1])
