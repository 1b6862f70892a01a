"""Training software of published runs: found by framework and date, and what it does to attention and hosts."""

import numpy as np
import pytest

from meshwright.cost import CostModel, read_software
from meshwright.cost.software import PYTORCH, Software, find_software, known_software
from meshwright.cost.traits import operator_name
from meshwright.spec import MeasurementError, load_cluster, load_shipped_graph

GRAPH = load_shipped_graph("gpt2-small")


def costs(device, software):
    cluster = load_cluster(f"1x{device}")
    return CostModel(cluster=cluster, precision="amp", software=software).estimate_ops(GRAPH, 8, cluster.device_kind(0))


def attention_s(device, attention):
    """Forward and backward of all attention of a step, s."""
    found = costs(device, Software(framework="any", since="2000", citation="none", attention=attention))
    mine = [i for i, op in enumerate(GRAPH.ops) if operator_name(op) == "scaled_dot_product_attention"]
    assert len(mine) == 12
    return float(found.forward_s[mine].sum() + found.backward_s[mine].sum())


@pytest.mark.parametrize(
    ("framework", "date", "since", "attention"),
    [
        ("llm-foundry", "2022", "2023", "flash-1"),
        ("llm-foundry", "2023-12", "2023", "flash-1"),
        ("llm-foundry", "2024", "2024", "flash-2"),
        ("llm-foundry", "2024-05", "2024", "flash-2"),
        ("torchtitan", "2025-06", "2024", "flash-2"),
        ("torchtitan", "2025-10", "2025-10", "torch"),
    ],
)
def test_the_last_entry_before_a_date_holds(framework, date, since, attention):
    found = find_software(framework, date)
    assert (found.framework, found.since, found.attention) == (framework, since, attention)
    assert read_software(f"{framework}@{date}") == found


def test_without_a_date_the_newest_entry_holds():
    assert read_software("megatron") == find_software("megatron") == find_software("megatron", "2026-11")
    assert read_software("megatron").fused_attention
    assert not read_software("megatron@2022").fused_attention


def test_a_framework_is_found_by_the_beginning_of_its_cell():
    assert find_software("Megatron-DeepSpeed (fork)", "2022") == read_software("megatron@2022")
    assert find_software(" Alpa ").framework == "alpa"


def test_what_no_entry_is_about_is_plain_pytorch():
    assert find_software("", "2022") == find_software("another", "2022") == read_software(None) == PYTORCH
    assert (PYTORCH.attention, PYTORCH.host_factor, PYTORCH.fused_attention) == ("torch", 1.0, True)


def test_every_entry_is_found_by_its_name():
    for entry in known_software():
        # Without a date the newest one is read.
        assert read_software(entry.name) == entry
        assert entry.citation


@pytest.mark.parametrize("text", ["megatrom", "jax@2022", ""])
def test_unknown_software_is_refused_with_what_is_known(text):
    with pytest.raises(MeasurementError) as said:
        read_software(text)
    assert repr(text) in str(said.value)
    for entry in known_software():
        assert entry.framework in str(said.value)


def test_a_slip_of_the_pen_is_suggested():
    with pytest.raises(MeasurementError, match="did you mean 'megatron'"):
        read_software("megatrom@2022")


@pytest.mark.parametrize("date", ["22", "2022-13", "2022-1", "May 2022", "1999"])
def test_a_date_is_a_year_or_a_month_of_a_year(date):
    with pytest.raises(MeasurementError, match="expected a year or a year and a month"):
        read_software(f"megatron@{date}")


def test_the_first_flashattention_is_slower_than_the_second():
    for device in ("A100", "H100"):
        assert attention_s(device, "flash-1") > 1.2 * attention_s(device, "flash-2")


def test_current_pytorch_has_the_fastest_attention_on_h100():
    assert attention_s("H100", "torch") < attention_s("H100", "flash-2")
    # cuDNN's attention is for Hopper and Blackwell.
    assert attention_s("A100", "torch") == attention_s("A100", "flash-2")


@pytest.mark.parametrize("factor", [0.0, 2.5])
def test_a_slower_host_takes_as_many_times_as_long(factor):
    slower = Software(framework="x", since="2000", citation="", host_factor=factor)
    plain, other = (costs("H100", software) for software in (PYTORCH, slower))
    assert plain.issue_s.sum() > 0
    assert other.issue_s == pytest.approx(factor * plain.issue_s)
    assert np.array_equal(other.forward_s, plain.forward_s)
    assert np.array_equal(other.backward_s, plain.backward_s)
