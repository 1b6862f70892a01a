"""A cluster as TOML with a comment beside each figure. The text is read back and compared before it is saved."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator

from meshwright.host.describe import Described, Remarks
from meshwright.spec import Cluster, ClusterError, DeviceKind, Link, Node, Nvme, decode_document, encode_document


def cluster_toml(described: Described, heading: str) -> str:
    """The text of a cluster file; ``heading`` is a comment on top. Raises ClusterError if it does not read back."""
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
