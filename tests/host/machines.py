"""Machines that are made up: folders that imitate /proc and /sys, and what programs would answer.

The outputs of nvidia-smi and the contents of /sys were written by hand in the form that these programs and the kernel
document; none was recorded on the machine that it describes.
"""

from __future__ import annotations

from pathlib import Path

from meshwright.host import Host
from meshwright.host.host import NOT_FOUND, Ran

DGX_QUERY = "".join(
    f"{index}, NVIDIA H100 80GB HBM3, 81559, 550.54.15, 5, 16, GPU-0000000{index}-aaaa-bbbb-cccc-dddddddddddd\n"
    for index in range(8)
)

_NICS = (("PIX", "SYS"), ("SYS", "PIX"))
_NAMES = "\t".join(f"GPU{i}" for i in range(8))
DGX_TOPOLOGY = (
    f"\t\x1b[4m{_NAMES}\tNIC0\tNIC1\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m\n"
    + "".join(
        "\t".join([f"GPU{i}", *(" X " if i == j else "NV18" for j in range(8)), *_NICS[i // 4], "0-55", "0", "N/A\n"])
        for i in range(8)
    )
    + "NIC0\tPIX\tPIX\tPIX\tPIX\tSYS\tSYS\tSYS\tSYS\t X \tSYS\n"
    + "NIC1\tSYS\tSYS\tSYS\tSYS\tPIX\tPIX\tPIX\tPIX\tSYS\t X \n"
    + "\nLegend:\n\n  X    = Self\n  SYS  = Connection traversing PCIe as well as the SMP interconnect\n"
    + "  NV#  = Connection traversing a bonded set of # NVLinks\n\nNIC Legend:\n\n  NIC0: mlx5_0\n  NIC1: mlx5_1\n"
)

# Four GPUs in two bridged pairs; across the pairs only PCIe.
BRIDGED_QUERY = "".join(
    f"{index}, NVIDIA A100 80GB PCIe, 81920, 535.129.03, 4, 16, GPU-1111111{index}-aaaa-bbbb-cccc-dddddddddddd\n"
    for index in range(4)
)
BRIDGED_TOPOLOGY = """\
\tGPU0\tGPU1\tGPU2\tGPU3\tCPU Affinity\tNUMA Affinity
GPU0\t X \tNV12\tSYS\tSYS\t0-31\t0
GPU1\tNV12\t X \tSYS\tSYS\t0-31\t0
GPU2\tSYS\tSYS\t X \tNV12\t32-63\t1
GPU3\tSYS\tSYS\tNV12\t X \t32-63\t1
"""


def write_tree(root: Path, files: dict[str, str]) -> Path:
    """Files below ``root``; a name that ends in a slash is a folder."""
    for name, text in files.items():
        path = root / name.lstrip("/")
        if name.endswith("/"):
            path.mkdir(parents=True, exist_ok=True)
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def answering(*, query: str = "", topology: str = "", code: int = 0, error: str = ""):
    """A function that answers as nvidia-smi would; other programs are not there."""

    def run(command, timeout_s):
        assert timeout_s > 0
        if command[0] != "nvidia-smi" or not (query or topology or error):
            return Ran(code=NOT_FOUND)
        return Ran(code=code, output=topology if "topo" in command else query, error=error)

    return run


def make_host(root: Path, files: dict[str, str] | None = None, **given) -> Host:
    """A made-up machine without environment and programs, unless they are given."""
    facts = {"environment": {}, "run": answering(), "name": "localhost", **given}
    return Host(root=write_tree(root, files or {}), **facts)
