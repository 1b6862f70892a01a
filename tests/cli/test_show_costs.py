"""``show MODEL --cluster``: layers add up to the model, the table of a device is used, options are checked."""

import json
from dataclasses import replace

import pytest

from meshwright.cost import CostModel
from meshwright.cost.layer_rows import cost_rows, optimizer_row
from meshwright.spec import Optimizer, load_cluster, load_shipped_graph


@pytest.fixture(scope="module")
def graph():
    return load_shipped_graph("gpt-tiny")


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_layers_add_up_to_the_model(graph, precision):
    cluster = load_cluster("2xcpu")
    cost = CostModel(cluster=cluster, precision=precision)
    rows, total = cost_rows(cost, graph, 4, cluster.device_kinds[0])
    costs = cost.estimate_ops(graph, 4, cluster.device_kinds[0])
    assert [row["layer"] for row in rows] == [layer.name for layer in graph.layers]
    for key in ("forward_s", "backward_s", "num_parameters", "saved_bytes"):
        assert sum(row[key] for row in rows) == pytest.approx(total[key], rel=1e-12)
    assert total["forward_s"] == pytest.approx(costs.forward_s.sum())
    for row in (*rows, total):
        assert row["low_s"] <= row["forward_s"] + row["backward_s"] <= row["high_s"]
    # The interval of a sum is never wider than the sum of the intervals.
    assert total["high_s"] <= sum(row["high_s"] for row in rows) * (1 + 1e-12)
    assert total["low_s"] >= sum(row["low_s"] for row in rows) * (1 - 1e-12)


def test_half_precision_halves_what_is_saved(graph):
    cluster = load_cluster("2xcpu")
    saved = {
        precision: cost_rows(CostModel(cluster=cluster, precision=precision), graph, 4, cluster.device_kinds[0])[1][
            "saved_bytes"
        ]
        for precision in ("float32", "bfloat16")
    }
    assert 0.5 * saved["float32"] <= saved["bfloat16"] < 0.55 * saved["float32"]  # token numbers keep their width


def test_the_optimizer_step_has_a_cost_where_there_is_one(graph):
    cluster = load_cluster("8xA100")
    cost, kind = CostModel(cluster=cluster, precision="bfloat16"), cluster.device_kinds[0]
    row = optimizer_row(cost, graph, kind)
    assert (row["optimizer"], row["loop"], row["basis"]) == ("adamw", "fused", "transferred")
    assert row["low_s"] < row["seconds"] == cost.optimizer_seconds(graph, graph.parameters, Optimizer(), kind)
    assert optimizer_row(cost, replace(graph, mode="inference"), kind) is None


def test_table_and_json_say_the_same(run, graph):
    document = json.loads(run("show", "gpt-tiny", "--cluster", "2xcpu", "--batch-size", "4", "--json", code=0)[1])
    assert (document["model"], document["batch_size"], document["precision"]) == ("gpt-tiny", 4, "float32")
    (device,) = document["devices"]
    assert device["kind"] == "cpu"
    assert len(device["layers"]) == len(graph.layers)
    _, out, _ = run("show", "gpt-tiny", "--cluster", "2xcpu", "--batch-size", "4", code=0)
    for word in ("forward", "backward", "low", "high", "basis", "saved", "80 % interval", "total"):
        assert word in out


def test_gpus_are_estimated_in_half_precision(run):
    assert json.loads(run("show", "gpt2-small", "--cluster", "A100", "--json", code=0)[1])["precision"] == "mixed"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["gpt-tiny", "--measurements", "m.json"], "belong to --cluster"),
        (["gpt-tiny", "--precision", "float32"], "belong to --cluster"),
        (["gpt-tiny", "--cluster", "2xcpu", "--program"], "prints a table of layers"),
        (["gpt-tiny", "--cluster", "2xcpu", "--html", "page.html"], "prints a table of layers"),
        (["2xcpu", "--cluster", "2xcpu"], "found a cluster"),
        (["gpt-tiny", "--cluster", "2xcqu"], "No device kind"),
        (["gpt-tiny", "--cluster", "2xcpu", "--measurements", "missing.json"], "missing.json"),
    ],
)
def test_what_cannot_be_meant_is_refused(run, arguments, said):
    _, _, error = run("show", *arguments, code=1)
    assert said in " ".join(error.split())
