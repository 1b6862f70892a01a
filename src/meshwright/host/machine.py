"""Collect all facts about this machine for a cluster file (`find_machine`), and choose the devices to measure."""

from __future__ import annotations

from dataclasses import replace

from meshwright.host.describe_host import Machine
from meshwright.host.gpus import DeviceTopology, Gpu, find_gpus, find_topology, know_gpu
from meshwright.host.host import Host
from meshwright.host.memory_limits import find_memory
from meshwright.host.processor import find_processor
from meshwright.host.reach import choose_nics
from meshwright.host.torch_probe import TorchFacts


def find_machine(host: Host, torch: TorchFacts) -> Machine:
    """Return the facts about a host.

    The GPUs are those that torch sees, with torch's memory size; if torch sees no GPU, those of nvidia-smi.
    """
    driver = find_gpus(host)
    gpus = _seen_by_torch(driver, torch) or driver
    return Machine(
        name=host.name,
        processor=find_processor(host),
        memory=find_memory(host),
        gpus=gpus,
        topology=find_topology(host) if len(gpus) > 1 else DeviceTopology(),
        nics=choose_nics(host),
    )


def devices_to_measure(machine: Machine) -> dict[str, str]:
    """Return the devices that have to be timed, as name → torch device (``cuda:0``).

    On a machine without GPUs it is the CPU; otherwise one GPU of each kind that is not in ``known_gpus.toml``.
    """
    if not machine.gpus:
        return {"cpu": "cpu"}
    unknown: dict[str, str] = {}
    for index, gpu in enumerate(machine.gpus):
        if know_gpu(gpu.name) is None:
            unknown.setdefault(gpu.name, f"cuda:{index}")
    return unknown


def _seen_by_torch(driver: tuple[Gpu, ...], torch: TorchFacts) -> tuple[Gpu, ...]:
    """Torch's devices in its order; the driver's own facts (place, PCIe) are joined to them by UUID."""
    seen = []
    for index, device in enumerate(torch.devices):
        name, memory, uuid = (device.get(key) for key in ("name", "memory_bytes", "uuid"))
        if not isinstance(name, str) or not isinstance(memory, int):
            continue
        same = [gpu for gpu in driver if uuid and str(uuid) in gpu.uuid]
        gpu = same[0] if same else Gpu(index=index, name=name, memory_bytes=memory)
        seen.append(replace(gpu, name=name, memory_bytes=memory))
    return tuple(seen)
