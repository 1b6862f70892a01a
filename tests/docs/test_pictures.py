"""The pictures in the docs are what the code draws, and what the code draws is what the papers say."""

import importlib
import re
import sys

import pytest

from meshwright.program import SCHEDULES
from meshwright.spec import Link
from tests.docs.blocks import ROOT

SYSTEMS = ("gpipe", "pipedream", "ddp", "horovod", "bytescheduler", "servers", "alpa", "flexflow")


@pytest.fixture(scope="module")
def drawn():
    """Import a script of docs/pictures by its name."""
    folder = str(ROOT / "docs" / "pictures")
    sys.path.insert(0, folder)
    yield importlib.import_module
    sys.path.remove(folder)


@pytest.mark.parametrize("name", [*SCHEDULES, "replicas"])
def test_the_pictures_of_the_schedules_are_what_the_simulator_says(drawn, name):
    schedules = drawn("schedules")
    drawing = schedules.draw(name)
    assert (schedules.IMAGES / f"schedule-{name}.svg").read_text() == drawing, "run python docs/pictures/schedules.py"


def test_every_schedule_that_flushes_has_its_section_with_its_picture_and_its_source():
    text = (ROOT / "docs" / "concepts" / "schedules.md").read_text()
    sections = dict(re.findall(r"^## `([^`]+)`$(.*?)(?=^## )", text, flags=re.MULTILINE | re.DOTALL))
    assert sections.keys() == SCHEDULES.keys()
    for name, section in sections.items():
        assert f"(../images/schedule-{name}.svg)" in section
        assert "\nSource: " in section


def test_the_picture_of_endless_schedules_is_what_the_simulator_says(drawn):
    schedules = drawn("endless_schedules")
    assert schedules.PICTURE.read_text() == schedules.draw(), "run python docs/pictures/endless_schedules.py"


def test_the_picture_of_experts_is_what_is_drawn(drawn):
    experts = drawn("experts")
    assert experts.PICTURE.read_text() == experts.draw(), "run python docs/pictures/experts.py"


def test_the_picture_of_compiled_layers_is_what_costs_say(drawn):
    compiled = drawn("compiled")
    assert compiled.PICTURE.read_text() == compiled.draw(), "run python docs/pictures/compiled.py"


def test_the_picture_of_emulation_is_the_layout_of_its_example(drawn):
    emulation = drawn("emulation")
    assert emulation.PICTURE.read_text() == emulation.draw(), "run python docs/pictures/emulation.py"


def test_the_picture_of_groups_that_share_states_is_what_plans_mean(drawn):
    hybrid = drawn("hybrid")
    assert hybrid.PICTURE.read_text() == hybrid.draw(), "run python docs/pictures/hybrid.py"


def test_the_picture_of_found_orders_is_what_the_simulator_says(drawn):
    found = drawn("found")
    assert found.PICTURE.read_text() == found.draw(), "run python docs/pictures/found.py"


@pytest.mark.long
def test_the_picture_of_controllers_is_what_the_simulator_says(drawn):
    controllers = drawn("controllers")
    assert controllers.PICTURE.read_text() == controllers.draw(), "run python docs/pictures/controllers.py"


@pytest.mark.long
@pytest.mark.timeout(300)  # policies are compiled once
def test_the_picture_of_serving_is_what_the_simulator_says(drawn):
    serving = drawn("serving")
    assert serving.PICTURE.read_text() == serving.draw(), "run python docs/pictures/serving.py"


@pytest.mark.timeout(300)  # a policy is compiled once
@pytest.mark.long
def test_the_picture_of_scaling_is_what_the_simulator_says(drawn):
    scaling = drawn("scaling")
    assert scaling.PICTURE.read_text() == scaling.draw(), "run python docs/pictures/scaling.py"


@pytest.mark.long
def test_the_picture_of_scenarios_is_what_the_simulator_says(drawn):
    scenarios = drawn("scenarios")
    assert scenarios.PICTURE.read_text() == scenarios.draw(), "run python docs/pictures/scenarios.py"


