"""Ranges of versions: what is asked for, what is here, and which of it is told."""

import importlib.metadata
import platform
from email import message_from_string

import pytest
from packaging.specifiers import SpecifierSet

from meshwright.host import Host
from meshwright.host.host_checks import check_versions, judge_version, lies_in_range


@pytest.mark.parametrize(
    ("version", "span", "inside"),
    [
        ("2.13.0", ">=2.13,<2.14", True),
        ("2.13.0+cpu", ">=2.13,<2.14", True),
        ("2.13.0a0+5f8c9d2.nv26.10", ">=2.13,<2.14", True),
        ("2.14.0rc1", ">=2.13,<2.14", False),
        ("2.13.1", "==2.13.*", True),
        ("2.14", "==2.13.*", False),
        ("1.4.5", "~=1.4.2", True),
        ("1.5", "~=1.4.2", False),
        ("3.9", ">=3.11", False),
        ("unknown", ">=1", False),
    ],
)
def test_forms_of_versions(version, span, inside):
    assert lies_in_range(version, SpecifierSet(span)) == inside


METADATA = """Metadata-Version: 2.4
Name: meshwright
Version: 1.0
Requires-Python: >=99
Requires-Dist: numpy<0.1
Requires-Dist: tomli-w; python_version >= '3'
Requires-Dist: rich; python_version < '3'
Requires-Dist: torch<0.1; (python_version >= '3') and extra == "torch"
Requires-Dist: no-such-package[more]>=2; extra == 'hf'
Requires-Dist: pytest; extra == 'dev'
"""


def test_the_requirements_that_hold_here_are_judged(monkeypatch):
    monkeypatch.setattr(importlib.metadata, "metadata", lambda name: message_from_string(METADATA))
    told = {finding.name: finding for finding in check_versions(Host())}
    assert {name: finding.status for name, finding in told.items() if name != "system"} == {
        "Python": "problem",
        "meshwright": "ok",
        "numpy": "problem",
        "tomli-w": "ok",
        "torch": "note",
        "no-such-package": "note",
    }
    assert told["numpy"].found.endswith("; Meshwright supports <0.1")
    assert told["no-such-package"].remedy == "Run: pip install 'meshwright[hf]'"


@pytest.mark.parametrize("version", ["3.12.1+", "3.12.1"])
def test_a_python_between_two_releases(monkeypatch, version):
    monkeypatch.setattr(platform, "python_version", lambda: version)
    told = {finding.name: finding for finding in check_versions(Host())}
    assert (told["Python"].found, told["Python"].status) == ("3.12.1", "ok")


def test_what_is_missing_or_out_of_range_is_told_with_a_command():
    core, torch = SpecifierSet(">=2.1,<2.5"), SpecifierSet(">=2.13,<2.14")
    missing = judge_version("numpy", None, core)
    assert (missing.status, missing.remedy) == ("problem", "Run: pip install 'numpy<2.5,>=2.1'")
    assert judge_version("numpy", "1.26.4", core).status == "problem"
    assert judge_version("numpy", "2.4.6", core).status == "ok"
    assert judge_version("torch", "2.12.1", torch, "torch").status == "note"
    absent = judge_version("torch", None, torch, "torch")
    assert (absent.status, absent.remedy) == ("note", "Run: pip install 'meshwright[torch]'")
    assert "planning" in absent.found


def test_the_versions_of_this_process_are_told():
    told = {finding.name: finding.found for finding in check_versions(Host())}
    assert told["Python"] == platform.python_version()
    assert told["numba"] == importlib.metadata.version("numba")
    assert "pytest" not in told, "tools of developers are no concern of users"


def test_a_package_that_is_only_on_the_path_is_a_note(monkeypatch):
    def none(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "metadata", none)
    assert {finding.name: finding.status for finding in check_versions(Host())}["meshwright"] == "note"
