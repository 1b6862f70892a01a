"""Scenario documents: strict, with units, and the same after writing and reading."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.spec import (
    DocumentError,
    MeshwrightError,
    ScenarioError,
    load_cluster,
    read_document,
    write_document,
)
from meshwright.spec.scenario import (
    Checkpoints,
    DeviceMemory,
    Effect,
    Failures,
    Jitter,
    LostDevice,
    NetworkCards,
    OtherDevice,
    Oversubscription,
    Price,
    Scenario,
    SlowDevice,
    SlowLink,
    load_scenario,
    shipped_scenarios,
)
from meshwright.spec.selectors import Devices, Links
from meshwright.spec.units import Bytes, BytesPerSecond, Seconds

positive = st.floats(1e-3, 1e6)
seconds = positive.map(Seconds)
devices = st.sampled_from(["all", "rank 5", "ranks 0-3,8", "node 1", "kind A100", "every 4th from 1", "3 at random"])
links = st.sampled_from(["inside nodes", "of node 1", "between node 0 and node 1", "between racks", "to hosts"])
DEVICES, LINKS = devices.map(Devices), links.map(Links)
EFFECTS: st.SearchStrategy[Effect] = st.one_of(
    st.builds(SlowDevice, devices=DEVICES, factor=positive, since=seconds),
    st.builds(OtherDevice, devices=DEVICES, device=st.just("V100")),
    st.builds(DeviceMemory, devices=DEVICES, memory=st.floats(1, 1e15).map(Bytes)),
    st.builds(
        SlowLink,
        links=LINKS,
        factor=st.floats(2, 10),
        bandwidth=st.none() | st.floats(1, 1e12).map(BytesPerSecond),
        since=seconds,
    ),
    st.builds(NetworkCards, num_nics=st.integers(1, 8)),
    st.builds(Oversubscription, nodes_per_rack=st.integers(1, 8), ratio=st.floats(1, 8)),
    st.builds(Jitter, devices=DEVICES, spread=st.floats(0, 1), straggler_probability=st.floats(0, 1)),
    st.builds(LostDevice, devices=DEVICES, since=seconds),
    st.builds(Failures, mttf=seconds, of=st.sampled_from(["device", "node"])),
    st.builds(Failures, times=st.lists(seconds, min_size=1, max_size=3).map(tuple)),
    st.builds(Checkpoints, interval=st.none() | seconds, cost=seconds),
    st.builds(Price, per_hour=positive),
)
HEAD = 'schema = "meshwright/scenario/1"\n'


@pytest.mark.parametrize("suffix", ["toml", "json"])
@given(effects=st.lists(EFFECTS, max_size=4).map(tuple), seed=st.none() | st.integers(0, 9))
def test_a_scenario_is_the_same_after_writing_and_reading(tmp_path_factory, suffix, effects, seed):
    path = tmp_path_factory.mktemp("scenario") / f"some.{suffix}"
    scenario = Scenario(name="some", seed=seed, effects=effects)
    write_document(scenario, path)
    assert read_document(Scenario, path) == scenario == load_scenario(path)


@pytest.mark.parametrize(
    ("kind", "text", "value"),
    [
        (Seconds, "8 h", 28800),
        (Seconds, "250us", 250e-6),
        (Seconds, "1.5e1 min", 900),
        (Bytes, "80 GiB", 80 * 2**30),
        (BytesPerSecond, "25 GB/s", 25e9),
        (BytesPerSecond, "200 Gbit/s", 25e9),
        (BytesPerSecond, "1 GiB/s", 2**30),
    ],
)
def test_units_are_those_of_the_si(kind, text, value):
    assert kind.decode_scalar(text) == pytest.approx(value, rel=1e-15)
    assert kind.decode_scalar(kind(value).encode_scalar()) == value


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (8, "8 has no unit; expected a time with its unit"),
        ("8", "'8' has no unit"),
        ("8 hours", "unknown unit"),
        ("8 GB", "unknown unit"),
        ("-3 s", "out of range"),
        ("1.2.3 s", "is not a number"),
        ("soon", "not a number with a unit"),
        (True, "not a number with a unit"),
    ],
)
def test_a_quantity_without_its_unit_is_refused(text, words):
    with pytest.raises(ValueError, match=words):
        Seconds.decode_scalar(text)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("colour = 1", "unknown key 'colour'"),
        ("[[effects]]\nfactor = 2.0", "effects.0.: key 'kind' is missing; expected one of 'slow-device'"),
        ('[[effects]]\nkind = "slow-devices"', "kind 'slow-devices' is not known .did you mean 'slow-device'"),
        ('[[effects]]\nkind = "slow-device"\nfactor = 2.0', r"effects.0. \(slow-device\): key 'devices' is missing"),
        (
            '[[effects]]\nkind = "slow-device"\ndevices = "rank 1"\nfaktor = 2.0',
            r"\(slow-device\): unknown key 'faktor' \(did you mean 'factor'",
        ),
        (
            '[[effects]]\nkind = "slow-device"\ndevices = "rang 1"\nfactor = 2.0',
            "devices: 'rang 1' is not a selection; expected",
        ),
        (
            '[[effects]]\nkind = "slow-device"\ndevices = "all"\nfactor = 0.0',
            r"x.toml.effects\[0\]: slow-device: factor is 0; expected",
        ),
        (
            '[[effects]]\nkind = "slow-device"\ndevices = "all"\nfactor = 2\nsince = "2 h"\nuntil = "1 h"',
            "until is 3600 s and since is 7200 s",
        ),
        (
            '[[effects]]\nkind = "jitter"\nstraggler_probability = 1.5',
            "jitter: straggler_probability is 1.5; expected 0 to 1",
        ),
        ('[[effects]]\nkind = "jitter"\nspread = 2.5', "jitter: spread is 2.5; expected 0 to 2"),
        ('[[effects]]\nkind = "slow-link"\nlinks = "inside nodes"', "slow-link: nothing is changed"),
        (
            '[[effects]]\nkind = "slow-link"\nlinks = "inside nodes"\nfactor = 2\nsince = "2 s"\nuntil = "1 s"',
            "slow-link: until is 1 s and since is 2 s",
        ),
        ('[[effects]]\nkind = "slow-link"\nlinks = "everywhere"', "links: 'everywhere' is not a selection"),
        (
            '[[effects]]\nkind = "slow-link"\nlinks = "inside nodes"\nbandwidth = 25',
            r"\(slow-link\).bandwidth: 25 has no unit; expected a bandwidth with its unit, as \"25 GB/s\"",
        ),
        ('[[effects]]\nkind = "failures"', "failures: give exactly one of mttf and times"),
        ('[[effects]]\nkind = "failures"\nmttf = "0 s"', "failures: mttf is 0; expected at least 0.001"),
        ('[[effects]]\nkind = "checkpoints"', "checkpoints: give either cost"),
        ('[[effects]]\nkind = "price"\nper_hour = -1.0', "price: per_hour is -1; expected at least 0"),
        ("seed = -1", "x.toml: seed is -1"),
        ("[[effects]]\nkind = 3", "kind 3 is not known"),
        ("effects = [7]", "expected a table, found int"),
    ],
)
def test_what_is_no_scenario_is_refused_by_file_and_key(tmp_path, body, words):
    path = tmp_path / "x.toml"
    path.write_text(HEAD + body)
    with pytest.raises(MeshwrightError, match=words) as caught:
        load_scenario(path)
    assert str(caught.value).startswith(str(path))


@pytest.mark.parametrize(
    "text", ["rank {}", "ranks 0-{}", "every {}th", "every 2nd from {}", "{} at random", "node {}"]
)
def test_numbers_of_thousands_of_digits_select_nothing(text):
    """Nor do they end in another error."""
    with pytest.raises(ScenarioError):
        Devices(text.format(5000 * "9")).select(load_cluster("2x2xA100"), (0,))
    assert Devices(text.format(1)).select(load_cluster("2x2xA100"), (0,))


def test_names_are_shipped_ones():
    with pytest.raises(DocumentError, match=r"No scenario 'slow-devise' is shipped .did you mean 'slow-device'"):
        load_scenario("slow-devise")


@pytest.mark.parametrize("name", shipped_scenarios())
def test_shipped_scenarios_say_what_they_are(name):
    scenario = load_scenario(name)
    assert scenario.effects
    assert scenario.notes
    assert scenario.name == name
