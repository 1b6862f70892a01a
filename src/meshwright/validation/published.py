"""Compare published training runs with the predictions of `meshwright plan` (`compare_runs`).

The runs are in ``data/published_runs.toml``, the shape files of their commands in ``data/published/`` (and, for readers
of the page, in ``examples/published/``). No cost is fitted here: a function that is passed in plans each command as the
command line does. Results are written as rows, as cells of a table, and as a page (`published_page`).
"""

from __future__ import annotations

import math
import shlex
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib import resources
from pathlib import Path
from statistics import mean, median
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

from meshwright.spec import DocumentError, format_seconds, read_document, suggest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence


HEADINGS = ("run", "GPUs", "published", "predicted", "80 %", "error", "inside")

_HEAD = """# Published runs

**What would `plan` have said of training runs that people know?** Each run below is one command, its published
figure, and what the command predicts.

- **Nothing is fitted to these rows.** The commands are planned as on the command line, with the costs that ship:
  tables of kernels and of collectives, datasheets, and our own measurements of ops on one H100
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
  [software](concepts/step-times.md#software). What a run has that no option expresses is listed with it, as "not in the
  command". The software `megatron` has one figure that is fitted on runs of vTrain: how fast its host is.

Made on {date} by `{command}`.

{summary}
"""
COMMAND = "meshwright validate --published --out docs/published.md"


def cells(compared: Sequence[Compared]) -> list[list[str]]:
    """Return the cells of a table with `HEADINGS`: one row per run; all times are those of one step."""
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
    """Return one row of values by name per run, for ``--json``."""
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
    """Return one sentence: mean, median and largest error, and how many figures lie in the 80 % interval."""
    errors = [abs(item.error) for item in compared]
    inside = sum(item.inside for item in compared)
    runs = "1 run" if len(errors) == 1 else f"{len(errors)} runs"
    return (
        f"{runs}: mean error {mean(errors):.0f} %, median {median(errors):.0f} %, largest {max(errors):.0f} %; "
        f"{inside} of {len(errors)} published figures lie in the 80 % interval."
    )


def published_page(runs: PublishedRuns, compared: Sequence[Compared]) -> str:
    """Return the page of all runs in Markdown (docs/published.md)."""
    head = _HEAD.format(date=datetime.now(UTC).strftime("%Y-%m-%d"), command=COMMAND, summary=summarise(compared))
    table = "".join("| " + " | ".join(row) + " |\n" for row in (HEADINGS, ["---"] * len(HEADINGS), *cells(compared)))
    causes = "".join(f"- {text}\n" for text in runs.causes)
    unsaid = "".join(f"- {item.title}: {item.reason}.\n" for item in runs.left_out)
    return (
        f"{head}\n{table}\n## Known causes of the errors\n\n{causes}\n## The commands\n\nCommands that name "
        "`examples/published/…` are run in a checkout, where these shape files are; each says where its sizes come "
        "from. They need torch, which captures the model (`pip install 'meshwright[torch]'`).\n"
        + "".join(map(run_section, compared))
        + f"\n## Left out\n\nWell-known runs without a row:\n\n{unsaid}"
    )


def run_section(item: Compared) -> str:
    """Return the page's section on one run: published figure and its source, command, prediction."""
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


