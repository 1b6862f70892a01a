"""Every module of the sources is reached by a user (`tests.reach`)."""

import pytest

from tests.project import ROOT
from tests.reach import Reach

pytestmark = pytest.mark.lint


def test_every_module_is_reached():
    assert not Reach(ROOT / "src" / "meshwright").missed, "wire, move or delete them"


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
