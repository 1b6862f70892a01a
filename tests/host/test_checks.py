"""The whole of the checks: on this machine, on one that tells nothing, on one that tells nonsense."""

import re
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.host import examine
from meshwright.host.findings import HELP_PAGE
from meshwright.host.host import Ran
from meshwright.host.host_checks import AREAS, CHECKS
from tests.docs.blocks import ROOT
from tests.host.machines import DGX_QUERY, DGX_TOPOLOGY, answering, make_host
from tests.host.test_limits import limits
from tests.host.test_links import interface, port
from tests.host.test_processor import BIG, status
from tests.marks import examples

FILES = [*BIG, *status(""), *limits(), *port("mlx5_0"), *interface("eth0"), "/proc/meminfo", "/proc/self/cgroup"]
FILES += ["/sys/fs/cgroup/cpu.max", "/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.stat"]


@pytest.fixture
def without_torch(monkeypatch):
    monkeypatch.setattr("meshwright.host.torch_probe.importlib.util.find_spec", lambda name: None)


def test_every_area_is_told_in_order(tmp_path, without_torch):
    host = make_host(
        tmp_path,
        {**BIG, **status("0-127"), **limits(), **port("mlx5_0"), "/sys/class/infiniband/mlx5_0/": ""},
        run=answering(query=DGX_QUERY, topology=DGX_TOPOLOGY),
    )
    findings = examine(host)
    assert list(dict.fromkeys(finding.area for finding in findings)) == list(AREAS)
    assert all(finding.found for finding in findings)
    assert all(finding.remedy for finding in findings if finding.status != "ok")


def test_a_machine_that_tells_nothing_has_no_problem_for_that(tmp_path, without_torch):
    findings = examine(make_host(tmp_path))
    assert not [finding for finding in findings if finding.status == "problem"]
    assert sum("not known" in finding.found for finding in findings) >= 5


@settings(max_examples=examples(25))
@given(st.text(max_size=60), st.dictionaries(st.sampled_from(FILES), st.text(max_size=40)))
def test_a_machine_that_tells_nonsense_breaks_no_check(answer, texts):
    with tempfile.TemporaryDirectory() as folder:
        usable = {name: text.encode("utf-8", "replace").decode() for name, text in texts.items() if name[-1] != "/"}
        host = make_host(Path(folder), usable, run=lambda *_: Ran(code=0, output=answer))
        for check in CHECKS:
            for finding in check(host):
                assert "Error" not in finding.found


def test_a_check_that_fails_leaves_the_others_alone(tmp_path, without_torch, monkeypatch):
    def check_stars(host):
        raise ZeroDivisionError("no sky")

    monkeypatch.setattr("meshwright.host.host_checks.CHECKS", (check_stars, *CHECKS))
    findings = examine(make_host(tmp_path))
    assert [finding.status for finding in findings if finding.name == "stars"] == ["note"]
    assert len(findings) > 10


def test_every_remedy_leads_to_a_heading_of_the_help_page():
    page = (ROOT / HELP_PAGE).read_text()
    headings = {
        re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        for heading in re.findall(r"^#+ (.+)$", page, re.MULTILINE)
    }
    sources = "".join(path.read_text() for path in (ROOT / "src" / "meshwright" / "host").glob("*.py"))
    topics = set(re.findall(r'"([a-z0-9]+(?:-[a-z0-9]+){2,})"', sources))
    assert len(topics) >= 10
    assert topics <= headings
