"""The GPUs that the driver shows, their links and states, and the shipped descriptions of known GPUs.

GPUs and links come from ``nvidia-smi``: a table of ``--query-gpu`` (CSV) and the matrix of ``topo -m``, whose cell for
two devices is ``NV#`` (# is the number of NVLinks), ``PIX``, ``PXB``, ``PHB``, ``NODE`` or ``SYS`` (PCIe, from near to
far), or ``X`` on the diagonal. ``nvidia-smi topo -m`` prints a legend below the matrix.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import resources
from itertools import combinations

from meshwright.host.findings import Finding
from meshwright.host.host import NOT_FOUND, Host, Ran
from meshwright.spec import Cluster, DeviceKind, DocumentError, Node, format_bytes, format_count, load_cluster
from meshwright.spec.codec import decode
from meshwright.spec.parsing import read_data


# Names are those of the driver (``NVIDIA H100 80GB HBM3``).
@dataclass(frozen=True, slots=True, kw_only=True)
class KnownGpu:
    """One entry of ``known_gpus.toml``: a pattern of GPU names, a shipped device kind, and figures that differ from it.

    ``pattern`` is a regular expression for the driver's name. A figure that is empty or None is taken from the shipped
    ``kind``. ``source`` names the datasheet.
    """

    pattern: str
    kind: str
    source: str
    name: str = ""
    memory_bandwidth_bytes_per_s: float | None = None
    nvlink_bytes_per_s: float | None = None
    peak_flops_per_s: dict[str, float] = field(default_factory=dict)

    def describe(self, memory_bytes: int) -> DeviceKind:
        """Return the GPU as a device kind; ``memory_bytes`` is the memory that the driver reports."""
        shipped = self.shipped().device_kinds[0]
        figures = self.memory_bandwidth_bytes_per_s, self.peak_flops_per_s
        return replace(
            shipped,
            name=self.name or shipped.name,
            memory_bytes=memory_bytes,
            memory_bandwidth_bytes_per_s=figures[0] or shipped.memory_bandwidth_bytes_per_s,
            peak_flops_per_s=dict(figures[1] or shipped.peak_flops_per_s),
            source=self.source if any(figures) else shipped.source,
        )

    def shipped(self) -> Cluster:
        """Return the shipped cluster of this device kind: the kind and one node with it."""
        return load_cluster(self.kind)

    def shipped_node(self) -> Node:
        """Return the node of the shipped cluster, for the figures that this machine does not report."""
        return self.shipped().nodes[0]


def know_gpu(name: str) -> KnownGpu | None:
    """Return the entry of ``known_gpus.toml`` that matches the driver's name of a GPU; None if no entry matches."""
    plain = re.sub(r"^(NVIDIA|Tesla)\s+", "", name.strip())
    return next((row for row in known_gpus() if re.fullmatch(row.pattern, plain, re.IGNORECASE)), None)


def name_gpu(name: str) -> str:
    """Return the name of a GPU's device kind, as clusters and measurement tables use it, from the driver's name.

    For a GPU that is not in ``known_gpus.toml`` it is the driver's name with hyphens and without "NVIDIA".
    """
    known = know_gpu(name)
    if known is None:
        return name.removeprefix("NVIDIA ").replace(" ", "-")
    return known.name or known.shipped().device_kinds[0].name


@cache
def known_gpus() -> tuple[KnownGpu, ...]:
    """Return all entries of ``known_gpus.toml``. Raises DocumentError if the file is damaged."""
    with resources.as_file(resources.files("meshwright.host") / "known_gpus.toml") as path:
        data = read_data(path)
    if not isinstance(data, dict) or set(data) != {"gpus"}:
        raise DocumentError("known_gpus.toml: expected the one key 'gpus'. Install Meshwright again.")
    return decode(tuple[KnownGpu, ...], data["gpus"], "known_gpus.toml")


