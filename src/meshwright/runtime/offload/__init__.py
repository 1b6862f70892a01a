"""Offload to the host: its memory, the places of states, and the host's work in parallel with the computations.

pieces         parameters on the device, and their counterparts on the host
states         the optimizer over a piece, and its states, in host memory or in a file on drives
pinned_memory  checks that hosts and drives have room
copy_streams   the threads that execute the host's instructions
saved_values   activations, between forward and backward
hosting        the host of a rank, which joins all of these
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
