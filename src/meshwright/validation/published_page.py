"""Published runs beside predictions: as cells of a table, as plain rows, and as a page in Markdown."""

from __future__ import annotations

import shlex
from dataclasses import asdict
from datetime import UTC, datetime
from statistics import mean, median
from typing import TYPE_CHECKING, Any

from meshwright.spec.units import format_seconds

if TYPE_CHECKING:
    from collections.abc import Sequence

    from meshwright.validation.published import Compared, PublishedRuns

HEADINGS = ("run", "GPUs", "published", "predicted", "80 %", "error", "inside")

_HEAD = """# Published runs

**What would `plan` have said of training runs that people know?** Each run below is one command, its published
figure, and what the command predicts.

- **Nothing is fitted to these rows.** The commands are planned as on the command line, with the costs that ship:
  tables of kernels and of collectives, datasheets, and own measurements of ops on one H100
  ([cost](concepts/cost.md)).
- **Runs were chosen by how well known they are, before they were predicted.** None was dropped for its error. Two
  details of shape files were set after a first look, because the software has them: the padded vocabulary of llm.c
  (without it 467 ms were predicted for 124M) and the dropout of Megatron-LM (without it the five rows had errors of
  -15, -2, +3, -42 and -20 %).
- **Error** is of the step: (predicted − published) / published, so above 0 `plan` is too slow. A published
  throughput is turned into seconds of a step by the tokens of the batch.
- **80 %** is the [interval](concepts/intervals.md) of the predicted step. An honest interval holds 8 of 10
  published figures; a wide one says that few of the costs behind it were measured on that kind of device.
- A command says layout, batch, sequence length, precision, recompute and
  [software](concepts/step-times.md#software). What a run has that no option can say stands beside it, as "not in the
  command". The software `megatron` has one figure that is fitted on runs of vTrain: how fast its host is.

Made on {date} by `{command}`.

{summary}
"""
COMMAND = "meshwright validate --published --out docs/published.md"


def cells(compared: Sequence[Compared]) -> list[list[str]]:
    """Texts for `HEADINGS`: one row per run, all times of one step."""
    return [
        [
            item.run.title,
            f"{item.predicted.num_devices:,}",
            format_seconds(item.published_s),
            format_seconds(item.predicted.step_s),
            f"{format_seconds(item.predicted.low_s)}–{format_seconds(item.predicted.high_s)}",
            f"{item.error:+.1f} %",
            "yes" if item.inside else "no",
        ]
        for item in compared
    ]


def rows(compared: Sequence[Compared]) -> list[dict[str, Any]]:
    """One plain row per run, for ``--json``."""
    return [
        {
            **{key: value for key, value in asdict(item.run).items() if value},
            "num_devices": item.predicted.num_devices,
            "published_s": item.published_s,
            "step_time_s": item.predicted.step_s,
            "step_interval_s": [item.predicted.low_s, item.predicted.high_s],
            "error_percent": item.error,
            "inside": item.inside,
        }
        for item in compared
    ]


def summarise(compared: Sequence[Compared]) -> str:
    """How far the predictions are, in one sentence."""
    errors = [abs(item.error) for item in compared]
    inside = sum(item.inside for item in compared)
    runs = "1 run" if len(errors) == 1 else f"{len(errors)} runs"
    return (
        f"{runs}: mean error {mean(errors):.0f} %, median {median(errors):.0f} %, largest {max(errors):.0f} %; "
        f"{inside} of {len(errors)} published figures lie in the 80 % interval."
    )


def published_page(runs: PublishedRuns, compared: Sequence[Compared]) -> str:
    """The page of all runs."""
    head = _HEAD.format(date=datetime.now(UTC).strftime("%Y-%m-%d"), command=COMMAND, summary=summarise(compared))
    table = "".join("| " + " | ".join(row) + " |\n" for row in (HEADINGS, ["---"] * len(HEADINGS), *cells(compared)))
    causes = "".join(f"- {text}\n" for text in runs.causes)
    unsaid = "".join(f"- {item.title}: {item.reason}.\n" for item in runs.left_out)
    return (
        f"{head}\n{table}\n## Known causes of the errors\n\n{causes}\n## The commands\n\nCommands that name "
        "`examples/published/…` are run in a checkout, where these shape files are; each says where its sizes come "
        "from. They need torch, which captures the model (`pip install 'meshwright[torch]'`).\n"
        + "".join(map(run_section, compared))
        + f"\n## Left out\n\nRuns that people know and that no command says today:\n\n{unsaid}"
    )


def run_section(item: Compared) -> str:
    """One run: where its figure stands, its command, what is predicted."""
    run, predicted = item.run, item.predicted
    derived = f" ({run.derived})" if run.derived else ""
    figure = f"{run.value:g} s per step" if run.unit == "s" else f"{run.value:,.5g} tokens/s per GPU"
    rate = predicted.tokens / predicted.num_devices / predicted.step_s
    said = f"{format_seconds(predicted.step_s)} per step" if run.unit == "s" else f"{rate:,.0f} tokens/s per GPU"
    lines = [
        f"\n### {run.title}\n",
        f"Published: **{figure}**{derived}; [{run.citation}]({run.link}), {run.place}.\n",
        f"```bash\n{_folded(run.command)}\n```\n",
        f"Predicted: **{said}**, error of the step {item.error:+.1f} %, published figure "
        f"{'inside' if item.inside else 'outside'} of the interval.",
    ]
    if run.differs:
        lines[-1] += f" Not in the command: {run.differs}"
    return "\n".join(lines) + "\n"


def _folded(command: str) -> str:
    """The command over several lines, an option with its value never parted."""
    lines, line = [], ""
    for word in _with_values(shlex.split(command)):
        if line and len(line) + len(word) > 96:
            lines.append(f"{line} \\")
            line = f"    {word}"
        else:
            line = f"{line} {word}".strip() if not line.startswith(" ") else f"{line} {word}"
    return "\n".join([*lines, line])


def _with_values(words: Sequence[str]) -> list[str]:
    joined: list[str] = []
    for word in map(shlex.quote, words):
        if joined and joined[-1].startswith("-") and " " not in joined[-1] and not word.startswith("-"):
            joined[-1] += f" {word}"
        else:
            joined.append(word)
    return joined
