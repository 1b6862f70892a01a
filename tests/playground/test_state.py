"""The state and its link: what is written is read again, what comes from strangers is read or refused."""

from dataclasses import fields, replace
from urllib.parse import parse_qsl, urlencode

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.playground import Controls, from_query, to_query
from meshwright.playground.controls import LIMITS, MAX_QUERY_LENGTH, OFFLOAD_NAMES
from meshwright.spec import PlaygroundError
from meshwright.spec.schedules import SCHEDULE_NAMES

NAMES = st.text(st.characters(exclude_categories=("C", "Z")), min_size=1, max_size=40)


def wholes(name):
    return st.integers(*map(int, LIMITS[name]))


def numbers(name):
    low, high = LIMITS[name]
    positive = st.floats(max(low, 1e-6), high)
    return positive if low else positive | st.just(0.0)


STATES = st.builds(
    Controls,
    model=NAMES,
    kind=NAMES,
    num_nodes=wholes("nodes"),
    devices_per_node=wholes("devices"),
    num_nics=wholes("nics"),
    global_batch=wholes("batch"),
    microbatch_size=wholes("microbatch"),
    num_stages=wholes("stages"),
    replicas=st.lists(st.integers(1, 1024), max_size=6).map(tuple),
    given=st.sampled_from(["", "0123456789abcdef"]),
    layout=st.sampled_from(["stage-major", "replica-major", "reversed", "as-planned"]),
    num_chunks=wholes("chunks"),
    zero=wholes("zero"),
    tensor=wholes("tensor"),
    context=wholes("context"),
    expert=wholes("expert"),
    sequence_parallel=st.booleans(),
    recompute=st.sampled_from(["none", "op", "attention", "full", "as-planned"]),
    offload=st.sampled_from(OFFLOAD_NAMES),
    rest=st.sampled_from(["none", "as-planned"]),
    cuts=st.lists(st.integers(0, 999_999), max_size=6).map(tuple),
    schedule=st.sampled_from([*SCHEDULE_NAMES, "as-planned"]),
    overlap=st.booleans(),
    bucket_mib=numbers("bucket"),
    precision=st.sampled_from(["float64", "float32", "bfloat16"]),
    optimizer=st.sampled_from(["adamw", "sgd", "sgd-momentum"]),
    slow_rank=wholes("slow"),
    slowdown=numbers("slowdown"),
    link_slowdown=numbers("link"),
    nic_slowdown=numbers("nic"),
    memory_gib=numbers("memory"),
)


@given(STATES)
def test_a_link_gives_the_state_again(state):
    assert from_query(to_query(state)) == state


def test_every_field_of_a_state_stands_in_its_link():
    written = dict(parse_qsl(to_query(Controls())))
    assert len(written) == len(fields(Controls))


def test_what_a_link_leaves_out_is_as_by_default():
    assert from_query("") == Controls()
    assert from_query("stages=3") == replace(Controls(), num_stages=3)


@given(st.text(max_size=200) | st.binary(max_size=200).map(lambda data: data.decode("latin-1")))
def test_any_text_is_a_state_or_is_refused(text):
    try:
        state = from_query(text)
    except PlaygroundError:
        return
    assert from_query(to_query(state)) == state


@given(
    st.dictionaries(st.sampled_from([*LIMITS, "cuts", "replicas", "model", "layout", "overlap"]), st.text(max_size=30))
)
def test_known_names_with_any_value_are_a_state_or_are_refused(values):
    try:
        state = from_query(urlencode(values))
    except PlaygroundError:
        return
    for name, (low, high) in LIMITS.items():
        if name in values:
            assert low <= float(values[name]) <= high
    assert from_query(to_query(state)) == state


@pytest.mark.parametrize(
    ("query", "words"),
    [
        ("stages=0", "expected a whole number from 1 to 256"),
        ("stages=257", "expected a whole number from 1 to 256"),
        ("stages=-1", "stages = '-1'"),
        ("stages=1e2", "stages"),
        ("stages=%EF%BC%92", "stages"),
        ("stages=1&stages=2", "twice"),
        ("stagse=1", "did you mean 'stages'"),
        ("slowdown=nan", "expected a number from 0.1 to 100"),
        ("slowdown=inf", "slowdown"),
        ("schedule=../../etc/passwd", "one of gpipe, 1f1b"),
        ("schedule=mine.py:order", "one of gpipe, 1f1b"),
        ("plan=../../etc/passwd", "16 hexadecimal digits"),
        ("offload=optimizer=host,", "one of none, optimizer=host"),
        ("cuts=1,,2", "commas"),
        ("cuts=" + ",".join(["1"] * 300), "commas"),
        ("replicas=0", "1 to 1024 replicas"),
        ("overlap=yes", "one of on, off"),
        ("model=%00", "the name of a model"),
        ("model=" + "a" * 400, "the name of a model"),
        ("model=%ff", "cannot be read"),
        ("stages", "cannot be read"),
        ("a=1&" * 100, "cannot be read"),
        ("model=" + "a" * MAX_QUERY_LENGTH, "characters"),
    ],
)
def test_a_hostile_link_is_refused_with_what_is_wrong(query, words):
    with pytest.raises(PlaygroundError) as caught:
        from_query(query)
    assert words in str(caught.value)
    assert len(str(caught.value)) < 500
