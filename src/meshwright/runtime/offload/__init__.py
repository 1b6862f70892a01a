"""What is kept away from the device: its memory, where states lie, and the host's work beside the computations.

pieces    what of parameters lies on the device, and its counterpart on the host
updates   the optimizer over a piece
states    its states, in memory or in a file on drives
room      whether hosts and drives have room for it
streams   the threads that do the program's instructions
saved     activations, between forward and backward
hosting   all of a rank
"""

from meshwright.runtime.offload.hosting import Hosting
from meshwright.runtime.offload.opening import Hosted, find_partial, keep_saved, take_to_host
from meshwright.runtime.offload.room import check_folder, check_host, choose_folder
from meshwright.runtime.offload.updates import HostedValues, HostSteps

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
