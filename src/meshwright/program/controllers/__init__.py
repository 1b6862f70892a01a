"""Policies that decide while a program runs, each a pure function (`spec.control`).

`BackupWorkers`   apply the first gradients of a version, drop late ones
`StoppedBackups`  the same, but late workers are stopped, and begin the next version with all others
`BoundedDelay`    a parameter server; no worker is more than a number of clocks ahead of the slowest
`PartialReduce`   the first ready workers average their gradients

All of them extend an empty program, ``ProgramBuilder(controller.num_ranks).build(...)``, and come to an end.
"""

from meshwright.program.controllers.backup_workers import BackupWorkers, StoppedBackups
from meshwright.program.controllers.bounded_delay import BoundedDelay
from meshwright.program.controllers.partial_reduce import PartialReduce

__all__ = ["BackupWorkers", "BoundedDelay", "PartialReduce", "StoppedBackups"]
