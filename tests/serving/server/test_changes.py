"""Models that come to workers that tests play."""

from dataclasses import replace
from types import SimpleNamespace

from meshwright.serving.server.catalog import Catalog
from meshwright.serving.server.changes import Changes
from meshwright.serving.server.served import Served
from meshwright.spec import Deployment, ServedModel
from meshwright.spec.units import Seconds


def served(number, slo=0.1):
    return Served(number=number, name="m", model=ServedModel(name="m", slo=Seconds(slo)))


class Worker:
    def __init__(self):
        self.device, self.pid, self.held, self.loading = 0, 1, set(), set()
        self.asked = []
        self.channel = SimpleNamespace(send_text=self.asked.append)


def loaded(number):
    return {
        "number": number,
        "inputs": [],
        "outputs": [],
        "platform": "p",
        "largest": 4,
        "points": [(1, 0.05), (4, 0.06)],
    }


def test_a_model_that_was_loaded_and_cannot_be_served_is_forgotten(capsys):
    worker, changes = Worker(), Changes(Catalog([served(0)]))
    changes.order({"change": 1, "load": [served(1, slo=0.02).identity()], "leave": [0]}, [worker])
    for number in (0, 1):
        changes.learn(worker, loaded(number))
    assert worker.asked[-1] == {"load": [], "forget": [1]}
    assert worker.held == {0}
    changes.step([worker], lambda: None)
    assert "longer than its SLO" in capsys.readouterr().out


def test_a_guard_that_is_given_is_the_one():
    catalog = Catalog([replace(served(0), table=[0, 50_000_000])])
    left_open = Deployment(models=(served(0).model,), devices=1)
    assert catalog.facts(left_open, 1_000_000)["guard_ns"] == 1_000_000
    assert catalog.facts(replace(left_open, guard=Seconds(3e-4)), 1_000_000)["guard_ns"] == 300_000


def test_a_model_that_can_be_served_is_kept_and_changes_places(capsys):
    worker, catalog = Worker(), Catalog([served(0)])
    changes = Changes(catalog)
    changes.order({"change": 1, "load": [served(1).identity()], "leave": [0]}, [worker])
    for number in (0, 1):
        changes.learn(worker, loaded(number))
    changes.step([worker], lambda: None)
    changes.step([worker], lambda: None)
    assert worker.held == {0, 1}
    assert '"changed"' in capsys.readouterr().out
