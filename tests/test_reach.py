"""Every module of the sources is reached by a user (`tests.reach`)."""

import pytest

from tests.project import ROOT
from tests.reach import Reach

pytestmark = pytest.mark.lint

# Packages whose modules need not be reached, each with its reason.
EXEMPT = {"meshwright.planner.methods.flexflow": "`plan --method flexflow` does not search SOAP strategies yet"}


def test_every_module_is_reached():
    missed = Reach(ROOT / "src" / "meshwright").missed
    assert not [name for name in missed if name.rpartition(".")[0] not in EXEMPT], "wire, move or delete them"
    assert {name.rpartition(".")[0] for name in missed} == EXEMPT.keys(), "reached now: take them off EXEMPT"


def test_a_module_that_only_a_package_hands_on_is_found(tmp_path):
    texts = {
        "__init__": "from meshwright.used import run\nfrom meshwright.planted import left",
        "used": "TABLE = {'lazy': 'meshwright.lazy:work'}\ndef run():\n    import meshwright.late as m; m.go(TABLE)",
        "late": "def go(table): ...",
        "lazy": "def work(): ...",
        "planted": "from meshwright.used import run\ndef left(): return run()",
    }
    for name, text in texts.items():
        (tmp_path / f"{name}.py").write_text(text)
    assert Reach(tmp_path, {"meshwright.run"}).missed == ["meshwright.planted"]
    assert Reach(tmp_path, {"meshwright.left"}).missed == []
