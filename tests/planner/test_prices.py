"""What plans cost, what a budget pays for, and the front of step time, memory and price."""

from itertools import product

import pytest

from meshwright.planner import within_budget
from meshwright.simulator.scenarios import price_per_hour
from meshwright.spec import PlanError, ScenarioError, load_cluster
from meshwright.spec.scenario import Failures, Price, Scenario
from tests.planner.test_search import cluster_of, search, weighted_graph

TWO_EACH = Scenario(effects=(Price(per_hour=2.0),))


def test_as_many_devices_as_the_money_pays_for():
    cluster = load_cluster("3x6xA100")
    assert within_budget((), cluster, TWO_EACH, 1e6) == (18, 16, 12, 8, 6, 4, 2, 1)
    assert within_budget((), cluster, TWO_EACH, 23.0) == (11, 8, 6, 4, 2, 1)
    assert within_budget((3, 9, 12, 9), cluster, TWO_EACH, 18.0) == (9, 3)
    # Nodes are paid for whole: the first device of the second one costs ten more.
    nodes = Scenario(effects=(Price(per_hour=10.0, of="node"),))
    assert within_budget((), cluster, nodes, 19.0) == (6, 4, 2, 1)


@pytest.mark.parametrize("money", [1.0, 7.0, 13.0, 30.0, 1000.0])
@pytest.mark.parametrize("counts", [(), (2, 5, 16)])
def test_what_is_left_is_what_can_be_paid(money, counts):
    cluster = load_cluster("2x8xA100")
    scenario = Scenario(effects=(Price(per_hour=1.0), Price(per_hour=3.0, of="node")))
    affordable = [n for n in counts or range(1, 17) if price_per_hour(n, cluster, scenario)[0] <= money]
    if not affordable:
        with pytest.raises(PlanError, match="Give a larger budget"):
            within_budget(counts, cluster, scenario, money)
        return
    found = within_budget(counts, cluster, scenario, money)
    assert found[0] == max(affordable)
    assert set(found) <= set(affordable)
    assert not counts or set(found) == set(affordable)


def test_no_plan_costs_more_than_the_budget_and_all_are_estimated():
    graph, cluster = weighted_graph([10**9] * 4), cluster_of(8)
    plans = search(graph, cluster, 64, prices=TWO_EACH, max_price_per_hour=9.0, max_plans=50)
    assert {item.plan.num_devices for item in plans.ranked} == {1, 2, 4}
    for item in (*plans.ranked, *plans.front):
        assert item.price.per_hour == 2.0 * item.plan.num_devices
        assert item.price.per_step == pytest.approx(item.price.per_hour * item.step_time_s / 3600)
        assert item.price.per_million_samples == pytest.approx(item.price.per_step / 64 * 1e6)
    assert "Price: 8 USD per hour" in plans.explain()
    assert plans.rows()[0]["price_per_hour"] == 8.0
    assert all(row["currency"] == "USD" for row in plans.search_row()["front"])
    whole = search(graph, cluster, 64, num_devices=[1, 2, 4])
    assert whole.best.step_time_s == plans.best.step_time_s
    assert whole.best.price is None


def test_nothing_on_the_front_is_beaten():
    graph, cluster = weighted_graph([10**9] * 4), cluster_of(8)
    plans = search(graph, cluster, 64, num_devices=[1, 2, 4, 8], prices=TWO_EACH, max_plans=100)

    def figures(item):
        return item.step_time_s, max(item.peak_memory_bytes), item.price.per_step

    for item, other in product(plans.front, plans.ranked):
        mine, its = figures(item), figures(other)
        assert its == mine or any(a < b for a, b in zip(mine, its, strict=True))


def test_bad_input_is_refused():
    graph, cluster = weighted_graph([10**8] * 4), cluster_of(4)
    for options, words in (
        ({"max_price_per_hour": 3.0}, "but no prices"),
        ({"max_price_per_hour": float("nan"), "prices": TWO_EACH}, "positive amount"),
        ({"max_price_per_hour": -1.0, "prices": TWO_EACH}, "positive amount"),
        ({"max_price_per_hour": 1.0, "prices": TWO_EACH}, "cost 2 per hour"),
        ({"max_price_per_hour": 3.0, "prices": TWO_EACH, "num_devices": 4}, "cost 8 per hour"),
    ):
        with pytest.raises(PlanError, match=words):
            search(graph, cluster, 8, **options)
    with pytest.raises(ScenarioError, match="no devices of kind"):
        search(graph, cluster, 8, prices=Scenario(effects=(Price(per_hour=1.0, device="H100"),)))


def test_effects_that_are_no_costs_are_left_behind():
    mixed = Scenario(effects=(Failures(mttf=3600.0), Price(per_hour=2.0)), name="mixed").read_from(["a", "b"])
    assert mixed.only(Price).effects == (Price(per_hour=2.0),)
    assert mixed.only(Price).origins == ("b",)
    assert mixed.only(Price).name == "mixed"
