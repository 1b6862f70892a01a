"""Start a module as a rank of a lab: ``python -m meshwright.emulation.enter LAB.json MODULE ARGUMENTS...``.

The process joins its cgroup and its namespace before torch is loaded, so that every thread and connection is inside.
The first rank keeps the store of the process group on its own address; no traffic leaves the lab.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
from pathlib import Path

from meshwright.emulation.namespaces import enter_namespace

STORE_PORT = 29500


def enter(lab: str, rank: int) -> None:
    """Move this process into the namespace and the cgroup of a rank, and set where the process group meets."""
    data = json.loads(Path(lab).read_text(encoding="utf-8"))
    Path(data["groups"][rank]).write_text(str(os.getpid()))
    file = os.open(data["namespaces"][rank], os.O_RDONLY | os.O_CLOEXEC)
    try:
        enter_namespace(file)
    finally:
        os.close(file)
    os.environ |= {
        "MASTER_ADDR": data["store"],
        "MASTER_PORT": str(STORE_PORT),
        # torchrun's agent has a store of its own, outside of the lab.
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        "GLOO_SOCKET_IFNAME": "eth0",
        # Addresses of the lab have no names; torch would warn of each.
        "TORCH_CPP_LOG_LEVEL": os.environ.get("TORCH_CPP_LOG_LEVEL", "ERROR"),
    }


if __name__ == "__main__":
    _, lab_file, module, *arguments = sys.argv
    enter(lab_file, int(os.environ["RANK"]))
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
