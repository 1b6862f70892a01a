"""The runtime: real ranks with one pinned thread each, gloo. Sections, described each in its file:

    speed         benchmarks/running/speed.py: against torch's pipelining and DDP
    compiled      benchmarks/running/compiled.py: compiled layers against torch.compile under DDP and FSDP2
    recompute     benchmarks/running/recompute.py: against torch's selective checkpointing; steps predicted, measured
    predictions   benchmarks/running/predictions.py: steps of every kind of plan, as predicted and as measured
    endless       benchmarks/running/endless.py: asynchronous schedules against 1F1B, as predicted and as measured
    mixtures      benchmarks/running/mixtures.py: experts laid out, memory and steps as predicted and as measured
    asynchrony    benchmarks/running/asynchrony.py: the loss that delayed gradients cost, and two repairs

``--only NAME`` runs one of them and writes a report of its own.
"""

import os
import sys
from importlib import import_module

from harness import parse_options, publish

for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(name, "1")

SECTIONS = ("speed", "compiled", "recompute", "predictions", "endless", "mixtures", "asynchrony")


def main():
    options = parse_options(__doc__.splitlines()[0], only=SECTIONS)
    table, notes = [], []
    for name in options.only or SECTIONS:
        module = import_module(f"running.{name}")
        table += module.rows(options.quick)
        notes.append(getattr(module, "NOTES", ""))
    return publish("runtime", table, options, "\n\n".join(filter(None, notes)), label="-".join(options.only or ()))


if __name__ == "__main__":
    sys.exit(main())
