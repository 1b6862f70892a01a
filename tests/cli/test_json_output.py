"""`--json` of every command is one JSON document on standard output, with a known schema and documented keys."""

import json
import shlex
from pathlib import Path

import pytest

from meshwright.cli.json_output import OUTPUTS
from meshwright.cli.main import invoke
from meshwright.spec.codec import document_kind
from tests.docs.json_page import PAGE, make_page
from tests.marks import left_to_ci

# What the lines below read, made once. Nothing here needs more than this machine.
MADE = (
    "plan gpt-tiny --cluster 2xcpu --stages 2 --batch 8 --schedule 1f1b --out plan.json",
    "plan gpt-tiny --cluster 2xcpu --method place --batch 4 --out placed.json",
    "simulate plan.json --out timeline.json",
    "capture gpt-tiny --out graph.json",
    "run plan.json --steps 2 --out run",
    "measure --links --ranks 2 --out links.parquet",
)
DEPLOYMENT = """
schema = "meshwright/deployment/1"
devices = 2
[[models]]
name = "cat"
slo = "50 ms"
latency = { alpha = "1 ms", beta = "5 ms" }
arrivals = { kind = "poisson", rate = 100 }
"""
FAST = (
    "plan gpt-tiny --cluster 2xH100 --top 2 --tensor 1 --tensor 2 --batch 8",
    "simulate plan.json",
)
LINES = (
    "plan gpt-tiny --cluster 4xcpu",
    "plan gpt2-small --cluster 4xA100 --prices 2.5",
    "plan gpt2-small --cluster 2x2xA100 --zero 0 --zero 1 --recompute none --recompute full -m 4",
    "plan gpt-tiny --cluster 4xcpu --schedule zb-h1 --schedule interleaved --stages 4 --batch 16",
    "plan gpt-tiny --cluster 4xA100 --tensor 2 --method alpa",
    "plan gpt-tiny --cluster 4xA100 --method grid",
    "plan resnet-tiny --cluster 4xcpu --method pipedream --schedule pipedream",
    "plan gpt-tiny --cluster 4xcpu --method differentiable",
    "plan gpt-tiny --cluster 2xcpu --inference --aim latency --batch 4",
    "plan gpt-tiny --cluster 2xcpu --from plan.json",
    "plan gpt-tiny --cluster 2xcpu --find-orders found.csv --stages 2 --batch 8",
    "plan gpt-tiny --cluster 2xcpu --html page.html",
    "plan gpt-tiny --cluster 2xcpu --method place",
    "plan bert-large --cluster 2xcpu --memory-limit 0.5",
    "simulate plan.json --explain",
    "simulate plan.json --against gpipe --exchange all",
    "simulate plan.json --scenario slow-device --run-steps 10",
    "simulate plan.json --sweep plan.num_microbatches=4,8",
    "simulate plan.json --trace trace.json --detail ops",
    "simulate placed.json",
    "simulate served.toml --seconds 1",
    "simulate served.toml --seconds 1 --against eager",
    "show plan.json",
    "show plan.json --schedule",
    "show plan.json --program",
    "show plan.json --as megatron",
    "show placed.json",
    "show timeline.json",
    "show graph.json",
    "show 2x8xH100",
    "show 8xH100 --collectives",
    "show gpt2-small --cluster A100",
    "show gpt2-small --cluster A100 --memory",
    "show zoo",
    "show links.parquet",
    "capture gpt-tiny",
    "capture resnet-tiny --inference --batch-size 2",
    "compare timeline.json run/timeline.json",
    "validate --list",
    "validate schedules --quick",
    "doctor",
    "run plan.json --dry",
    "run plan.json --steps 2",
    "optimize model gpt-tiny",
    "optimize rules verify --sizes 1",
    "measure --cluster --ranks 1 --out here.toml",
)
# Exit codes that go with a document: 1 where `doctor` or a verdict finds something wrong, 3 where nothing fits.
CODES = {"doctor": {0, 1}, "plan bert-large --cluster 2xcpu --memory-limit 0.5": {3}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("json")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        Path("served.toml").write_text(DEPLOYMENT)
        for line in MADE:
            assert invoke(shlex.split(line)) == 0, line
        yield place


@pytest.mark.parametrize("line", [*FAST, *left_to_ci(*LINES)])
@pytest.mark.matrix
def test_standard_output_is_one_document_with_documented_keys(folder, monkeypatch, capfd, line):
    """At the level of file descriptors: what a library prints on its own would be seen."""
    monkeypatch.chdir(folder)
    capfd.readouterr()
    assert invoke([*shlex.split(line), "--json"]) in CODES.get(line, {0}), capfd.readouterr().err
    data = json.loads(capfd.readouterr().out)
    kind, version = data["schema"].removeprefix("meshwright/").split("/")
    if kind not in OUTPUTS:
        assert document_kind(data) == kind
        return
    output = OUTPUTS[kind]
    assert int(version) == output.version
    assert line.split()[0] == output.command.replace(",", "").split()[0]
    if not output.open:
        assert not set(data) - set(output.keys) - {"schema"}


def test_there_are_enough_lines_and_every_kind_is_documented():
    assert len(FAST) + len(LINES) >= 40
    assert PAGE.read_text() == make_page()
