"""Describe this machine as a `Cluster` of one node, and write that cluster as TOML with the origin of each figure.

found       read from this machine: devices, memory, cores, NVLinks, PCIe, network cards
measured    timed on this machine (`Rates`)
datasheet   the shipped description of the device kind, with its ``source``

The GPUs are those that torch sees; if torch sees no GPU, those of nvidia-smi. A node has one device link, so the
slowest pair of GPUs describes all pairs. Without a GPU every core is a device of kind ``cpu``, as in the shipped
cluster ``cpu``.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, replace

from meshwright.host.gpus import DeviceTopology, Gpu, KnownGpu, know_gpu, name_gpu
from meshwright.host.host import Rates
from meshwright.host.memory_limits import Memory
from meshwright.host.processor import Processor
from meshwright.host.reach import Nic
from meshwright.spec import (
    Cluster,
    ClusterError,
    DeviceGroup,
    DeviceKind,
    Link,
    Node,
    Nvme,
    decode_document,
    encode_document,
    format_bytes,
    format_count,
    load_cluster,
)

# Remarks by the path of the key in the cluster file: "device_kinds.0.memory_bytes" → "found: ...".
Remarks = dict[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Facts about this machine: host name, processor, memory, GPUs and their links, network cards."""

    name: str
    processor: Processor
    memory: Memory
    gpus: tuple[Gpu, ...]
    topology: DeviceTopology
    nics: tuple[Nic, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Described:
    """A cluster, and ``remarks``: the origin of each figure by the path of its key, such as ``nodes.0.pcie``."""

    cluster: Cluster
    remarks: Remarks


def describe_machine(machine: Machine, rates: dict[str, Rates]) -> Described:
    """Return this machine as a cluster of one node; ``rates`` maps ``cpu`` or a GPU's name to its measured figures.

    Raises ClusterError for a GPU that is neither in ``known_gpus.toml`` nor measured.
    """
    return _describe_gpus(machine, rates) if machine.gpus else _describe_cores(machine, rates.get("cpu"))


def _describe_cores(machine: Machine, rates: Rates | None) -> Described:
    shipped = load_cluster("cpu")
    kind, node = shipped.device_kinds[0], shipped.nodes[0]
    num_cores = machine.processor.num_cores
    remarks: Remarks = {}
    basis = "shipped: not measured here" if rates is None else "measured: see source"
    host_bytes = _host_bytes(machine, node, remarks)
    if machine.memory.available_bytes is not None:
        memory_bytes = machine.memory.available_bytes // num_cores
        remark = f"found: {format_bytes(machine.memory.available_bytes)} available, shared by {num_cores} ranks"
    else:
        memory_bytes, remark = kind.memory_bytes, "shipped: not reported by this system"
    remarks["device_kinds.0.memory_bytes"] = remark
    for key in ("memory_bandwidth_bytes_per_s", "peak_flops_per_s"):
        remarks[f"device_kinds.0.{key}"] = basis
    if rates is not None:
        kind = replace(
            kind,
            memory_bandwidth_bytes_per_s=rates.memory_bandwidth_bytes_per_s,
            peak_flops_per_s=dict(rates.peak_flops_per_s),
            source=f"{machine.processor.name}, one core and one thread as a device. {rates.conditions}.",
        )
        copied = Link(latency_s=node.pcie.latency_s, bandwidth_bytes_per_s=rates.memory_bandwidth_bytes_per_s / 2)
        node = replace(node, device_link=rates.link or node.device_link, pcie=copied)
    remarks["nodes.0.device_link"] = f"{basis}; processes of one host over gloo"
    remarks["nodes.0.pcie"] = f"{basis}; the figure is that of a copy in host memory"
    nic, num_nics = _describe_nics(machine.nics, replace(node.nic, **_as_fields(node.device_link)), remarks)
    remarks["nodes.0.devices"] = f"found: {machine.processor.name}, one device per core that may be used"
    described = replace(
        node,
        name=machine.name,
        devices=(DeviceGroup(kind=kind.name, count=num_cores),),
        host_memory_bytes=host_bytes,
        num_cores=num_cores,
        nic=nic,
        num_nics=num_nics,
        source=_SOURCE,
    )
    kinds = (replace(kind, memory_bytes=memory_bytes),)
    return Described(cluster=Cluster(name=machine.name, device_kinds=kinds, nodes=(described,)), remarks=remarks)


def _describe_gpus(machine: Machine, rates: dict[str, Rates]) -> Described:
    remarks: Remarks = {}
    kinds: dict[str, DeviceKind] = {}
    names: list[str] = []
    for gpu in machine.gpus:
        kind, remark = _describe_gpu(gpu, rates.get(gpu.name))
        if kind.name not in kinds:
            place = f"device_kinds.{len(kinds)}"
            remarks[f"{place}.memory_bytes"] = f"found: {gpu.name}"
            remarks[f"{place}.memory_bandwidth_bytes_per_s"] = remarks[f"{place}.peak_flops_per_s"] = remark
            kinds[kind.name] = kind
        names.append(kind.name)
    groups: list[DeviceGroup] = []
    for name in names:
        if groups and groups[-1].kind == name:
            groups[-1] = replace(groups[-1], count=groups[-1].count + 1)
        else:
            groups.append(DeviceGroup(kind=name, count=1))
    known = know_gpu(machine.gpus[0].name)
    base = known.shipped_node() if known is not None else load_cluster("L40S").nodes[0]
    remarks["nodes.0.devices"] = f"found: {format_count(len(machine.gpus), 'GPU')}"
    host_bytes = _host_bytes(machine, base, remarks)
    pcie = _describe_pcie(machine.gpus, base, remarks)
    device_link = _describe_device_link(machine, known, replace(base, pcie=pcie), remarks)
    nic, num_nics = _describe_nics(machine.nics, base.nic, remarks)
    node = Node(
        name=machine.name,
        devices=tuple(groups),
        host_memory_bytes=host_bytes,
        num_cores=machine.processor.num_cores,
        device_link=device_link,
        pcie=pcie,
        nic=nic,
        num_nics=num_nics,
        source=f"{_SOURCE} Latencies, and what was not found: {base.source}",
    )
    return Described(
        cluster=Cluster(name=machine.name, device_kinds=tuple(kinds.values()), nodes=(node,)), remarks=remarks
    )


def _describe_gpu(gpu: Gpu, rates: Rates | None) -> tuple[DeviceKind, str]:
    known = know_gpu(gpu.name)
    if known is not None:
        return known.describe(gpu.memory_bytes), f"datasheet: {known.name or known.kind}"
    if rates is None:
        raise ClusterError(
            f"Meshwright ships no figures for GPU {gpu.name!r}, and the GPU was not measured. Install torch, so that "
            "it can be measured (pip install 'meshwright[torch]'), or describe it in a .toml file by its datasheet."
        )
    kind = DeviceKind(
        name=name_gpu(gpu.name),
        memory_bytes=gpu.memory_bytes,
        memory_bandwidth_bytes_per_s=rates.memory_bandwidth_bytes_per_s,
        peak_flops_per_s=dict(rates.peak_flops_per_s),
        source=f"{gpu.name}: no datasheet is shipped. {rates.conditions}.",
    )
    return kind, "measured: see source"


def _describe_pcie(gpus: tuple[Gpu, ...], base: Node, remarks: Remarks) -> Link:
    speeds = [gpu.pcie_bytes_per_s for gpu in gpus if gpu.pcie_bytes_per_s is not None]
    if not speeds:
        remarks["nodes.0.pcie"] = f"datasheet: as in {base.name}; nvidia-smi did not report it"
        return base.pcie
    remarks["nodes.0.pcie"] = "found: generation and width by nvidia-smi; latency: see source"
    return replace(base.pcie, bandwidth_bytes_per_s=min(speeds))


def _describe_device_link(machine: Machine, known: KnownGpu | None, base: Node, remarks: Remarks) -> Link:
    place = "nodes.0.device_link"
    if len(machine.gpus) == 1:
        remarks[place] = f"datasheet: as in {base.name}; with one GPU it is not used"
        return base.device_link
    if not machine.topology.gpu_joints:
        remarks[place] = "not found (nvidia-smi topo printed no links): the figures of PCIe are used"
        return base.pcie
    num_links = machine.topology.fewest_nvlinks(tuple(f"GPU{gpu.index}" for gpu in machine.gpus))
    if num_links and known is not None and known.nvlink_bytes_per_s is not None:
        remarks[place] = f"found: at least {format_count(num_links, 'NVLink')} per pair; {known.source}"
        return replace(base.device_link, bandwidth_bytes_per_s=num_links * known.nvlink_bytes_per_s)
    remarks[place] = "found: some pair of GPUs has no NVLink of known speed, so the figures of PCIe are used"
    return base.pcie


def _describe_nics(nics: tuple[Nic, ...], fallback: Link, remarks: Remarks) -> tuple[Link, int]:
    speeds = [nic.bytes_per_s for nic in nics if nic.bytes_per_s is not None]
    if not speeds:
        remarks["nodes.0.nic"] = "not found: a placeholder; replace it before you plan for several nodes"
        return fallback, 1
    names = ", ".join(nic.name for nic in nics)
    remarks["nodes.0.nic"] = f"found: {nics[0].kind} {names}; latency not measured: see source"
    return replace(fallback, bandwidth_bytes_per_s=min(speeds)), len(nics)


def _host_bytes(machine: Machine, base: Node, remarks: Remarks) -> int:
    known = [number for number in (machine.memory.total_bytes, machine.memory.limit_bytes) if number is not None]
    limited = machine.memory.limit_bytes is not None and machine.memory.limit_bytes == min(known)
    remarks["nodes.0.num_cores"] = "found: after affinity and the cgroup's quota"
    if not known:
        remarks["nodes.0.host_memory_bytes"] = f"not reported by this system: as in {base.name}"
        return base.host_memory_bytes
    remarks["nodes.0.host_memory_bytes"] = "found: the cgroup's limit" if limited else "found"
    return min(known)


def _as_fields(link: Link) -> dict[str, float]:
    return {"latency_s": link.latency_s, "bandwidth_bytes_per_s": link.bandwidth_bytes_per_s}


_SOURCE = "Written by `meshwright measure --cluster`; the comments say where each figure comes from."


def cluster_toml(described: Described, heading: str) -> str:
    """Return a cluster as the text of a TOML file: ``heading`` as comments on top, and each figure's origin beside it.

    Raises ClusterError if the text does not read back as the same cluster.
    """
    cluster, remarks = described.cluster, described.remarks
    lines = [
        *(f"# {line}" for line in heading.splitlines()),
        f"schema = {_string(encode_document(cluster)['schema'])}",
        f"name = {_string(cluster.name)}",
    ]
    for index, kind in enumerate(cluster.device_kinds):
        lines += _kind_lines(kind, f"device_kinds.{index}", remarks)
    for index, node in enumerate(cluster.nodes):
        lines += _node_lines(node, f"nodes.{index}", remarks)
    text = "\n".join(lines) + "\n"
    if decode_document(Cluster, tomllib.loads(text), "the cluster that was found") != cluster:
        raise ClusterError(
            "The cluster that was found cannot be written as TOML without loss. Write it as JSON: --out cluster.json."
        )
    return text


def _kind_lines(kind: DeviceKind, place: str, remarks: Remarks) -> Iterator[str]:
    yield from ("", "[[device_kinds]]", f"name = {_string(kind.name)}")
    yield _commented(f"memory_bytes = {kind.memory_bytes}", remarks.get(f"{place}.memory_bytes"))
    rate = f"memory_bandwidth_bytes_per_s = {_number(kind.memory_bandwidth_bytes_per_s)}"
    yield _commented(rate, remarks.get(f"{place}.memory_bandwidth_bytes_per_s"))
    figures = {
        "num_multiprocessors": str(kind.num_multiprocessors),
        "cache_bytes": str(kind.cache_bytes),
        "clock_hz": _number(kind.clock_hz),
        "compute_capability": _number(kind.compute_capability),
    }
    yield from (f"{key} = {value}" for key, value in figures.items() if getattr(kind, key))
    yield f"source = {_string(kind.source)}"
    yield ""
    yield _commented("[device_kinds.peak_flops_per_s]", remarks.get(f"{place}.peak_flops_per_s"))
    for dtype, peak in kind.peak_flops_per_s.items():
        yield f"{dtype} = {_number(peak)}"


def _node_lines(node: Node, place: str, remarks: Remarks) -> Iterator[str]:
    groups = ", ".join(f"{{ kind = {_string(group.kind)}, count = {group.count} }}" for group in node.devices)
    figures = {
        "devices": f"[{groups}]",
        "host_memory_bytes": str(node.host_memory_bytes),
        "num_cores": str(node.num_cores),
        "device_link": _link(node.device_link),
        "pcie": _link(node.pcie),
        "nic": _link(node.nic),
        "num_nics": str(node.num_nics),
    }
    if node.host_memory_bandwidth_bytes_per_s:
        figures["host_memory_bandwidth_bytes_per_s"] = _number(node.host_memory_bandwidth_bytes_per_s)
    if node.host_call_s:
        figures["host_call_s"] = _number(node.host_call_s)
    if node.nvme is not None:
        figures["nvme"] = _drives(node.nvme)
    yield from ("", "[[nodes]]", f"name = {_string(node.name)}")
    for key, value in figures.items():
        yield _commented(f"{key} = {value}", remarks.get(f"{place}.{key}"))
    yield f"source = {_string(node.source)}"


def _link(link: Link) -> str:
    rate = _number(link.bandwidth_bytes_per_s)
    return f"{{ latency_s = {_number(link.latency_s)}, bandwidth_bytes_per_s = {rate} }}"


def _drives(nvme: Nvme) -> str:
    rates = (
        f"read_bytes_per_s = {_number(nvme.read_bytes_per_s)}, write_bytes_per_s = {_number(nvme.write_bytes_per_s)}"
    )
    return f"{{ capacity_bytes = {nvme.capacity_bytes}, {rates} }}"


def _number(value: float) -> str:
    """A float that reads back as itself, short if possible: ``2.06e10``."""
    mantissa, _, exponent = f"{value:.3e}".partition("e")
    short = f"{float(mantissa):g}e{int(exponent)}"
    return short if float(short) == value else repr(float(value))


def _string(text: str) -> str:
    """A basic string: JSON's escapes are valid in TOML, except for the control character DEL."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007F")


def _commented(line: str, remark: str | None) -> str:
    """The line with its remark, without line ends."""
    printable = "".join(letter if letter.isprintable() else " " for letter in remark or "")
    return f"{line}  # {printable}" if printable else line
