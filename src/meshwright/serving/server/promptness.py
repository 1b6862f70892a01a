"""Processes that work in short turns ask the system to let them begin soon after they are woken.

Linux gives each process a slice of some milliseconds; one that is woken may have to wait until that of another one is
over. A process may ask for a shorter slice, and then comes first where others have longer ones (sched_setattr(2);
kernel 6.12 and later; older ones ignore it). It gets no larger share of the processor, and needs no right to ask.
"""

from __future__ import annotations

import ctypes
import os
import platform
import struct

# The number of the system call, which glibc has no function for before version 2.41.
_SCHED_SETATTR = {"x86_64": 314, "aarch64": 274}
# The least that the kernel takes.
_SLICE_NS = 100_000


def ask_for_short_turns() -> bool:
    """Ask for the shortest slice there is, for this process and its threads to come; has the system taken it?"""
    number = _SCHED_SETATTR.get(platform.machine())
    if number is None or not (hasattr(os, "sched_getscheduler") and hasattr(os, "getpriority")):
        return False
    if os.sched_getscheduler(0) != os.SCHED_OTHER:
        return False
    nice = os.getpriority(os.PRIO_PROCESS, 0)
    # struct sched_attr: its size, policy, flags, nice, priority, runtime (the slice), deadline, period.
    attributes = struct.pack("=IIQiIQQQ", 48, os.SCHED_OTHER, 0, nice, 0, _SLICE_NS, 0, 0)
    return bool(ctypes.CDLL(None).syscall(number, 0, attributes, 0) == 0)
