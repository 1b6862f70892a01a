"""Facts about this machine (versions, devices, memory, links, reachability), and a Cluster made from them.

This package does not import torch; facts from torch come from child processes (`torch_probe`).
"""

from meshwright.host.describe_host import Described, Machine, cluster_toml, describe_machine
from meshwright.host.findings import Finding
from meshwright.host.gpus import GpuState, find_gpu_state, name_gpu
from meshwright.host.host import Host, Rates
from meshwright.host.host_checks import examine
from meshwright.host.machine import devices_to_measure, find_machine
from meshwright.host.processor import processor_name
from meshwright.host.reach import parse_address
from meshwright.host.torch_probe import TorchFacts, ask_torch

__all__ = [
    "Described",
    "Finding",
    "GpuState",
    "Host",
    "Machine",
    "Rates",
    "TorchFacts",
    "ask_torch",
    "cluster_toml",
    "describe_machine",
    "devices_to_measure",
    "examine",
    "find_gpu_state",
    "find_machine",
    "name_gpu",
    "parse_address",
    "processor_name",
]