Unit = Literal["s", "tokens/s/GPU"]
_COMMAND = ("meshwright", "plan")
# Where the page finds the shape files; they ship with the data.
SHAPES = "examples/published/"


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedRun:
    """A measured run, its published figure, and the command that plans it.

    ``value`` is the figure, in ``unit``; ``place`` is where the source (``citation``, ``link``) prints it. ``derived``:
    how ``value`` follows from the printed figure, "" if they are equal. ``differs``: what the command cannot express
    about the run.
    """

    name: str
    title: str
    citation: str
    place: str
    link: str
    value: float
    unit: Unit
    derived: str = ""
    differs: str = ""
    command: str

    def __post_init__(self) -> None:
        for field in ("name", "title", "citation", "place"):
            if not getattr(self, field).strip():
                raise DocumentError(f"published run {self.name!r}: {field} is empty. Fill it in.")
        if not self.link.startswith("https://"):
            raise DocumentError(f"published run {self.name!r}: link is {self.link!r}; expected https://….")
        if not (math.isfinite(self.value) and self.value > 0):
            raise DocumentError(f"published run {self.name!r}: value is {self.value}; expected a figure above 0.")
        try:
            words = shlex.split(self.command)
        except ValueError as error:
            raise DocumentError(f"published run {self.name!r}: the command cannot be read ({error}).") from None
        if tuple(words[:2]) != _COMMAND or len(words) == len(_COMMAND):
            raise DocumentError(f"published run {self.name!r}: expected a command `meshwright plan MODEL …`.")

    @property
    def words(self) -> tuple[str, ...]:
        """The arguments after ``meshwright plan``; paths in ``examples/published/`` become the shipped shape files."""
        words = shlex.split(self.command)[len(_COMMAND) :]
        return tuple(
            str(_data() / "published" / word.removeprefix(SHAPES)) if word.startswith(SHAPES) else word
            for word in words
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class OmittedRun:
    """A well-known run that no command of ``plan`` can express today, and the reason."""

    title: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedRuns:
    """All runs in the order of the page, known causes of large errors, and runs that are left out."""

    runs: tuple[PublishedRun, ...]
    causes: tuple[str, ...] = ()
    left_out: tuple[OmittedRun, ...] = ()

    SCHEMA_VERSION: ClassVar[int] = 1

    def __post_init__(self) -> None:
        names = [run.name for run in self.runs]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise DocumentError(f"Published runs: several are named {', '.join(twice)}. Give every run its own name.")

    def named(self, names: Sequence[str]) -> tuple[PublishedRun, ...]:
        """Return the runs with these names, or all runs without names. Raises DocumentError for an unknown name."""
        known = {run.name: run for run in self.runs}
        for name in names:
            if name not in known:
                raise DocumentError(
                    f"{name!r} is not a published run{suggest(name, known)}. Choose among {', '.join(known)}."
                )
        return tuple(known[name] for name in dict.fromkeys(names)) or self.runs


class Predicted(NamedTuple):
    """The prediction of ``plan`` for a run: devices, tokens per step, seconds per step and their 80 % interval."""

    num_devices: int
    tokens: int
    step_s: float
    low_s: float
    high_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """A published run with its prediction; both are compared in seconds per step."""

    run: PublishedRun
    predicted: Predicted

    @property
    def published_s(self) -> float:
        """The published figure in seconds per step; tokens/s per GPU are converted."""
        if self.run.unit == "s":
            return self.run.value
        return self.predicted.tokens / self.predicted.num_devices / self.run.value

    @property
    def error(self) -> float:
        """The error of the predicted step in per cent of the published step; above 0 if the prediction is too slow."""
        return 100 * (self.predicted.step_s / self.published_s - 1)

    @property
    def inside(self) -> bool:
        """Whether the published step lies in the 80 % interval."""
        return self.predicted.low_s <= self.published_s <= self.predicted.high_s


def load_runs(path: Path | None = None) -> PublishedRuns:
    """Return the shipped published runs, or those of a file. Raises DocumentError for an invalid file."""
    return read_document(PublishedRuns, path or _data() / "published_runs.toml")


def compare_runs(runs: Sequence[PublishedRun], plan: Callable[[Sequence[str]], Predicted]) -> Iterator[Compared]:
    """Yield each run with its prediction; ``plan`` receives the arguments after ``meshwright plan``."""
    for run in runs:
        yield Compared(run=run, predicted=plan(run.words))


def _data() -> Path:
    return Path(str(resources.files("meshwright.validation") / "data"))
