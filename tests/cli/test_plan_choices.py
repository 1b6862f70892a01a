"""Options of `plan` restrict what it searches."""

import pytest

from meshwright.cli.plan.plan_command import read_choices
from meshwright.cli.validate import read_request
from meshwright.spec import Workload, load_shipped_graph


@pytest.mark.parametrize(
    ("options", "expected"),
    [((), {False, True}), (("--no-sequence-parallel",), {False}), (("--sequence-parallel",), {True})],
)
def test_sequence_parallelism_is_searched_unless_an_option_says_which(options, expected):
    request = read_request(("gpt-tiny", "--cluster", "2xcpu", "--tensor", "2", *options))
    choices = read_choices(request, load_shipped_graph("gpt-tiny"), Workload(global_batch=8), ())
    assert {sharding.sequence_parallel for sharding in choices.shardings} == expected
