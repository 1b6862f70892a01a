"""The public data sets that can be scored (`DATASETS`); the scoring function of each is imported when it is called."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING

from meshwright.spec import DocumentError, suggest

if TYPE_CHECKING:
    from meshwright.validation.scores import Score

Scorer = Callable[[], "tuple[Score, ...]"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSet:
    """A data set that can be named on the command line.

    ``about`` describes it in a few words. ``score`` returns its scores; ``quick`` returns some of them in less than
    half a minute.
    """

    name: str
    about: str
    score: Scorer
    quick: Scorer


@dataclass(frozen=True, slots=True, kw_only=True)
class Later:
    """A function of this package, named ``module.function``, whose module is imported only when it is called.

    ``quick``: passed to the function if it is not None.
    """

    function: str
    quick: bool | None = None

    def find(self) -> Callable[..., tuple[Score, ...]]:
        """Import the module and return the function itself."""
        module, _, name = self.function.partition(".")
        found: Callable[..., tuple[Score, ...]] = getattr(import_module(f"meshwright.validation.{module}"), name)
        return found

    def __call__(self) -> tuple[Score, ...]:
        """Call the function, with ``quick`` if that is set."""
        return self.find()() if self.quick is None else self.find()(quick=self.quick)


DATASETS = (
    DataSet(
        name="gpu_steps",
        about="training steps of plain PyTorch on an H100, by the path of `plan` and `simulate`",
        score=Later(function="gpu_steps.score_gpu_steps"),
        quick=Later(function="gpu_steps.score_gpu_steps"),
    ),
    DataSet(
        name="collectives",
        about="collectives and products of V100: between sizes, on a larger cluster; NCCL in groups of other sizes",
        score=Later(function="collectives.score_collectives"),
        quick=Later(function="collectives.score_new_groups"),
    ),
    DataSet(
        name="kernels",
        about="GEMM and attention of A100, H100, H200, L40S: other sizes, and devices left out",
        score=Later(function="kernels.score_kernels"),
        quick=Later(function="kernels.score_kernels", quick=True),
    ),
    DataSet(
        name="cpu_ops",
        about="ops of two models left out, measured on one core",
        score=Later(function="cpu_ops.score_cpu_ops"),
        quick=Later(function="cpu_ops.score_cpu_ops", quick=True),
    ),
    DataSet(
        name="memory",
        about="peaks of training here and of published runs",
        score=Later(function="memory_sets.score_memory"),
        quick=Later(function="memory_sets.score_memory"),
    ),
    DataSet(
        name="steps",
        about="published training steps on V100, A100, H100, H200, B200",
        score=Later(function="step_sets.score_steps"),
        quick=Later(function="step_sets.score_steps", quick=True),
    ),
    DataSet(
        name="schedules",
        about="bubbles and speed-ups of pipeline schedules that Zero Bubble states, from its times of stages",
        score=Later(function="schedule_sets.score_schedules"),
        quick=Later(function="schedule_sets.score_schedules", quick=True),
    ),
)


def find_datasets(names: Sequence[str]) -> tuple[DataSet, ...]:
    """Return the data sets with these names, or all without names. Raises DocumentError for an unknown name."""
    known = {dataset.name: dataset for dataset in DATASETS}
    for name in names:
        if name not in known:
            raise DocumentError(f"{name!r} is not a data set that can be scored{suggest(name, known)}.")
    return tuple(known[name] for name in dict.fromkeys(names)) or DATASETS
