"""How far workers were ahead of each other, by the log of a run under bounded delay."""

from meshwright.spec import Backward, OptimizerStep, Receive
from meshwright.spec.decision_log import DecisionLog


def follow_clocks(log: DecisionLog, workers: int) -> tuple[list[int], int]:
    """Applied gradients of each worker, and the most by which a worker that began an iteration was ahead."""
    clocks, updates, lead = [0] * workers, list[int](), 0
    for event, _, decision in log.decisions():
        if isinstance(getattr(event, "instruction", None), OptimizerStep):
            clocks[updates.pop(0)] += 1
        for issue in decision.issues:
            if isinstance(issue.instruction, Receive) and issue.rank == workers:
                updates.append(issue.instruction.microbatch % workers)
            if isinstance(issue.instruction, Backward):
                lead = max(lead, clocks[issue.rank] - min(clocks))
    return clocks, lead
