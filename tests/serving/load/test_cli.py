"""`serve load` as users type it: what is printed, written and refused."""

import json
from pathlib import Path

import pytest

from meshwright.cli.main import invoke
from tests.serving.load.stub import MODELS, Last, Stub, double, respond

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def load(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")

    def run(url, *options):
        code = invoke(["serve", "load", url, *map(str, options)])
        captured = capsys.readouterr()
        return code, captured.out, " ".join(captured.err.split())

    return run


def test_figures_as_a_table_and_as_json(load):
    options = ("--rate", 200, "--seconds", 1, "--deadline", "20 s", "--seed", 3, "--binary", "--rows", 2)
    Path("token").write_text("secret\n")
    with Stub() as stub:
        code, out, _ = load(stub.url, *options, "--token-file", "token")
        assert code == 0
        assert "requests per second answered in time (100.00 %)" in out
        assert "per request." in out
        code, out, _ = load(stub.url, *options, "--model", "cat", "--out", "found.json", "--json")
    assert code == 0
    document = json.loads(out)
    assert json.loads(Path("found.json").read_text()) == document
    assert document["num_requests"] == document["num_in_time"] == len(stub.requests) / 2
    assert [model["model"] for model in document["models"]] == ["cat"]
    assert document["statuses"] == {"200": document["num_requests"]}
    assert document["lateness_p50_s"] <= document["lateness_p99_s"] <= document["lateness_max_s"]
    assert document["p50_s"] <= document["p90_s"] <= document["p99_s"] <= document["p999_s"] <= document["max_s"]
    assert sum(row["num_in_time"] for row in document["series"]) == document["num_requests"]
    first, last = stub.requests[0], stub.requests[-1]
    assert first.headers["authorization"] == "Bearer secret"
    assert first.document["inputs"][0]["shape"] == [2, 4]
    parameters = last.document["parameters"]
    assert parameters == {"timeout": parameters["timeout"], "binary_data_output": True}
    # What is left of it when the request is sent, however late.
    latest = 1e6 * document["lateness_max_s"] + 1000
    assert 20_000_000 - latest < parameters["timeout"] <= 20_000_000


def test_a_deployment(load):
    Path("served.toml").write_text(
        'schema = "meshwright/deployment/1"\ndevices = 1\n'
        '[[models]]\nname = "cat"\nslo = "5 s"\ncopies = 2\nlatency = { alpha = "1 ms", beta = "1 ms" }\n'
        'arrivals = { kind = "poisson", rate = 40 }\n'
        '[[models]]\nname = "dog"\nslo = "4 s"\nlatency = { alpha = "1 ms", beta = "1 ms" }\n'
        'arrivals = { kind = "gamma", rate = 40, shape = 0.5 }\n'
    )
    with Stub(models=dict.fromkeys(("cat-0", "cat-1", "dog"), MODELS["cat"])) as stub:
        code, out, _ = load(stub.url, "--deployment", "served.toml", "--seconds", 1, "--out", "found.json")
    assert code == 0
    assert "total" in out
    assert {request.model for request in stub.requests} == {"cat-0", "cat-1", "dog"}
    latest = 1e6 * json.loads(Path("found.json").read_text())["lateness_max_s"] + 1000
    for request in stub.requests:
        most = 4_000_000 if request.model == "dog" else 5_000_000
        assert most - latest < request.document["parameters"]["timeout"] <= most


def test_bursts_and_traces(load):
    Path("moments.txt").write_text("0.1\n0.2\n0.3\n")
    with Stub() as stub:
        assert load(stub.url, "--trace", "moments.txt", "--seconds", 0.5)[0] == 0
        assert len(stub.requests) == 3
        assert load(stub.url, "--rate", 100, "--shape", 0.1, "--seconds", 0.5)[0] == 0


def test_exit_codes(load):
    with Stub(lambda request: respond(503, {"error": "full"})) as stub:
        code, out, _ = load(stub.url, "--rate", 50, "--seconds", 0.5)
        assert code == 1
        assert "with status 503" in out
        stub.answer = lambda request: double(request) if request.number % 5 else respond(500, {"error": "no"})
        assert load(stub.url, "--rate", 50, "--seconds", 0.5)[0] == 0
        stub.answer = lambda request: double(request, None if request.number % 5 else "7777777777")
        code, out, _ = load(stub.url, "--rate", 50, "--seconds", 0.5)
        assert code == 1
        assert "wrong" in out


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (
            respond(400, {"error": "Input 'x' has 3 values; expected 4."}),
            "One answer with status 400: Input 'x' has 3 values; ",
        ),
        (respond(418, {"error": "a\x1b[31m\nb" * 200}), "One answer with status 418: a [31m ba [31m b"),
        (respond(502, b"<html>\x00no\xffgateway"), "One answer with status 502: <html> no\ufffdgateway."),
        (respond(500, b""), "One answer with status 500: without a reason."),
    ],
)
@pytest.mark.matrix
def test_one_answer_of_each_status_says_why(load, answer, said):
    with Stub(lambda request: double(request) if request.number % 2 else answer) as stub:
        code, out, _ = load(stub.url, "--rate", 50, "--seconds", 0.5)
        assert code == 0
        assert said in out
        assert len(out) < 2000
        assert all(sign.isprintable() or sign == "\n" for sign in out)
        document = json.loads(load(stub.url, "--rate", 50, "--seconds", 0.5, "--processes", 2, "--json")[1])
    (reason,) = document["reasons"].values()
    assert reason[:10] in said
    assert document["reasons"].keys() == document["statuses"].keys() - {"200"}


