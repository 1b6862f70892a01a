"""Published training runs, each as a command of ``plan``: the published and the predicted figure.

The runs are in ``data/published_runs.toml``, the shape files of their commands in ``data/published/`` (and, for
readers of the page, in ``examples/published/``). No cost is fitted here: a function that is passed in plans each
command as the command line does.
"""

from __future__ import annotations

import math
import shlex
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal, NamedTuple

from meshwright.spec import DocumentError, suggest
from meshwright.spec.codec import read_document

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

Unit = Literal["s", "tokens/s/GPU"]
_COMMAND = ("meshwright", "plan")
# Where the page finds the shape files; they ship beside the data.
SHAPES = "examples/published/"


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedRun:
    """A run that somebody measured, the figure that was published, and the command that plans it.

    ``place`` says where in the source (``citation``, ``link``) the figure stands, ``derived`` how ``value`` follows
    from the printed figure where it is not that itself. ``differs``: what of the run the command cannot say.
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
                raise DocumentError(f"published run {self.name!r}: {field} is empty. Say it.")
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
        """The arguments after ``meshwright plan``, with the shipped shape files in place of those of the examples."""
        words = shlex.split(self.command)[len(_COMMAND) :]
        return tuple(
            str(_data() / "published" / word.removeprefix(SHAPES)) if word.startswith(SHAPES) else word
            for word in words
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class OmittedRun:
    """A well-known run that no command of ``plan`` can express today, and why."""

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
            raise DocumentError(f"Published runs: {', '.join(twice)} twice. Give every run a name of its own.")

    def named(self, names: Sequence[str]) -> tuple[PublishedRun, ...]:
        """The named runs, or all. Raises DocumentError for another name."""
        known = {run.name: run for run in self.runs}
        for name in names:
            if name not in known:
                raise DocumentError(
                    f"{name!r} is not a published run{suggest(name, known)}. Choose among {', '.join(known)}."
                )
        return tuple(known[name] for name in dict.fromkeys(names)) or self.runs


class Predicted(NamedTuple):
    """The prediction of ``plan`` for a run: devices, tokens of a step, seconds of a step and their 80 % interval."""

    num_devices: int
    tokens: int
    step_s: float
    low_s: float
    high_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """A run with its prediction, in seconds of a step whatever was published."""

    run: PublishedRun
    predicted: Predicted

    @property
    def published_s(self) -> float:
        """The published figure as seconds of a step."""
        if self.run.unit == "s":
            return self.run.value
        return self.predicted.tokens / self.predicted.num_devices / self.run.value

    @property
    def error(self) -> float:
        """The error of the predicted step in per cent of the published one; above 0 if the prediction is too slow."""
        return 100 * (self.predicted.step_s / self.published_s - 1)

    @property
    def inside(self) -> bool:
        """Whether the published step lies in the 80 % interval."""
        return self.predicted.low_s <= self.published_s <= self.predicted.high_s


def load_runs(path: Path | None = None) -> PublishedRuns:
    """The shipped runs, or those of a file. Raises DocumentError for an invalid file."""
    return read_document(PublishedRuns, path or _data() / "published_runs.toml")


def compare_runs(runs: Sequence[PublishedRun], plan: Callable[[Sequence[str]], Predicted]) -> Iterator[Compared]:
    """Predict one run after the other; ``plan`` gets the arguments after ``meshwright plan``."""
    for run in runs:
        yield Compared(run=run, predicted=plan(run.words))


def _data() -> Path:
    return Path(str(resources.files("meshwright.validation") / "data"))
