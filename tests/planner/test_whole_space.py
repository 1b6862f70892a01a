"""The whole space: all that splits a model and runs on a cluster, less what is given; hosts where nothing else fits."""

from dataclasses import replace

import pytest

from meshwright.cost.memory import MemoryLimit
from meshwright.planner import NothingFitsError, Problem, whole_space
from meshwright.planner.whole_space import LAST_RESORTS, SCHEDULES
from meshwright.spec import Offload, PlanError, Sharding, Workload, load_cluster, load_shipped_graph
from meshwright.spec.schedules import BASIC_SCHEDULES
from meshwright.spec.sharding import UNSHARDED
from tests.graphs import chain_graph
from tests.planner.searching import solve

GPT, RESNET = load_shipped_graph("gpt-tiny"), load_shipped_graph("resnet-tiny")
MIXTRAL = load_shipped_graph("mixtral-tiny")
NODE, NODES = load_cluster("8xA100"), load_cluster("2x4xA100")
WORK = Workload(global_batch=16, precision="bfloat16")


def sizes(choices, axis):
    return {getattr(item, axis) for item in choices.shardings}


def test_nothing_need_be_named():
    found = whole_space(GPT, NODES, WORK)
    assert found.shardings[0] == UNSHARDED
    assert len(set(found.shardings)) == len(found.shardings)
    assert sizes(found, "tensor") == sizes(found, "context") == {1, 2, 4}
    assert Sharding(tensor=2, context=2, sequence_parallel=True) in found.shardings
    assert {item.sequence_parallel for item in found.shardings if item.tensor > 1} == {False, True}
    assert not any(item.sequence_parallel for item in found.shardings if item.tensor == 1)
    assert found.zero == (0, 1, 2, 3)
    assert found.shard_sizes == (0, 2, 4)
    assert found.recompute == ("none", "op", "full")
    assert found.schedules == SCHEDULES == ("1f1b", "gpipe", "interleaved", "zb-h1")
    assert found.num_chunks == (2, 4)
    assert found.offload == (Offload(),)
    assert found.last_resorts == LAST_RESORTS


def test_what_is_given_restricts():
    found = whole_space(GPT, NODES, WORK, tensor=(1,), zero=(0,), recompute=("none",), schedules=("gpipe", "1f1b"))
    assert found.shardings == (UNSHARDED, Sharding(context=2), Sharding(context=4))
    assert found.zero == found.shard_sizes == (0,)
    assert found.recompute == ("none",)
    assert found.schedules == ("gpipe", "1f1b")
    # What keeps parameters on the host needs ZeRO 3.
    assert found.last_resorts == tuple(away for away in LAST_RESORTS if away.parameters == "device")
    alone = whole_space(GPT, NODES, WORK, tensor=(2,), context=(1,), expert=(1,), sequence_parallel=True)
    assert alone.shardings == (Sharding(tensor=2, sequence_parallel=True),)
    given = whole_space(GPT, NODES, WORK, num_chunks=(3,), num_stages=(2,), microbatch_sizes=(4,), num_devices=(4,))
    assert (given.num_chunks, given.num_stages, given.microbatch_sizes, given.num_devices) == ((3,), (2,), (4,), (4,))


@pytest.mark.parametrize("apart", [False, True])
def test_tokens_are_split_between_products_as_asked(apart):
    found = whole_space(GPT, NODES, WORK, sequence_parallel=apart)
    assert {item.sequence_parallel for item in found.shardings if item.tensor > 1} == {apart}
    assert sizes(found, "tensor") == {1, 2, 4}


def test_sizes_that_split_nothing_are_left_out():
    # Four heads; images have no tokens; only mixtures have experts.
    assert sizes(whole_space(GPT, NODE, WORK), "tensor") == {1, 2, 4}
    images = whole_space(RESNET, NODE, WORK)
    assert sizes(images, "context") == sizes(images, "expert") == {1}
    assert max(sizes(images, "tensor")) > 1
    assert sizes(whole_space(GPT, NODE, WORK), "expert") == {1}
    mixture = whole_space(MIXTRAL, NODE, WORK)
    assert {1, 2, 4} <= sizes(mixture, "expert")
    assert any(item.expert > 1 and item.tensor > 1 for item in mixture.shardings)


def test_teams_lie_within_nodes_but_for_experts():
    found = whole_space(MIXTRAL, load_cluster("4x2xA100"), WORK)
    assert all(item.tensor * item.context <= 2 for item in found.shardings)
    assert max(item.expert for item in found.shardings) == 4
    assert all(item.width <= 2 for item in found.shardings if item.expert == 1)


