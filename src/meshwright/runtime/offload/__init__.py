"""Offload to the host: optimizer states, parameters and activations in host memory or on drives.

pieces         groups of parameters that the host updates together, with their tensors on the device and on the host
states         the optimizer updates of a piece, and its states in host memory or in a file on a drive
pinned_memory  host memory, files on drives, and checks that hosts and drives have room
copy_streams   the threads that execute copies and updates while the device computes
saved_values   activations on the host between forward and backward
hosting        the offload of one rank, which joins all of these
"""

from meshwright.runtime.offload.hosting import Hosted, Hosting, find_partial, keep_saved, take_to_host
from meshwright.runtime.offload.pinned_memory import check_folder, check_host, choose_folder
from meshwright.runtime.offload.states import HostedValues, HostSteps

__all__ = [
    "HostSteps",
    "Hosted",
    "HostedValues",
    "Hosting",
    "check_folder",
    "check_host",
    "choose_folder",
    "find_partial",
    "keep_saved",
    "take_to_host",
]