_QUERY_TIMEOUT_S = 8.0
_FIELDS = ("index", "name", "memory.total", "driver_version", "pcie.link.gen.max", "pcie.link.width.max", "uuid")
_QUERY = ("nvidia-smi", f"--query-gpu={','.join(_FIELDS)}", "--format=csv,noheader,nounits")
_STATE_FIELDS = ("uuid", "clocks.sm", "clocks.max.sm", "utilization.gpu", "memory.used")
_STATE = ("nvidia-smi", f"--query-gpu={','.join(_STATE_FIELDS)}", "--format=csv,noheader,nounits")
# The driver reports the second before; an unused GPU has 0, one that has just been opened a few percent.
_IDLE_SHARE = 0.05
_TOPOLOGY = ("nvidia-smi", "topo", "-m")
# PCIe 3.0 moves 8 GT/s per lane with 128b/130b coding, about 1 GB/s per direction; each later generation twice that
# (PCI-SIG, PCI Express base specifications 3.0 to 6.0). Datasheets round the same way.
_PCIE_3_LANE_BYTES_PER_S = 1e9
_DEVICE = re.compile(r"(GPU|NIC)\d+|mlx5_\w+")
_ESCAPE = re.compile(r"\x1b\[[0-9;]*m")


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One GPU as the driver shows it; ``pcie_bytes_per_s`` (per direction) is None if it is not reported."""

    index: int
    name: str
    memory_bytes: int
    driver: str = ""
    pcie_bytes_per_s: float | None = None
    uuid: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceTopology:
    """The links between GPUs and network cards, as ``nvidia-smi topo -m`` prints them.

    ``joints`` maps a pair of ``names`` (in the order of the matrix) to its cell: ``NV4``, ``PIX`` and so on.
    """

    names: tuple[str, ...] = ()
    joints: dict[tuple[str, str], str] = field(default_factory=dict)

    @property
    def gpu_joints(self) -> dict[tuple[str, str], str]:
        """The entries of ``joints`` whose two devices are GPUs."""
        return {pair: joint for pair, joint in self.joints.items() if all(name.startswith("GPU") for name in pair)}

    def fewest_nvlinks(self, names: tuple[str, ...] | None = None) -> int:
        """Return the smallest number of NVLinks between two GPUs, of ``names`` only if given.

        0 if some pair has no NVLink, or with fewer than two GPUs.
        """
        chosen = [
            joint for pair, joint in self.gpu_joints.items() if names is None or all(name in names for name in pair)
        ]
        return min((int(joint[2:]) if _is_nvlink(joint) else 0 for joint in chosen), default=0)


def find_gpus(host: Host) -> tuple[Gpu, ...]:
    """Return the GPUs that the driver shows; empty without a driver."""
    return parse_gpus(host.run(_QUERY, _QUERY_TIMEOUT_S).output)


def find_topology(host: Host) -> DeviceTopology:
    """Return the links of the GPUs; empty without a driver."""
    return parse_topology(host.run(_TOPOLOGY, _QUERY_TIMEOUT_S).output)


def parse_gpus(text: str) -> tuple[Gpu, ...]:
    """Parse the CSV of ``nvidia-smi --query-gpu``; other lines (warnings, errors) are ignored."""
    gpus = []
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) != len(_FIELDS) or not cells[0].isdigit() or not cells[2].isdigit():
            continue
        generation, width = cells[4], cells[5]
        known = generation.isdigit() and width.isdigit()
        gpus.append(
            Gpu(
                index=int(cells[0]),
                name=cells[1],
                memory_bytes=int(cells[2]) * 2**20,
                driver=cells[3],
                pcie_bytes_per_s=pcie_bytes_per_s(int(generation), int(width)) if known else None,
                uuid=cells[6],
            )
        )
    return tuple(gpus)


def pcie_bytes_per_s(generation: int, width: int) -> float | None:
    """Return the bandwidth of a PCIe link in B/s per direction; ``width`` is its number of lanes.

    None for a generation outside 1-7 or a width outside 1-32.
    """
    if not (1 <= generation <= 7 and 1 <= width <= 32):
        return None
    return _PCIE_3_LANE_BYTES_PER_S * 2.0 ** (generation - 3) * width


def parse_topology(text: str) -> DeviceTopology:
    """Parse the matrix of ``nvidia-smi topo -m``; any other text gives an empty topology."""
    rows = [_ESCAPE.sub("", line).split() for line in text.splitlines()]
    heading = next((row for row in rows if row and all(_DEVICE.fullmatch(word) for word in row[:1])), None)
    if heading is None:
        return DeviceTopology()
    names = []
    for word in heading:
        if not _DEVICE.fullmatch(word):
            break
        names.append(word)
    joints: dict[tuple[str, str], str] = {}
    # The heading's own line comes first; a legend of NICs ("NIC0: mlx5_0") has a colon.
    for row in rows[rows.index(heading) + 1 :]:
        if row and row[0] in names and len(row) > len(names):
            joints |= {(row[0], other): joint for other, joint in zip(names, row[1:], strict=False) if other != row[0]}
    pairs = {pair: joints[pair] for pair in combinations(names, 2) if pair in joints}
    return DeviceTopology(names=tuple(names), joints=pairs)


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuState:
    """The state of a GPU as the driver reports it: SM clocks in MHz, load, and memory in use.

    ``busy_share`` is the fraction (0..1) of the last second in which a kernel ran.
    """

    clock_mhz: int
    max_clock_mhz: int
    busy_share: float
    used_bytes: int

    @property
    def clocks(self) -> str:
        """Return the clocks as text: ``SM clock 1755 of 1980 MHz``."""
        return f"SM clock {self.clock_mhz} of {self.max_clock_mhz} MHz"

    def warnings(self) -> tuple[str, ...]:
        """Return a warning if another program used the GPU just before a measurement; empty if the GPU was idle."""
        if self.busy_share <= _IDLE_SHARE:
            return ()
        return (
            f"The GPU was busy for {self.busy_share:.0%} of the second before the measurement, and "
            f"{format_bytes(self.used_bytes)} of its memory were in use: another program runs there, so measured "
            "times vary. End that program, or choose another GPU with --device, and measure again.",
        )


def find_gpu_state(host: Host, uuid: str) -> GpuState | None:
    """Return the state of the GPU with this UUID; None if nvidia-smi does not report all of its figures."""
    for line in host.run(_STATE, _QUERY_TIMEOUT_S).output.splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        figures = [int(cell) for cell in cells[1:] if cell.isdigit()]
        if len(figures) == len(_STATE_FIELDS) - 1 and cells[0].removeprefix("GPU-") == uuid.removeprefix("GPU-"):
            clock, max_clock, busy, used = figures
            return GpuState(clock_mhz=clock, max_clock_mhz=max_clock, busy_share=busy / 100, used_bytes=used * 2**20)
    return None


def check_gpus(host: Host) -> Iterator[Finding]:
    """Report the GPUs that nvidia-smi lists, their driver, and the links between them."""
    answer = host.run(_QUERY, _QUERY_TIMEOUT_S)
    gpus = parse_gpus(answer.output)
    if not gpus:
        yield _explain_no_gpu(answer)
        return
    for name in dict.fromkeys(gpu.name for gpu in gpus):
        same = [gpu for gpu in gpus if gpu.name == name]
        yield Finding(
            area="devices", name="GPU", found=f"{len(same)} × {name}, {format_bytes(same[0].memory_bytes)} each"
        )
    yield Finding(area="versions", name="NVIDIA driver", found=gpus[0].driver or "not known")
    if len(gpus) > 1:
        yield Finding(area="links", name="between GPUs", found=describe_topology(find_topology(host)))
    speeds = {gpu.pcie_bytes_per_s for gpu in gpus if gpu.pcie_bytes_per_s is not None}
    if speeds:
        yield Finding(area="links", name="PCIe", found=f"{format_bytes(min(speeds))}/s per GPU and direction")


def describe_topology(topology: DeviceTopology) -> str:
    """Return the number of pairs of GPUs per type of link: ``28 pairs NV18``; ``not known`` without pairs."""
    joints = list(topology.gpu_joints.values())
    counts = {joint: joints.count(joint) for joint in sorted(set(joints))}
    return ", ".join(f"{format_count(count, 'pair')} {joint}" for joint, count in counts.items()) or "not known"


def _explain_no_gpu(answer: Ran) -> Finding:
    if answer.code == NOT_FOUND:
        return Finding(area="devices", name="GPU", found="none (no nvidia-smi)")
    if answer.code is None:
        found = f"nvidia-smi did not answer within {_QUERY_TIMEOUT_S:g} s"
    else:
        words = (answer.error or answer.output).strip().splitlines()
        found = f"nvidia-smi shows none{f': {words[0][:120]}' if words else ''}"
    return Finding(
        area="devices",
        name="GPU",
        found=found,
        status="problem",
        remedy="Load the driver, or start the container with GPUs (docker run --gpus all), until nvidia-smi lists it.",
        topic="no-gpu-is-seen",
    )


def _is_nvlink(joint: str) -> bool:
    return joint.startswith("NV") and joint[2:].isdigit()
