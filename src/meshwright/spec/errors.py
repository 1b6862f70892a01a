"""The exceptions that Meshwright raises for its users.

```
MeshwrightError                 exit code 1
├── DocumentError               a file or document that cannot be read as what it should be
├── GraphError                  a graph that contradicts itself, or a cut that it does not allow
├── ClusterError                a cluster that contradicts itself, or a device that nobody described
├── ScenarioError               a scenario that contradicts itself, or changes what its cluster has not
├── PlanError                   a plan that does not fit its graph, cluster or workload
│   ├── GraphMismatchError      the plan was made for another graph
│   └── NoFeasiblePlanError     nothing fits; names the binding constraint      exit code 3
├── ProgramError                a program that breaks its own rules
│   ├── DeadlockError           a program that can never finish
│   └── ScheduleError           a schedule that orders the work of a plan wrongly, or fails on it
├── ModelReferenceError         a model reference that leads nowhere
├── ScheduleReferenceError      a schedule reference that leads to no schedule, or to a changed one
├── CaptureError                a model that cannot be captured faithfully
├── RewriteError                a rule, a set of rules or a graph that cannot be rewritten with
├── MeasurementError            a measurement that could not be taken
├── RunError                    a run that ended early; names the rank
├── ServingError                a deployment that contradicts itself, or a policy that cannot serve it
└── PlaygroundError             a link or request that means nothing, or a page that cannot be served
```

Every message is one paragraph: what was given, what was expected, what to do.
"""

from __future__ import annotations

from difflib import get_close_matches
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable


class MeshwrightError(Exception):
    """Root of all errors that are meant for the user; the command line prints it without a traceback."""

    exit_code = 1


class DocumentError(MeshwrightError):
    """A file or document that cannot be read as what it should be."""


class GraphError(MeshwrightError):
    """A graph that contradicts itself, or a cut that the graph does not allow."""


class ClusterError(MeshwrightError):
    """A cluster that contradicts itself, or a device that nobody described."""


class ScenarioError(MeshwrightError):
    """A scenario that contradicts itself, or changes what its cluster has not."""


class PlanError(MeshwrightError):
    """A plan that does not fit its graph, its cluster or its workload."""


class GraphMismatchError(PlanError):
    """The plan was made for another graph: the content hashes differ."""


class NoFeasiblePlanError(PlanError):
    """No plan satisfies the constraints; the message names the one that binds."""

    exit_code = 3


class ProgramError(MeshwrightError):
    """A program that breaks its own rules (order, pairing, ranges)."""


class DeadlockError(ProgramError):
    """A program that can never finish; the message names the instructions that wait."""


class ScheduleError(ProgramError):
    """A schedule that orders the work of a plan wrongly, or fails on it; the message names file, line and rule."""


class ModelReferenceError(MeshwrightError):
    """A model reference that leads nowhere."""


class ScheduleReferenceError(MeshwrightError):
    """A schedule reference that leads to no schedule, or to a file that changed since planning."""


class CaptureError(MeshwrightError):
    """A model that cannot be captured faithfully; the message names module or source line."""


class RewriteError(MeshwrightError):
    """A rule, a set of rules or a graph that rewriting cannot work with."""


class MeasurementError(MeshwrightError):
    """A measurement that could not be taken."""


class RunError(MeshwrightError):
    """A run that ended early; the message names the rank and shows its own error."""


class ServingError(MeshwrightError):
    """A deployment that contradicts itself, or a policy that cannot serve it."""


class PlaygroundError(MeshwrightError):
    """A link or request of the playground that means nothing, or a page that cannot be served."""


# A message stays readable; a model has hundreds of modules.
_MOST_NAMED = 48


def suggest(word: str, known: Iterable[str]) -> str:
    """Return ``" (did you mean 'x'?)"`` for the nearest known word; if none is near, the known words or the first."""
    known = sorted(known)
    near = get_close_matches(word, known, n=1, cutoff=0.6)
    if near:
        return f" (did you mean {near[0]!r}?)"
    more = f" and {len(known) - _MOST_NAMED} more" if len(known) > _MOST_NAMED else ""
    return f" (known are {', '.join(known[:_MOST_NAMED])}{more})" if known else ""
