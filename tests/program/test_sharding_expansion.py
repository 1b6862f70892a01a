"""Collectives of a sharded graph are those that torch issues: op, ranks, bytes and order, forward and backward."""

from __future__ import annotations

import json

import pytest

from tests.processes import run_ranks
from tests.program.sharding_worker import FAKE_RANKS, MODELS

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(300)]


@pytest.fixture(scope="module", params=[2, 4, FAKE_RANKS])
def results(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("expansion") / "results.json"
    run_ranks("tests.program.sharding_worker", request.param, str(path), timeout_s=240)
    return json.loads(path.read_text(encoding="utf-8"))


@pytest.mark.parametrize("kind", ["tensor", "sequence"])
@pytest.mark.parametrize("name", MODELS)
def test_torch_issues_what_is_expected(results, name, kind):
    expected, found = results[f"{name}/{kind}"]
    assert found == expected
    assert len(found) > 8
