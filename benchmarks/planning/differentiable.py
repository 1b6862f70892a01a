"""Differentiable arms on the slicing problem of pipeDejavu's notebook, beside controls without gradients.

Instances and seeds: `splits/planner_differentiable.json`; tuned on other seeds than those scored. A gap is what an
answer costs above the exact optimum, over the optimum. Answers are checked here: edges that ascend, the cost anew.
Seconds are CPU time of one answer with compiled code loaded, the slowest of all instances.

Controls: repair alone starts from the notebook's uniform split; random starts are uniform among all cuttings, or near
even compute, as those of the arms (but for gradients). Those named "for as long" are repeated for the CPU time that
`gumbel` took on the same instance.

Then problems without an exact method (`unequal_devices`), plans whose step is only measured (`measured`), and where
model and plan do couple (`coupling`).
"""

import itertools
import time

import numpy as np
from harness import make_row
from planning.chain import solve_chain
from planning.chain_arms import CHAIN_ARMS
from planning.chain_arms.repair import Repaired
from planning.chains import scored
from planning.coupling import coupling_rows
from planning.measured import measured_rows
from planning.unequal_devices import unequal_rows

MEAN_GAP, WORST_GAP, MOST_S, SPREAD = 0.01, 0.05, 3.0, 0.5


def rows(quick):
    return [*chain_rows(quick), *unequal_rows(quick), *measured_rows(quick), *coupling_rows()]


def chain_rows(quick):
    problems = [problem for _, problem in scored()][:: 7 if quick else 1]
    optima = [solve_chain(problem).cost for problem in problems]
    table, as_gumbel = [], []
    for name, arm in CHAIN_ARMS.items():
        arm(problems[0], np.random.default_rng(0))
        answers, seconds = _answers(arm, problems)
        as_gumbel = seconds if name == "gumbel" else as_gumbel
        table += _rows(name, answers, seconds, problems, optima, scored=True)
    controls = {"repair alone": _uniform_split, "random start + repair": _random_start}
    for name, start in controls.items():
        answers, seconds = _answers(lambda problem, random, start=start: _repaired(problem, start, random), problems)
        table += _rows(name, answers, seconds, problems, optima)
    for name, start in {"random starts, for as long": _random_start, "even starts, for as long": _near_even}.items():
        pairs = zip(problems, as_gumbel, strict=True)
        answers = [_repaired(problem, start, np.random.default_rng(0), seconds) for problem, seconds in pairs]
        table += _rows(name, answers, as_gumbel, problems, optima)
    return table


def _answers(arm, problems):
    """The answer to each problem, and its CPU seconds."""
    answers, seconds = [], []
    for problem in problems:
        start = time.process_time()
        answers.append(arm(problem, np.random.default_rng(0)))
        seconds.append(time.process_time() - start)
    return answers, seconds


def _rows(name, answers, seconds, problems, optima, *, scored=False):
    gaps = np.array([(answer.cost - optimum) / optimum for answer, optimum in zip(answers, optima, strict=True)])
    invalid = sum(not _is_valid(problem, answer) for problem, answer in zip(problems, answers, strict=True))
    spread = float(np.quantile(gaps, 0.9) - np.quantile(gaps, 0.1)) / 2
    targets = (MEAN_GAP, WORST_GAP, 0, MOST_S) if scored else (None,) * 4
    return [
        make_row(f"{name}: mean gap", float(gaps.mean()), "", spread=spread, target=targets[0]),
        make_row(f"{name}: worst gap", float(gaps.max()), "", target=targets[1]),
        make_row(f"{name}: exactly optimal", float((gaps < 1e-9).mean()), "of all"),
        make_row(f"{name}: invalid answers", invalid, f"of {len(answers)}", target=targets[2]),
        make_row(f"{name}: slowest", max(seconds), "CPU s", target=targets[3]),
    ]


def _is_valid(problem, answer):
    edges = np.array(answer.edges)
    if edges[0] != 0 or edges[-1] != problem.num_layers or len(edges) != problem.num_stages + 1:
        return False
    stages = [problem.layer_costs[i:j].sum() for i, j in itertools.pairwise(edges)]
    cuts = problem.cut_costs[edges[1:-1] - 1, np.arange(problem.num_stages - 1)].sum()
    cost = (problem.num_microbatches - 1) * max(stages) + cuts
    return bool((np.diff(edges) > 0).all()) and abs(cost - answer.cost) <= 1e-9 * cost


def _repaired(problem, start, random, seconds=0.0):
    """The best of repaired starts: one, or as many as fit into CPU seconds."""
    end, repaired = time.process_time() + seconds, Repaired(problem)
    repaired.keep(start(problem, random))
    while time.process_time() < end:
        repaired.keep(start(problem, random))
    return repaired.best


def _uniform_split(problem, _):
    return problem.cut_evenly().edges


def _random_start(problem, random):
    inner = 1 + random.choice(problem.num_layers - 1, problem.num_stages - 1, replace=False)
    return np.concatenate([[0], np.sort(inner), [problem.num_layers]])


def _near_even(problem, random):
    """Boundaries up to half a mean stage from even compute."""
    before, cuts = problem.before(), np.arange(1, problem.num_stages)
    wanted = before[-1] / problem.num_stages * (cuts + SPREAD * random.uniform(-1, 1, len(cuts)))
    return np.concatenate([[0], np.abs(before[:, None] - wanted).argmin(axis=0), [problem.num_layers]])
