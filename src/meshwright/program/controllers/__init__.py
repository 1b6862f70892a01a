"""Policies that decide while a program runs, each a pure function (`spec.control`).

`BackupWorkers`   apply the first gradients of a version, drop what comes late
`StoppedBackups`  the same where who is late is stopped, and begins the next version with all others
`BoundedDelay`    a parameter server; nobody is more than some clocks ahead of the slowest
`PartialReduce`   the first workers that are ready average their gradients

All of them extend a program of nothing, ``ProgramBuilder(controller.num_ranks).build(...)``, and come to an end.
"""

from meshwright.program.controllers.backup_workers import BackupWorkers
from meshwright.program.controllers.bounded_delay import BoundedDelay
from meshwright.program.controllers.partial_reduce import PartialReduce
from meshwright.program.controllers.stopped_backups import StoppedBackups

__all__ = ["BackupWorkers", "BoundedDelay", "PartialReduce", "StoppedBackups"]
