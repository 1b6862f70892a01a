"""Picking among measured configurations: how much slower is the run that is predicted fastest than the fastest one?

Runs of one model, device count and batch are one choice. Alpa's are on one node of V100s, vTrain's on A100s; rows that
efficiencies were fitted on are left out (`meshwright validate --steps` has all parts). Regret in per cent.
"""

from harness import make_row

from meshwright.validation.step_sets import OURS, score_steps

TARGET = 3.0


def rows(quick):
    del quick
    table = []
    for score in score_steps():
        if score.arm == OURS and score.regret is not None:
            scored = score.part.startswith(("Alpa", "vTrain"))
            target = TARGET if scored else None
            table.append(make_row(f"{score.part}: mean regret", score.regret, "%", target=target))
    return table
