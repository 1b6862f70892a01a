"""``show MODEL --cluster C --memory``: numbers of `weigh_rank`, and options that do not go together."""

import json

import pytest

from meshwright.cli.main import invoke
from meshwright.cost.memory import find_peak, trace_step
from meshwright.cost.memory.layer_choices import choice_rows, layer_rows
from meshwright.spec import (
    GraphError,
    Optimizer,
    Workload,
    load_cluster,
    load_shipped_graph,
    recompute_choices,
    recompute_layers,
    with_recompute,
)

GPT, CLUSTER = load_shipped_graph("gpt-tiny"), load_cluster("4xA100")
WORKLOAD = Workload(global_batch=8, precision="mixed", optimizer=Optimizer(kind="adamw"))


def ways():
    return {(row["zero"], row["recompute"], row["offload"]): row for row in choice_rows(GPT, 8, WORKLOAD, CLUSTER)}


def test_json_holds_the_rows(capsys):
    assert invoke(["show", "gpt-tiny", "--cluster", "4xA100", "--memory", "--batch-size", "8", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["layers"] == layer_rows(GPT, 8, WORKLOAD, CLUSTER)
    assert found["ways"] == choice_rows(GPT, 8, WORKLOAD, CLUSTER)
    assert (found["device"], found["precision"]) == ("A100", "mixed")


def test_whole_and_computed_again_are_what_a_walk_finds():
    blocks = recompute_layers(GPT, range(1, 5))
    assert recompute_choices(GPT)["full"].ranges == blocks
    for name, ranges in (("none", ()), ("full", blocks)):
        walked = find_peak(trace_step(with_recompute(GPT, ranges), WORKLOAD, device="cuda")).num_bytes
        counters = 4 * sum(tensor.requires_grad and tensor.role == "parameter" for tensor in GPT.tensors)
        assert ways()[0, name, "nothing"]["device_bytes"] == walked - counters


def test_sharding_and_moving_away_need_less_on_the_device():
    found = ways()
    for name in ("none", "full"):
        states = [found[zero, name, "nothing"]["states_bytes"] for zero in range(4)]
        assert states[1] == states[2] == pytest.approx(states[0] / 4, rel=1e-3)
        # The parts of the master weights are those of the parameters.
        assert states[3] == pytest.approx(states[0] / 4 * 8 / 12, rel=1e-3)
    away = found[2, "full", "states"]
    assert away["host_bytes"] == found[2, "full", "nothing"]["states_bytes"]
    assert away["device_bytes"] == found[2, "full", "nothing"]["device_bytes"] - away["host_bytes"]
    assert away["transfer_s"] > found[2, "full", "nothing"]["transfer_s"] == 0
    rows = layer_rows(GPT, 8, WORKLOAD, CLUSTER)
    assert all(row["full_bytes"] < row["none_bytes"] for row in rows if row["layer"].startswith("blocks"))


def test_it_needs_devices_and_a_graph_for_training(capsys):
    assert invoke(["show", "gpt-tiny", "--memory"]) == 1
    assert "--memory counts bytes on the devices of --cluster" in capsys.readouterr().err
    fields = {name: getattr(GPT, name) for name in ("name", "tensors", "ops", "layers", "inputs", "outputs")}
    with pytest.raises(GraphError, match="is for inference"):
        choice_rows(type(GPT)(**fields, mode="inference"), 8, WORKLOAD, CLUSTER)
