"""A rank of a lab: prints its namespace, its group and its queue; waits if an argument is given."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

command = ["tc", "-j", "qdisc", "show", "dev", "eth0"]
queue = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30)
lines = Path("/proc/self/cgroup").read_text().splitlines()
groups = [line.rpartition(":")[2] for line in lines if "meshwright" in line]
facts = {
    "namespace": Path("/proc/self/ns/net").stat().st_ino,
    "group": groups[0],
    "queue": json.loads(queue.stdout)[0],
    "store": os.environ["MASTER_ADDR"],
}
print(json.dumps(facts), flush=True)
if sys.argv[1:]:
    signal.pause()
