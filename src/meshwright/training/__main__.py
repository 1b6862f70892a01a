"""Run one rank of a job, as torchrun's agent starts it: ``python -m meshwright.training JOB.json FOLDER LAUNCHER``.

FOLDER receives progress, results and errors; LAUNCHER is the process id of the launcher.
"""

from __future__ import annotations

import sys

from meshwright.training.launch import leave
from meshwright.training.worker import main

if __name__ == "__main__":
    job, folder, launcher = sys.argv[1:]
    leave(main(job, folder, int(launcher)))
