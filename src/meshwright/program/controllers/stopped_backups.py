"""Backup workers that are stopped: late workers abandon their computation and begin the next version with all others.

Of n workers with b backups, the server updates a version when n - b gradients computed on it have arrived. At the end
of the update the other workers abandon their computations, and all n begin the next version. A gradient in flight at
that moment still arrives and is dropped. So a version takes the (n - b)-th smallest of n times, while `BackupWorkers`
lets late workers finish their computation and begin with the version after next. Source: Chen et al., "Revisiting
Distributed Synchronous SGD" (2016).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from meshwright.program.controllers.backup_workers import Backups
from meshwright.program.controllers.iterations import SERVER, arrival, computation, pull, push
from meshwright.spec.control import NOTHING, Decision, Ended, Event, Issue, Started
from meshwright.spec.instructions import Backward, OptimizerStep, Send


@dataclass(frozen=True, slots=True, kw_only=True)
class Race:
    """The current version, how many of its gradients have arrived, and the computing workers with two handles each.

    ``applied``, ``dropped`` and ``abandoned`` count gradients of all versions: in time, too late, and never computed.
    """

    version: int = 0
    num_arrived: int = 0
    computing: tuple[tuple[int, int, int], ...] = ()
    applied: int = 0
    dropped: int = 0
    abandoned: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StoppedBackups(Backups):
    """Late workers abandon their computation."""

    initial: Race = field(default=Race())

    def decide(self, state: Race, event: Event, now_ps: int) -> tuple[Race, Decision]:  # noqa: ARG002
        """Handle the end of a backward, the arrival of a gradient, or the end of an update."""
        match event:
            case Started():
                return self._begin(state, event.next_handle)
            case Ended(instruction=Backward() as backward, rank=worker):
                if backward.version < state.version:
                    return state, NOTHING
                computing = tuple(item for item in state.computing if item[0] != worker)
                sent = push(self.num_workers, 0, worker, backward.microbatch, self.num_bytes, backward=event.handle)
                return replace(state, computing=computing), Decision(issues=(sent,))
            case Ended(instruction=Send() as send, rank=worker):
                return self._arrive(state, worker, send, event.next_handle)
            case Ended(instruction=OptimizerStep()):
                following = replace(state, version=state.version + 1, num_arrived=0)
                return self._begin(following, event.next_handle)
            case _:
                return state, NOTHING

    def _arrive(self, state: Race, worker: int, send: Send, first: int) -> tuple[Race, Decision]:
        """Receive a gradient at the server, and issue the update when it has enough."""
        need, received = self.num_workers - self.num_backups, arrival(self.num_workers, worker, send)
        if send.microbatch // self.num_workers < state.version or state.num_arrived == need:
            return replace(state, dropped=state.dropped + 1), Decision(issues=(received,))
        taken = replace(state, num_arrived=state.num_arrived + 1, applied=state.applied + 1)
        if taken.num_arrived < need:
            return taken, Decision(issues=(received,))
        update = OptimizerStep(stage=SERVER, version=state.version)
        issue = Issue(rank=self.num_workers, stream="compute", instruction=update, waits=(first,), watched=True)
        return taken, Decision(issues=(received, issue))

    def _begin(self, state: Race, first: int) -> tuple[Race, Decision]:
        """Stop workers that still compute, and start all workers on the state's version, if it is to be made."""
        abandon = tuple(handle for _, *handles in state.computing for handle in handles)
        issues, computing = list[Issue](), list[tuple[int, int, int]]()
        for worker in range(self.num_workers if state.version < self.num_versions else 0):
            microbatch = state.version * self.num_workers + worker
            waits: tuple[int, ...] = ()
            if state.version:
                issues += pull(self.num_workers, 0, worker, microbatch, self.num_bytes)
                waits = (first + len(issues) - 1,)
            forward = first + len(issues)
            issues += computation(worker, microbatch, state.version, waits=waits, watched=True, abandonable=True)
            computing.append((worker, forward, forward + 1))
        following = replace(state, computing=tuple(computing), abandoned=state.abandoned + len(state.computing))
        return following, Decision(issues=tuple(issues), abandon=abandon)
