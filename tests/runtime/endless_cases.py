"""The layouts under which schedules that never flush are compared with delayed gradients in one process."""

from itertools import product

from tests.runtime.cases import OPTIMIZERS, Layout, one_each

NUM_STEPS = 5
SCHEDULES = ("pipedream", "pipedream-vertical", "pipedream-2bw")
_STAGES = {2: [(1, 1), (2,)], 4: [(1, 1, 1, 1), (2, 2), (3, 1), (1, 2, 1), (1, 3)]}
_WAVES = {2: [(1, 1), (2,)], 4: [(2, 2)]}
# A wave more behind, and repairs of staleness, by their names in a layout.
LATE = "hetpipe-late"
REPAIRS = {
    "pipedream+predict": ("predict", 0),
    "pipedream+discount": ("discount", 0),
    "pipedream-vertical+predict": ("predict", 0),
    "pipedream-2bw+predict": ("predict", 0),
    "pipedream+fading": ("discount", 20),
}
_REPAIRED = {2: [], 4: [(1, 1, 1, 1), (2, 2)]}
CASES = {
    world: [
        Layout(stages, schedule, optimizer)
        for stages, schedule, optimizer in (
            *product(_STAGES[world], SCHEDULES, OPTIMIZERS),
            *product(_WAVES[world], ("hetpipe", LATE), OPTIMIZERS),
            *product(_REPAIRED[world], REPAIRS, OPTIMIZERS),
        )
        if len(stages) > 1 or schedule in ("pipedream", "hetpipe", LATE)
        if not (schedule == LATE and stages == (1, 1))
    ]
    for world in (2, 4)
}
MODELS = ("gpt", "u-net", "two-towers", "resnet", "stranger-dropout")
_FEW = ("1-1/pipedream/adamw", "2-2/pipedream-vertical/sgd")


def main_cases(model, world):
    """Those of a model that CI tries: every schedule in every layout, with one of two models and one optimizer."""
    if model not in MODELS[:2]:
        return [case for case in CASES[world] if case.key in _FEW]
    return one_each(CASES[world], MODELS.index(model))


def all_cases(model, world):
    """All of them."""
    return CASES[world]
