"""The line above plans: what they are for."""

from dataclasses import replace

from meshwright.report import describe_workload, workload_row
from meshwright.spec import Plan, StagePlan, Workload, load_shipped_graph


def plan_of(name, **work):
    graph = load_shipped_graph(name)
    stages = (StagePlan(start=0, stop=len(graph.layers), ranks=(0,)),)
    facts = {"model": name, "graph_hash": graph.content_hash, "cluster": "1xcpu", "stages": stages}
    return Plan(**facts, workload=Workload(global_batch=4, **work), num_microbatches=1), graph


def test_tokens_are_named_for_models_of_tokens():
    plan, graph = plan_of("gpt-tiny", precision="mixed")
    length, parameters = graph.sequence_length, graph.num_parameters()
    assert describe_workload(plan, graph) == (
        f"gpt-tiny ({parameters:,} parameters) on 1 device of 1xcpu: training, 4 samples per step ({4 * length} "
        f"tokens in sequences of {length}), mixed, adamw"
    )
    row = workload_row(plan, graph)
    assert (row["tokens_per_step"], row["sequence_length"], row["precision"]) == (4 * length, length, "mixed")


def test_images_have_no_tokens():
    plan, graph = plan_of("vgg-tiny")
    assert graph.sequence_length is None
    assert "4 samples per step, float32, adamw" in describe_workload(plan, graph)
    assert workload_row(plan, graph)["tokens_per_step"] is None


def test_without_a_graph_the_plan_says_what_it_knows():
    plan, graph = plan_of("gpt-tiny")
    one = replace(plan, workload=replace(plan.workload, kind="inference", global_batch=1))
    assert describe_workload(one) == "gpt-tiny on 1 device of 1xcpu: inference, 1 sample per step, float32"
    assert workload_row(one, graph)["optimizer"] is None
