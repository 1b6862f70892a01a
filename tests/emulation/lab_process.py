"""A launcher of a lab whose ranks wait: ``python -m tests.emulation.lab_process FOLDER``; prints what it made."""

import json
import os
import subprocess
import sys
from pathlib import Path

from meshwright.emulation import Emulated, open_lab
from tests.emulation.clusters import SHARED_NICS
from tests.project import ROOT


def main(folder: str) -> None:
    with open_lab(Emulated(cluster=SHARED_NICS, devices=(0, 1, 2, 3)), Path(folder)) as lab:
        ranks = [
            subprocess.Popen(
                [sys.executable, *lab.arguments, "tests.emulation.waiting_rank", "wait"],
                env={**os.environ, "RANK": str(rank)},
                cwd=ROOT,
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(4)
        ]
        said = [json.loads(rank.stdout.readline()) for rank in ranks]
        lab.start_clock()
        children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
        janitor = [int(child) for child in children if int(child) not in [rank.pid for rank in ranks]]
        print(json.dumps({"ranks": [rank.pid for rank in ranks], "janitor": janitor, "said": said}), flush=True)
        sys.stdin.readline()


if __name__ == "__main__":
    main(sys.argv[1])
