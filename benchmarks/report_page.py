"""Reports of large plans: bytes and seconds of a trace, and of a page until its timeline is painted and responds.

The trace is that of a step of a trillion parameters: 64 stages, 512 microbatches under 1F1B, every transfer, arrow and
change of memory. Beside it stand the same events, each written by `json.dumps`, in alternated runs; the last row
is the same for 8 replicas of the pipeline, drawn in full, and what the process then holds more than before.

The page has a timeline of 64 ranks and 100,000 spans, once as even as a simulated one and once with durations that all
differ, as if measured to the nanosecond. It is opened in headless Chromium from the disk; the clock is the browser's,
from the start of the navigation. A response is the time from a keypress to the frame that shows it. Medians; the first
load of the browser does not count.
"""

from __future__ import annotations

import json
import resource
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
from harness import make_row, paired_ratios, parse_options, publish, ratio_row

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from meshwright.report import write_trace
from meshwright.report.page import page_document, result_part, write_page
from meshwright.simulator import simulate_plan
from meshwright.spec import Stream
from tests.browser.chromium import ReportPage, start_chromium
from tests.graphs import chain_graph, even_bounds, make_plan
from tests.report.page.examples import large_timeline
from tests.simulator.plans import FixedCost, small_cluster

MAX_BYTES, MAX_OPEN_S, MAX_RESPONSE_S, MAX_TRACE_S = 2e6, 1.0, 0.2, 10.0
NUM_STAGES, NUM_MICROBATCHES, NUM_REPLICAS = 64, 512, 8
PAINTED = "return performance.getEntriesByName('meshwright-timeline-painted')[0].startTime"
READY = "return performance.getEntriesByName('meshwright-ready')[0].startTime"
RESPOND = """
const canvas = document.querySelector('#mw-timeline canvas'), found = [];
for (const key of ['+', '+', 'ArrowRight', '+', 'ArrowLeft', '-', '0']) {
  const before = performance.now();
  canvas.dispatchEvent(new KeyboardEvent('keydown', { key, bubbles: true, cancelable: true }));
  await new Promise((done) => requestAnimationFrame(() => setTimeout(done)));
  found.push(performance.now() - before);
}
return found;
"""


def main() -> int:
    options = parse_options(__doc__)
    repeats = 3 if options.quick else 15
    rows, trace_notes = trace_rows(repeats)
    driver = start_chromium()
    try:
        with tempfile.TemporaryDirectory() as folder:
            for name, noise in (("predicted", 0.0), ("measured", 0.05)):
                timeline = large_timeline(noise=noise)
                start = time.perf_counter()
                document = page_document("large", results=[result_part("it", timelines=[timeline])])
                path = write_page(document, Path(folder) / f"{name}.html")
                written_s = time.perf_counter() - start
                loads = [measure(ReportPage(driver, path)) for _ in range(repeats + 1)][1:]
                rows += [
                    make_row(f"{name}: bytes of the page", path.stat().st_size / 1e6, "MB", target=MAX_BYTES / 1e6),
                    make_row(f"{name}: written", written_s, "s"),
                    row(f"{name}: timeline painted", [load[0] for load in loads], MAX_OPEN_S),
                    row(f"{name}: all parts drawn", [load[1] for load in loads], MAX_OPEN_S),
                    row(f"{name}: response, compute streams", [s for load in loads for s in load[2]], MAX_RESPONSE_S),
                    row(f"{name}: response, all streams", [s for load in loads for s in load[3]], MAX_RESPONSE_S),
                ]
    finally:
        driver.quit()
    notes = f"Page: {timeline.num_ranks} ranks, {timeline.num_spans} spans, 1400 pixels wide. {trace_notes}"
    return publish("report_page", rows, options, notes)


def trace_rows(repeats):
    graph = chain_graph(NUM_STAGES)
    plan = make_plan(graph, even_bounds(NUM_STAGES, NUM_STAGES), [1] * NUM_STAGES, NUM_MICROBATCHES, microbatch_size=1)
    cost = FixedCost(cluster=small_cluster(1, NUM_STAGES), forward=1e-3, backward=2e-3, send=1e-4)
    timeline = simulate_plan(plan, graph, cost.cluster, cost=cost).timeline
    with tempfile.TemporaryDirectory() as folder:
        plain, packed, large = (Path(folder) / name for name in ("one.json", "one.json.gz", "many.json"))
        write_trace([timeline], plain)
        events = json.loads(plain.read_text(encoding="utf-8"))["traceEvents"]

        def one_by_one():
            with Path(folder, "theirs.json").open("w", encoding="utf-8") as file:
                file.writelines(json.dumps(event, separators=(",", ":")) + ",\n" for event in events)

        ours, theirs = paired_ratios(timed(lambda: write_trace([timeline], plain)), timed(one_by_one), repeats)
        packing = [timed(lambda: write_trace([timeline], packed))() for _ in range(repeats)]
        many = replicate(timeline, NUM_REPLICAS)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        seconds = timed(lambda: write_trace([many], large))()
        grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
        rows = [
            row("trace of 64 stages x 512 microbatches", ours, MAX_TRACE_S),
            ratio_row("trace, beside json.dumps of each event", ours, theirs),
            make_row("bytes of the trace", plain.stat().st_size / 1e6, "MB"),
            row("packed trace", packing, MAX_TRACE_S),
            make_row("bytes of the packed trace", packed.stat().st_size / 1e6, "MB"),
            make_row(f"trace of {NUM_REPLICAS} such pipelines", seconds, "s"),
            make_row("its bytes", large.stat().st_size / 1e6, "MB"),
            make_row("growth of the process meanwhile", grown / 1e6, "MB"),
        ]
    return rows, f"Trace: {timeline.num_spans} spans, {len(events)} events; {many.num_spans} spans."


def timed(call):
    def run():
        start = time.perf_counter()
        call()
        return time.perf_counter() - start

    return run


def replicate(timeline, count):
    """The timeline of ``count`` pipelines that do the same."""
    which = np.repeat(np.arange(count), timeline.num_spans)
    samples = np.repeat(np.arange(count), len(timeline.memory_rank))
    names = ("opcode", "stage", "microbatch", "peer", "step", "num_bytes", "start_ps", "end_ps")
    columns = {name: np.tile(getattr(timeline, name), count) for name in (*names, "memory_time_ps", "memory_bytes")}
    tracks, ranks = timeline.tracks, timeline.num_ranks
    return replace(
        timeline,
        **columns,
        num_ranks=ranks * count,
        tracks=tuple(Stream(rank=item.rank + k * ranks, name=item.name) for k in range(count) for item in tracks),
        track=(np.tile(timeline.track, count) + which * len(tracks)).astype(np.int32),
        memory_rank=(np.tile(timeline.memory_rank, count) + samples * ranks).astype(np.int32),
        peak_memory_bytes=(),
    )


def measure(page: ReportPage) -> tuple[float, float, list[float], list[float]]:
    """Seconds until painted and until ready, and of each response without and with all streams."""
    page.open()
    painted, ready = page.script(PAINTED) / 1e3, page.script(READY) / 1e3
    few = [milliseconds / 1e3 for milliseconds in page.promise(RESPOND)]
    page.click("#mw-timeline-every")
    return painted, ready, few, [milliseconds / 1e3 for milliseconds in page.promise(RESPOND)]


def row(name, seconds, target):
    middle = float(np.median(seconds))
    low, high = np.quantile(seconds, [0.1, 0.9])
    return make_row(name, middle, "s", spread=float(high - low) / 2 / middle, target=target)


if __name__ == "__main__":
    sys.exit(main())
