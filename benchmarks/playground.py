"""The playground's response for a plan on 64 devices: the server's part, and from a control's event to the picture.

Llama 3 8B on 8 nodes of 8 A100, 64 to 256 microbatches. Every change leads to a state that was not answered before, so
that nothing but graph and costs is kept: cuts moved by keys, sliders of the scenario, a choice of schedule, another
number of stages, another microbatch size. The browser is headless Chromium, 1400 pixels wide; its clock starts with the
event of the control and ends after the frame that shows the answer (`Meshwright.update`). Median and p95 over all
changes, and the median per control; targets hold for the median and the p95 of the whole response.
"""

from __future__ import annotations

import sys
import threading
from collections import defaultdict
from functools import partial
from pathlib import Path

import numpy as np
from harness import make_row, parse_options, publish

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from meshwright.cli.model_arguments import graphs_of
from meshwright.playground import Controls, OfferedModel, PlaygroundServer, Service, Workbench, to_query
from tests.browser.chromium import start_chromium

TARGET_MS = 200.0
START = Controls(
    model="llama3-8b", num_nodes=8, num_stages=8, global_batch=512, microbatch_size=4, replicas=(), slow_rank=9
)
# Numbers of stages that are chosen one after the other; the fewest have the cuts that can always be moved.
STAGES = (4, 8, 16, 8)
READY = "return typeof Playground === 'object' && Playground.last.number > 0"
# Changes a control as a user does and waits for the answer's picture; returns [server, whole] in milliseconds.
CHANGE = """
const [id, value, done] = arguments;
const number = Playground.last.number, control = document.getElementById(id);
if (id.startsWith('cut')) {
  document.querySelector('[data-cut="' + id.slice(3) + '"]').dispatchEvent(
    new KeyboardEvent('keydown', { key: value, bubbles: true, cancelable: true }));
} else {
  control.value = value;
  control.dispatchEvent(new Event('input', { bubbles: true }));
}
const look = () => {
  if (Playground.last.number > number) done([Playground.last.server_ms, Playground.last.total_ms]);
  else setTimeout(look, 2);
};
look();
"""


def changes(rounds: int):
    """(what is changed, control, value): no state occurs twice."""
    for lap in range(rounds):
        yield "a cut", f"cut{lap % (min(STAGES) - 1)}", "ArrowLeft"
        yield "slow device", "control-slowdown", str(21 + lap % 19)
        yield "slow links", "control-nic", str(20 - lap % 12)
        yield "schedule", "control-schedule", ("gpipe", "1f1b")[lap % 2]
        yield "stages", "control-stages", str(STAGES[lap % len(STAGES)])
        yield "slow device's rank", "control-slow", str(lap % 60)
        yield "microbatch size", "control-microbatch", str((8, 2, 4)[lap % 3])
        yield "bucket", "control-bucket", str(26 + lap)


def main() -> int:
    options = parse_options(__doc__)
    bench = Workbench({START.model: OfferedModel(open=partial(graphs_of, START.model, ()))})
    server = PlaygroundServer(Service(bench, START))
    server.warm_up()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    driver = start_chromium()
    found = defaultdict(list)
    try:
        driver.set_script_timeout(60)
        driver.get(f"{server.url}?{to_query(START)}")
        while not driver.execute_script(READY):
            pass
        for lap, (what, control, value) in enumerate(changes(3 if options.quick else 15)):
            times = driver.execute_async_script(CHANGE, control, value)
            # The first lap loads compiled code and the browser's own.
            if lap >= 8:
                found[what].append(times)
        spans = driver.execute_script("return document.getElementById('mw-timeline') !== null")
        assert spans
    finally:
        driver.quit()
        server.shutdown()
    every = np.array([times for kind in found.values() for times in kind])
    rows = []
    for name, times, target in (
        ("server", every[:, 0], None),
        ("browser", every[:, 1] - every[:, 0], None),
        ("whole response", every[:, 1], TARGET_MS),
    ):
        rows.append(make_row(f"{name}, median", float(np.median(times)), "ms", target=target))
        rows.append(make_row(f"{name}, p95", float(np.quantile(times, 0.95)), "ms", target=target))
    for what, times in found.items():
        rows.append(
            make_row(f"whole response, median of {len(times)}: {what}", float(np.median(times, axis=0)[1]), "ms")
        )
    timeline = bench.answer(START).simulation.timeline
    notes = f"{timeline.num_ranks} devices, {timeline.num_spans} spans at the start, {len(every)} changes."
    return publish("playground", rows, options, notes)


if __name__ == "__main__":
    sys.exit(main())
