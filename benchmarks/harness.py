"""What all benchmarks share: options, rows, paired ratios, dated reports.

A row is {name, value, unit, baseline, ratio, spread, target, met, command}; ``met`` is computed from value or ratio
and target.
"""

from __future__ import annotations

import argparse
import json
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

import numpy as np

REPORTS = Path(__file__).parent / "reports"
# How tables say whether a target was met.
MET = {None: "", True: "yes", False: "**no**"}


@dataclass(frozen=True, kw_only=True)
class Row:
    """One result. ``target`` bounds ``ratio`` from above if there is one, else ``value``; None if not scored."""

    name: str
    value: float
    unit: str
    baseline: float | None = None
    ratio: float | None = None
    spread: float | None = None
    target: float | None = None
    met: bool | None = None


def make_row(name: str, value: float, unit: str, *, target: float | None = None, **facts: float | None) -> Row:
    """A row with ``met`` computed; numbers of numpy become Python's, which JSON takes."""
    value, plain = float(value), {key: None if fact is None else float(fact) for key, fact in facts.items()}
    scored = plain["ratio"] if plain.get("ratio") is not None else value
    return Row(
        name=name,
        value=value,
        unit=unit,
        target=target,
        met=None if target is None else bool(scored <= target),
        **plain,
    )


def prediction_row(name: str, predicted_s: float, seconds: np.ndarray) -> Row:
    """A prediction beside the median of what was measured; the spread is half that of the middle 80 %, over it."""
    low, measured, high = np.quantile(seconds, [0.1, 0.5, 0.9])
    return make_row(
        name,
        predicted_s,
        "s",
        baseline=float(measured),
        ratio=float(predicted_s / measured),
        spread=float((high - low) / 2 / measured),
    )


def score_row(predictions: list[Row], target: float) -> Row:
    """The median of |predicted - measured| / measured, and half the spread of its middle 80 %."""
    errors = [abs(row.ratio - 1.0) for row in predictions]
    low, high = np.quantile(errors, [0.1, 0.9])
    return make_row("median relative error", float(np.median(errors)), "", spread=float(high - low) / 2, target=target)


def paired_ratios(ours: Callable[[], float], theirs: Callable[[], float], pairs: int) -> tuple[np.ndarray, np.ndarray]:
    """Times of both arms, alternated ABBA within one run: two arrays of ``pairs`` seconds."""
    first, second = np.zeros(pairs), np.zeros(pairs)
    for pair in range(pairs):
        for arm in ((0, 1), (1, 0))[pair % 2]:
            (first if arm == 0 else second)[pair] = (ours if arm == 0 else theirs)()
    return first, second


def ratio_row(name: str, ours: np.ndarray, theirs: np.ndarray, target: float | None = None) -> Row:
    """Median of the pairwise ratios; the spread is the half width of the middle 80 % of them over the median."""
    ratios = np.sort(ours / theirs)
    low, high = np.quantile(ratios, [0.1, 0.9])
    middle = float(np.median(ratios))
    return make_row(
        name,
        float(np.median(ours)),
        "s",
        baseline=float(np.median(theirs)),
        ratio=middle,
        spread=float(high - low) / 2 / middle,
        target=target,
    )


def format_table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """A table in markdown."""
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *lines))


def parse_options(description: str, only: tuple[str, ...] = ()) -> argparse.Namespace:
    """The options of every benchmark: --quick and --json OUT; with sections, --only SECTION."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--quick", action="store_true", help="fewer repetitions; for a look, not for a figure")
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    parser.add_argument("--no-report", action="store_true", help="write no dated report")
    if only:
        parser.add_argument("--only", choices=only, action="append", help="one section alone; repeat for several")
    return parser.parse_args()


def publish_sections(name: str, description: str, sections: Mapping[str, Callable[[bool], list[Row]]]) -> int:
    """Run the sections that --only names, or all; publish their rows. Sections take whether the run is a quick one."""
    options = parse_options(description, tuple(sections))
    rows = [row for section in options.only or sections for row in sections[section](options.quick)]
    return publish(name, rows, options, label="-".join(options.only or ()))


def publish(name: str, rows: list[Row], options: argparse.Namespace, notes: str = "", label: str = "") -> int:
    """Print the rows, write JSON and a dated report; returns 1 if a target was missed.

    ``label`` are the sections that ran, if not all did.
    """
    import torch

    chosen = "".join(f" --only {part}" for part in label.split("-") if part)
    command = f"python benchmarks/{name}.py{chosen}" + (" --quick" if options.quick else "")
    lines = []
    for row in rows:
        cells = [row.name, f"{row.value:.4g} {row.unit}"]
        cells += ["" if x is None else f"{x:.4g}" for x in (row.baseline, row.ratio, row.spread, row.target)]
        lines.append([*cells, MET[row.met]])
    table = format_table(("name", "value", "baseline", "ratio", "spread", "target", "met"), lines)
    print(table)
    if notes:
        print(notes)
    if options.json is not None:
        options.json.write_text(json.dumps([{**asdict(row), "command": command} for row in rows], indent=2) + "\n")
    if not options.no_report and not options.quick:
        date = datetime.now(UTC).strftime("%Y-%m-%d")
        versions = f"Python {platform.python_version()}, torch {torch.__version__}"
        head = (
            f"# {name}, {date}\n\n`{command}` on {_processor()}, {platform.system()}, {versions}. "
            "Spread: half width of the middle 80 % over the median.\n\n"
        )
        (REPORTS / f"{date}-{'-'.join(filter(None, (name, label)))}.md").write_text(
            head + table + "\n" + (f"\n{notes}\n" if notes else "")
        )
    return int(any(row.met is False for row in rows))


def _processor() -> str:
    import os

    model = "unknown processor"
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [
            line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")
        ]
        model = names[0] if names else model
    return f"{len(os.sched_getaffinity(0))} cores of {model}"
