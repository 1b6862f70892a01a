"""Settings of Linux' scheduler by which a process that works in short turns runs soon after it is woken.

Linux gives each process a time slice of some milliseconds; a woken process may have to wait until the slice of another
process is over. A process with a shorter slice is preferred (sched_setattr(2); kernel 6.12 and later; older kernels
ignore it). It does not get more of the processor in total, and needs no privileges.
"""

from __future__ import annotations

import ctypes
import os
import platform
import struct

# Numbers of the system call; glibc has no function for it before version 2.41.
_SCHED_SETATTR = {"x86_64": 314, "aarch64": 274}
# The kernel's minimum.
_SLICE_NS = 100_000


def ask_for_short_turns() -> bool:
    """Request the shortest slice for this process and its future threads; return whether the system accepted it."""
    number = _SCHED_SETATTR.get(platform.machine())
    if number is None or not (hasattr(os, "sched_getscheduler") and hasattr(os, "getpriority")):
        return False
    if os.sched_getscheduler(0) != os.SCHED_OTHER:
        return False
    nice = os.getpriority(os.PRIO_PROCESS, 0)
    # struct sched_attr: its size, policy, flags, nice, priority, runtime (the slice), deadline, period.
    attributes = struct.pack("=IIQiIQQQ", 48, os.SCHED_OTHER, 0, nice, 0, _SLICE_NS, 0, 0)
    return bool(ctypes.CDLL(None).syscall(number, 0, attributes, 0) == 0)