@pytest.mark.parametrize("options", [(), ("--model", "cat")])
@pytest.mark.parametrize("has_token", [False, True])
def test_a_server_that_wants_a_token_is_told_from_one_without_the_model(load, options, has_token):
    Path("token").write_text("wrong\n")
    with Stub() as stub:
        stub.refusal = respond(401, {"error": "no"})
        code, out, err = load(stub.url, "--rate", 1, *options, *(("--token-file", "token") if has_token else ()))
    assert (code, out) == (1, "")
    assert "requires a token and got " + ("an invalid token" if has_token else "no token") in err
    assert "--token-file FILE" in err


def test_a_port_that_speaks_something_else(load):
    # What gRPC says first: a frame of SETTINGS (RFC 9113).
    settings = bytes([0, 0, 6, 4, 0, 0, 0, 0, 0, 0, 5, 0, 0, 64, 0]) + b"\x1b[31m\r\n"
    with Stub() as stub:
        stub.refusal = Last(settings)
        code, out, err = load(stub.url, "--rate", 1)
    assert (code, out) == (1, "")
    assert "does not speak HTTP/1.1" in err
    assert "gRPC has a separate port" in err
    assert err.isprintable()


def test_a_server_of_several_models_asks_for_one(load):
    with Stub(models={"cat": MODELS["cat"], "dog": MODELS["cat"]}) as stub:
        code, out, err = load(stub.url, "--rate", 1)
    assert (code, out) == (1, "")
    assert "has 2 models (known are cat, dog). Give --model NAME" in err


def test_a_server_that_is_down(load):
    with Stub() as stub:
        pass
    for options in ((), ("--model", "cat")):
        code, out, err = load(stub.url, "--rate", 1, *options)
        assert (code, out) == (1, "")
        assert "No server answers at 127.0.0.1" in err
        assert "Traceback" not in err


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        ((), 1, "No arrivals were given"),
        (("--rate", 1, "--trace", "x"), 1, "--trace and --rate both set what arrives at the server"),
        (("--deployment", "x.toml", "--model", "cat"), 1, "--deployment and --model both set what arrives at"),
        (("--shape", 1), 1, "No arrivals were given"),
        (("--rate", 1, "--deadline", "50"), 2, "has no unit"),
        (("--rate", 1, "--out", "x.csv"), 1, "ends in .json"),
        (("--rate", 1, "--token-file", "missing"), 1, "missing"),
    ],
)
def test_what_is_refused(load, options, code, message):
    found, out, err = load("http://127.0.0.1:9", *options)
    assert (found, out) == (code, "")
    assert message in err
