"""The page of a search: timelines up to a budget of spans, the best plan's always."""

import re

import pytest

from meshwright.cost import CostModel
from meshwright.planner import plan_pages as pages
from meshwright.planner import plans_document
from meshwright.report.cells import format_cell
from meshwright.simulator import simulate_plan
from meshwright.spec import Workload, load_cluster
from tests.graphs import chain_graph
from tests.planner.searching import search_plans


@pytest.fixture(scope="module")
def found():
    graph, cluster = chain_graph(6), load_cluster("4xA100")
    cost = CostModel(cluster=cluster)
    plans = search_plans(lambda _: graph, cluster, Workload(global_batch=16), cost=cost, model="<chain>", max_plans=5)
    return plans, lambda _: graph, cluster, cost


def test_results_and_rows_are_the_ranked_plans_in_their_order(found):
    plans = found[0]
    document = plans_document(*found)
    assert [row["plan"] for row in document["plans"]["rows"]] == [result["name"] for result in document["results"]]
    for item, result in zip(plans.ranked, document["results"], strict=True):
        assert result["facts"]["step_time_s"] == item.step_time_s
        assert result["plan"]["words"] == item.plan.describe()
        assert [row["peak_bytes"] for row in result["memory"]["rows"]] == list(item.peak_memory_bytes)
        assert [row["limit_bytes"] for row in result["memory"]["rows"]] == list(item.memory_limit_bytes)


def test_timelines_stop_at_the_budget_but_the_best_plan_has_one(found, monkeypatch):
    counts = [result["timelines"][0]["num_spans"] for result in plans_document(*found)["results"]]
    monkeypatch.setattr(pages, "MAX_PAGE_SPANS", 1)
    assert [len(result["timelines"]) for result in plans_document(*found)["results"]] == [1] + [0] * (len(counts) - 1)
    monkeypatch.setattr(pages, "MAX_PAGE_SPANS", counts[0] + counts[1])
    assert [len(result["timelines"]) for result in plans_document(*found)["results"]][:3] == [1, 1, 0]


def test_a_page_of_plans_with_many_spans_stays_small(found, monkeypatch):
    counts = [result["timelines"][0]["num_spans"] for result in plans_document(*found)["results"]]
    assert len(counts) >= 4
    simulated = []

    def simulate(plan, *args, **kwargs):
        simulated.append(plan)
        return simulate_plan(plan, *args, **kwargs)

    monkeypatch.setattr(pages, "simulate_plan", simulate)
    # Room for the first and half of the second: the second is too much, and after it nothing is simulated any more.
    monkeypatch.setattr(pages, "MAX_PAGE_SPANS", counts[0] + counts[1] // 2)
    shown = [result["timelines"] for result in plans_document(*found)["results"]]
    assert sum(item["num_spans"] for items in shown for item in items) <= pages.MAX_PAGE_SPANS
    assert [len(items) for items in shown] == [1] + [0] * (len(counts) - 1)
    assert simulated == [item.plan for item in found[0].ranked[:2]]


def test_words_and_tables_write_percentages_alike(found):
    text = "\n".join([*(found[0].explain(item.plan) for item in found[0].ranked), found[0]._repr_html_()])
    assert text.count("%") > len(found[0].ranked)
    assert re.findall(r"\S%", text) == []
    assert f"bubble {format_cell('bubble_share', found[0].best.bubble_fraction)} of" in text


def test_ranked_plans_are_a_table_in_a_notebook(found):
    plans = found[0]
    html = plans._repr_html_()
    assert html.count("<tr>") == 1 + len(plans.ranked)
    assert "stage" in html
    assert "<chain>" not in html
