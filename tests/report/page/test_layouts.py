from meshwright.report.page import cluster_part, plan_part
from meshwright.report.page.page_results import MAX_DEVICES, MAX_NODES
from meshwright.spec import Opcode
from tests.graphs import chain_graph, even_bounds, make_plan
from tests.report.page.examples import make_cluster, pipeline_spans
from tests.report.timelines import make_timeline


def test_nodes_number_their_devices_by_rank():
    part = cluster_part(make_cluster(3, 2))
    assert [node["first_rank"] for node in part["nodes"]] == [0, 2, 4]
    assert [len(node["devices"]) for node in part["nodes"]] == [2, 2, 2]
    assert part["kinds"][0]["float32_flops_per_s"] == 1e13


def test_many_nodes_are_counted_and_not_all_drawn():
    part = cluster_part(make_cluster(MAX_NODES + 3, 1))
    assert (part["num_nodes"], len(part["nodes"]), part["num_ranks"]) == (MAX_NODES + 3, MAX_NODES, MAX_NODES + 3)


def test_a_node_of_very_many_devices_is_not_drawn_whole():
    part = cluster_part(make_cluster(3, MAX_DEVICES - 1))
    assert [len(node["devices"]) for node in part["nodes"]] == [MAX_DEVICES - 1, 1, 0]
    assert [node["num_devices"] for node in part["nodes"]] == [MAX_DEVICES - 1] * 3
    assert part["nodes"][2]["first_rank"] == 2 * (MAX_DEVICES - 1)


def test_a_plan_names_its_layers_where_the_graph_is_given():
    graph = chain_graph(4)
    plan = make_plan(graph, even_bounds(4, 2), [2, 2], 8)
    assert [row["first_layer"] for row in plan_part(plan)["stages"]] == ["0", "2"]
    assert [row["last_layer"] for row in plan_part(plan, graph)["stages"]] == ["layers.1", "layers.3"]
    assert [row["ranks"] for row in plan_part(plan)["stages"]] == [[0, 1], [2, 3]]


def test_flows_are_what_the_sends_of_one_step_carry():
    plan = make_plan(chain_graph(4), even_bounds(4, 2), [2, 2], 8)
    spans = pipeline_spans()
    # a second step must not be counted, nor a rank's own part of a sum twice
    spans += [
        (rank, "exchange", Opcode.ALL_REDUCE, 0, -1, bucket, 0, 5, 0, 100) for rank in (0, 1) for bucket in (0, 1)
    ]
    spans.append((0, "send", Opcode.SEND_ACTIVATION, 0, 0, 1, 90_000_000, 91_000_000, 1, 64))
    flows = plan_part(plan, cluster=make_cluster(), timeline=make_timeline(spans))["flows"]
    assert flows == [
        {"payload": "activation", "stage": 0, "peer": 1, "moved_bytes": 8 * 64, "link": "between nodes"},
        {"payload": "all reduce", "stage": 0, "peer": 0, "moved_bytes": 200, "link": "inside a node"},
    ]
