"""The process of the scheduler.

Run as ``python -m meshwright.serving.server.scheduler_process FOLDER [LOG]``; ``FOLDER`` contains deployment.json.
Ends when its standard input ends.
"""

from __future__ import annotations

import sys
from pathlib import Path

from meshwright.serving.server.promptness import ask_for_short_turns
from meshwright.serving.server.reports import keep_what_is_there, reporting_errors
from meshwright.serving.server.scheduler import Scheduler
from meshwright.spec import read_deployment


def main(arguments: list[str]) -> None:
    """Run the scheduler until standard input ends; ``arguments``: FOLDER [LOG]."""
    folder, log = Path(arguments[0]), Path(arguments[1]) if arguments[1:] else None
    ask_for_short_turns()
    with reporting_errors():
        scheduler = Scheduler(folder, read_deployment(folder / "deployment.json"), log, keep_what_is_there)
        try:
            scheduler.watch_input()
            while True:
                scheduler.turn()
        finally:
            scheduler.close()


if __name__ == "__main__":
    main(sys.argv[1:])
