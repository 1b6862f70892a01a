"""Matrices of models and layouts that ranks train in one spawn per world size: their cases, and their results."""

import json

import pytest

from tests.processes import run_ranks

FEWEST = 2


def matrix_cases(worlds, models, main_cases, all_cases, optimizers=("sgd", "adamw"), few=()):
    """Which run a case is of, the world size, and its name.

    Always tried are the models ``few`` on two ranks; the other cases of ``main_cases`` are long, all are slow.
    """
    found = []
    for world in worlds:
        for model in models:
            is_few = model in few and world == FEWEST
            main = [case.key for case in main_cases(model, world)]
            for case in all_cases(model, world):
                if case.optimizer in optimizers:
                    which = "all" if case.key not in main else "few" if is_few else "main"
                    marks = {"few": [], "main": [pytest.mark.long], "all": [pytest.mark.slow]}[which]
                    name = f"{model}/{case.key}"
                    found.append(pytest.param(which, world, name, id=f"{world}-{name}", marks=marks))
    return found


def matrix_runs(worker, folder, timeout_s):
    """``run(which, world size, dtype)``: the results of all cases of a run, by name; each is run once."""

    def run(which, world_size, dtype="float64"):
        path = folder / f"{which}-{world_size}-{dtype}.json"
        if not path.exists():
            run_ranks(worker, world_size, which, dtype, str(path), timeout_s=timeout_s)
        return json.loads(path.read_text())

    return run


def assert_equal(result, tolerance=1e-9):
    """State and losses are those of the reference, to 1e-9 per tensor (design: Trust) or what is said."""
    assert result["moved"] > 1e-4, "training must change the model, or equality says nothing"
    assert max(result["tensors"].values()) <= tolerance, result["tensors"]
    found, wanted = result["losses"]
    assert found == pytest.approx(wanted, rel=tolerance)


def cases_of_run(which, main_cases, all_cases, few):
    """``cases(model, world size)`` of a run of a worker."""

    def cases(model, world):
        if which == "all":
            return all_cases(model, world)
        return main_cases(model, world) if (which == "few") == (world == FEWEST and model in few) else []

    return cases