def test_teams_divide_the_devices_that_are_asked_for():
    assert whole_space(GPT, NODES, WORK, num_devices=(1,)).shardings == (UNSHARDED,)
    assert {item.width for item in whole_space(GPT, NODES, WORK, num_devices=(2, 3)).shardings} == {1, 2}
    # What is named stays, so that its error is told.
    assert sizes(whole_space(GPT, NODES, WORK, num_devices=(1,), tensor=(2,)), "tensor") == {2}


def test_inference_shares_and_recomputes_nothing():
    found = whole_space(load_shipped_graph("gpt-tiny"), NODES, replace(WORK, kind="inference"))
    assert found.zero == found.shard_sizes == (0,)
    assert found.recompute == ("none",)
    assert found.schedules == BASIC_SCHEDULES
    assert found.last_resorts == ()


def test_compiled_layers_have_one_backward_and_are_recomputed_whole():
    found = whole_space(GPT, NODES, WORK, compiled=True)
    assert found.schedules == ("1f1b", "gpipe", "interleaved")
    assert found.recompute == ("none", "full")


def test_what_means_nothing_for_a_model_is_not_recomputed():
    flat = replace(GPT, layers=tuple(replace(layer, name=f"layer{i}") for i, layer in enumerate(GPT.layers)))
    assert whole_space(flat, NODE, WORK).recompute == ("none",)
    # Blocks without an op that is kept are recomputed whole in either way.
    chain = chain_graph(4)
    assert whole_space(chain, NODE, WORK).recompute == ("none", "op", "full")
    plain = replace(chain, ops=tuple(replace(op, kind="aten.relu.default") for op in chain.ops))
    assert whole_space(plain, NODE, WORK).recompute == ("none", "full")


def test_states_are_shared_by_all_or_within_equal_nodes():
    first, second = NODES.nodes
    unequal = replace(NODES, nodes=(first, replace(second, devices=(*second.devices, *second.devices))))
    for cluster, expected in ((NODE, (0,)), (NODES, (0, 2, 4)), (unequal, (0,))):
        assert whole_space(GPT, cluster, WORK, tensor=(1,), context=(1,)).shard_sizes == expected
    given = whole_space(GPT, NODES, WORK, shard_sizes=(2,))
    assert given.zero == (1, 2, 3)
    assert list(given.sharing()) == [(1, 2), (2, 2), (3, 2)]
    with pytest.raises(PlanError, match="shard size of 2 was given without ZeRO"):
        whole_space(GPT, NODES, WORK, shard_sizes=(2,), zero=(0,))


def test_a_way_to_offload_that_is_given_is_no_last_resort():
    away = Offload(optimizer="host")
    found = whole_space(GPT, NODES, WORK, offload=(away,))
    assert (found.offload, found.last_resorts) == ((away,), ())
    assert found.zero == (0, 1, 2, 3)
    assert whole_space(GPT, NODES, WORK, offload=(Offload(optimizer="host", parameters="host"),)).zero == (3,)


def test_hosts_of_unknown_bandwidth_make_no_steps():
    found = whole_space(GPT, load_cluster("2xL40S"), WORK)
    assert found.last_resorts == (Offload(activations="host"),)


def one_device(num_bytes, **given):
    cluster = load_cluster("1xA100")
    given = {"recompute": ("none",), "schedules": ("1f1b",), "microbatch_sizes": (2,), **given}
    return Problem(
        graph_for=lambda _: GPT,
        cluster=cluster,
        workload=WORK,
        memory=MemoryLimit(num_bytes=num_bytes),
        choices=whole_space(GPT, cluster, WORK, zero=(0,), **given),
    )


def test_hosts_are_taken_where_nothing_fits_the_devices_and_only_there():
    whole = solve(one_device(None))
    assert {item.plan.offload for item in (*whole.ranked, *whole.rejected)} == {Offload()}
    least = min(max(item.reserved_bytes) for item in whole.ranked)
    tight = solve(one_device(least))
    assert {item.plan.offload for item in (*tight.ranked, *tight.rejected)} == {Offload()}
    problem = one_device(least - 1)
    found = solve(problem)
    assert found.best.fits
    assert found.best.plan.offload in problem.choices.last_resorts
    assert problem.objection(found.best.plan) == ""
    assert "No plan fits into device memory alone" in found.explain()
    # Among what fits with any of them, it is the fastest.
    for away in problem.choices.last_resorts:
        try:
            other = solve(one_device(least - 1, offload=(away,)))
        except NothingFitsError:
            continue
        assert found.best.step_time_s <= other.best.step_time_s
    with pytest.raises(NothingFitsError):
        solve(one_device(least - 1, offload=(Offload(),)))


def test_what_fits_nowhere_is_said_to():
    with pytest.raises(NothingFitsError, match="No plan fits into memory"):
        solve(one_device(2**20))
