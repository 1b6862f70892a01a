"""Controllers: policies that issue instructions while a program runs, each a pure function (`spec.control`).

`BackupWorkers`   each version of the weights takes the first gradients that arrive; late gradients are dropped
`StoppedBackups`  the same, but late workers are stopped, and begin the next version together with all workers
`BoundedDelay`    parameter servers; no worker is more than a given number of iterations ahead of the slowest
`PartialReduce`   the first ready workers average their gradients

Each of them extends an empty program, ``ProgramBuilder(controller.num_ranks).build(...)``, and ends after the number
of versions or iterations that it was given. `make_controller` makes the one that a plan's exchange names, or the user's
own.
"""

from meshwright.program.controllers.backup_workers import BackupWorkers, StoppedBackups
from meshwright.program.controllers.bounded_delay import BoundedDelay
from meshwright.program.controllers.partial_reduce import PartialReduce
from meshwright.program.controllers.policies import make_controller, with_policy

__all__ = ["BackupWorkers", "BoundedDelay", "PartialReduce", "StoppedBackups", "make_controller", "with_policy"]
