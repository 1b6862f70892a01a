"""What a live server answers is what its own /openapi.json says, for requests that schemathesis makes of it."""

import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings

import meshwright.serving.server
from tests.serving.server.servers import EMULATED, serving

schemathesis = pytest.importorskip("schemathesis", reason="schemathesis is not installed")
checks = pytest.importorskip("schemathesis.specs.openapi.checks")

DOCUMENT = json.loads((Path(meshwright.serving.server.__file__).parent / "openapi.json").read_text())
OPERATIONS = [
    (method, path, mode)
    for path, methods in DOCUMENT["paths"].items()
    for method in ("get", "post")
    # Requests that are not of the document differ from it in their body.
    for mode in (("positive", "negative") if method == "post" else ("positive",))
    if method in methods
]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with serving(tmp_path_factory.mktemp("openapi"), EMULATED) as server:
        yield server
        assert server.end() == 0


@pytest.fixture(scope="module")
def api(server):
    return schemathesis.openapi.from_url(f"http://127.0.0.1:{server.port}/openapi.json")


@pytest.mark.long
@pytest.mark.parametrize(("method", "path", "mode"), OPERATIONS)
def test_answers_are_those_of_the_document(api, method, path, mode):
    operation = api[path][method.upper()]
    # Names of models, and which shapes and datatypes each takes, cannot be in one document: a request may be of the
    # document and yet refused. Every other one asks for the model that is there.
    excluded = [checks.positive_data_acceptance] if "{model}" in path else []
    asked = [0]

    @settings(max_examples=25, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
    @given(case=operation.as_strategy(generation_mode=schemathesis.GenerationMode(mode)))
    def ask(case):
        asked[0] += 1
        if "{model}" in path and asked[0] % 2:
            case.path_parameters["model"] = "m"
        case.call_and_validate(excluded_checks=excluded, timeout=30)

    ask()
    assert asked[0]