@pytest.mark.long
def test_the_picture_of_collectives_is_what_the_model_says(drawn):
    collectives = drawn("collectives")
    assert collectives.PICTURE.read_text() == collectives.draw(), "run python docs/pictures/collectives.py"


def test_the_picture_of_the_critical_path_is_what_the_simulator_says(drawn):
    critical_path = drawn("critical_path")
    assert critical_path.PICTURE.read_text() == critical_path.draw(), "run python docs/pictures/critical_path.py"


@pytest.mark.long
@pytest.mark.parametrize("system", SYSTEMS)
def test_the_pictures_of_the_systems_are_what_the_simulator_says(drawn, system):
    systems = drawn("systems")
    drawing = systems.PICTURES[f"system-{system}"]()
    assert (systems.IMAGES / f"system-{system}.svg").read_text() == drawing, "run python docs/pictures/systems.py"


def test_every_system_has_its_page_and_its_picture(drawn):
    pages = {path.stem: path.read_text() for path in (ROOT / "docs" / "systems").glob("*.md")}
    named = {name for name in drawn("systems").PICTURES for text in pages.values() if f"{name}.svg" in text}
    assert named == set(drawn("systems").PICTURES)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("num_microbatches", [1, 4, 8, 16])
def test_both_flushing_schedules_have_the_bubble_of_the_closed_form(drawn, schedule, num_microbatches):
    # (p - 1) / (m + p - 1) for p stages and m microbatches (Huang et al. 2019)
    drawing = drawn("drawing")
    stages = [(2, (rank,)) for rank in range(4)]
    result = drawing.simulate(stages, schedule, num_microbatches=num_microbatches, batch=16)
    assert result.bubble_fraction == pytest.approx(3 / (num_microbatches + 3), rel=1e-4)
    assert result.step_time_s == pytest.approx((num_microbatches + 3) * 2 * (1 + 2) * 16 / num_microbatches, rel=1e-4)


def test_what_1f1b_keeps_of_the_activations_is_a_share_p_of_m(drawn):
    # rank 0 of p stages keeps p microbatches, under GPipe all m (Narayanan et al. 2021)
    drawing = drawn("drawing")
    graph, stages = drawing.chain(width=2**18), [(2, (rank,)) for rank in range(4)]
    kept = {}
    for schedule in ("gpipe", "1f1b"):
        result = drawing.simulate(stages, schedule, num_microbatches=16, batch=16, graph=graph)
        kept[schedule] = result.memory[0].parts["saved activations"]
    assert kept["1f1b"] / kept["gpipe"] == pytest.approx(4 / 16)


# Qi et al., "Zero Bubble Pipeline Parallelism" (ICLR 2024), Table 5, column 1F1B: the first row of each model. Stage
# times in ms: forward, backward for inputs, backward for weights, transfer (validation/data/zero_bubble_times.csv).
PUBLISHED = (
    ("1.5B", 8, 24, (18.522, 18.086, 9.337, 0.601), 0.2431),
    ("6.2B", 8, 24, (29.718, 29.444, 19.927, 0.527), 0.2347),
    ("14.6B", 16, 48, (11.347, 11.248, 8.132, 0.377), 0.2552),
    ("28.3B", 32, 96, (10.419, 10.207, 7.715, 0.408), 0.2646),
)


@pytest.mark.parametrize(("num_stages", "num_microbatches", "times", "published"), [row[1:] for row in PUBLISHED])
def test_the_bubble_of_1f1b_with_transfers_is_the_published_one(drawn, num_stages, num_microbatches, times, published):
    drawing = drawn("drawing")
    forward, inputs, weights, transfer = times
    result = drawing.simulate(
        [(1, (rank,)) for rank in range(num_stages)],
        "1f1b",
        num_microbatches=num_microbatches,
        batch=num_microbatches,
        graph=drawing.chain((forward,) * num_stages, backward=(inputs + weights) / forward),
        machines=drawing.cluster(num_stages, link=Link(latency_s=transfer, bandwidth_bytes_per_s=1e18)),
    )
    assert result.bubble_fraction == pytest.approx(published, abs=1e-4)
