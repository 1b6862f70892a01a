"""The exceptions that Meshwright raises for its users.

```
MeshwrightError                 exit code 1
├── DocumentError               a file or document that cannot be read as the expected kind
├── GraphError                  an inconsistent graph, or a cut that it does not allow
├── ClusterError                an inconsistent cluster, or an unknown device kind
├── ScenarioError               an inconsistent scenario, or one that names what the cluster does not have
├── PlanError                   a plan that does not fit its graph, cluster or workload
│   ├── GraphMismatchError      the plan was made for another graph
│   └── NoFeasiblePlanError     no plan fits; names the binding constraint      exit code 3
├── ProgramError                a program that breaks its own rules
│   ├── DeadlockError           a program that can never finish
│   └── ScheduleError           a schedule that orders the work of a plan wrongly, or fails on it
├── ModelReferenceError         a model reference for which no model is found
├── ScheduleReferenceError      a schedule reference for which no schedule is found, or whose file has changed
├── CaptureError                a model that cannot be captured faithfully
├── RewriteError                a rule, a set of rules or a graph that cannot be used for rewriting
├── MeasurementError            a measurement that could not be taken
├── RunError                    a run that ended early; names the rank
├── ServingError                an inconsistent deployment, or a policy that cannot serve it
└── PlaygroundError             an invalid link or request, or a page that cannot be served
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
    """A file or document that cannot be read as the expected kind."""


class GraphError(MeshwrightError):
    """An inconsistent graph, or a cut that the graph does not allow."""


class ClusterError(MeshwrightError):
    """An inconsistent cluster, or an unknown device kind."""


class ScenarioError(MeshwrightError):
    """An inconsistent scenario, or one that names devices or links that the cluster does not have."""


class PlanError(MeshwrightError):
    """A plan that does not fit its graph, its cluster or its workload."""


class GraphMismatchError(PlanError):
    """The plan was made for another graph: the content hashes differ."""


class NoFeasiblePlanError(PlanError):
    """No plan satisfies the constraints; the message names the binding one."""

    exit_code = 3


class ProgramError(MeshwrightError):
    """An inconsistent program: wrong order, unpaired messages, or values out of range."""


class DeadlockError(ProgramError):
    """A program that can never finish; the message names the waiting instructions."""


class ScheduleError(ProgramError):
    """A schedule that orders the work of a plan wrongly, or fails on it; the message names file, line and rule."""


class ModelReferenceError(MeshwrightError):
    """A model reference for which no model is found."""


class ScheduleReferenceError(MeshwrightError):
    """A schedule reference for which no schedule is found, or whose file has changed since planning."""


class CaptureError(MeshwrightError):
    """A model that cannot be captured faithfully; the message names the module or the source line."""


class RewriteError(MeshwrightError):
    """A rule, a set of rules or a graph that cannot be used for rewriting."""


class MeasurementError(MeshwrightError):
    """A measurement that could not be taken."""


class RunError(MeshwrightError):
    """A run that ended early; the message names the rank and shows its own error."""


class NotFiniteError(RunError):
    """A run that ended because a loss was not finite; it concerns all ranks."""


class ServingError(MeshwrightError):
    """An inconsistent deployment, or a policy that cannot serve it."""


class PlaygroundError(MeshwrightError):
    """An invalid link or request of the playground, or a page that cannot be served."""


# A message stays readable; a model has hundreds of modules.
_MOST_NAMED = 48


def suggest(word: str, known: Iterable[str]) -> str:
    """Return a hint for a message about an unknown word: ``" (did you mean 'x'?)"`` with the nearest known word.

    If no known word is near, the hint lists the known words, at most 48. It is empty if ``known`` is empty.
    """
    known = sorted(known)
    near = get_close_matches(word, known, n=1, cutoff=0.6)
    if near:
        return f" (did you mean {near[0]!r}?)"
    more = f" and {len(known) - _MOST_NAMED} more" if len(known) > _MOST_NAMED else ""
    return f" (known are {', '.join(known[:_MOST_NAMED])}{more})" if known else ""
