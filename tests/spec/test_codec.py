"""The codec: what goes out comes back, and nothing else is let in."""

import contextlib
import copy
import dataclasses
import json
import math
import typing

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.spec import (
    Cluster,
    DocumentError,
    GradientExchange,
    MeshwrightError,
    Offload,
    Plan,
    PlanError,
    ServingError,
    Workload,
    codec,
    content_hash,
    decode_document,
    encode_document,
    files,
    read_document,
    write_document,
    write_text,
)
from meshwright.spec.codec import document_kind
from tests.marks import examples
from tests.spec.examples import CLUSTER, EXAMPLES, PLACEMENT, PLAN, WORKLOAD
from tests.strategies import DOCUMENTS

every_type = pytest.mark.parametrize("kind", sorted(EXAMPLES))
both_formats = pytest.mark.parametrize("suffix", [".json", ".toml"])
any_document = st.one_of(*DOCUMENTS.values())
# Anything that a JSON file may hold.
plain_data = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


def same(left, right):
    """Equality by type and value, written apart from the `__eq__` of the types."""
    if isinstance(left, np.ndarray):
        return left.dtype == right.dtype and left.shape == right.shape and bool((left == right).all())
    if dataclasses.is_dataclass(left):
        fields = [field.name for field in dataclasses.fields(left) if field.init]
        return type(left) is type(right) and all(same(getattr(left, n), getattr(right, n)) for n in fields)
    if isinstance(left, tuple):
        return len(left) == len(right) and all(map(same, left, right))
    return left == right


def names_in(folder):
    return sorted(path.name for path in folder.iterdir())


def places(data, path=()):
    """Paths of all values of a document, itself first."""
    yield path
    items = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    for key, item in items:
        yield from places(item, (*path, key))


def at(data, path):
    for key in path:
        data = data[key]
    return data


def replaced(data, path, value):
    """A copy of the document with one value changed."""
    if not path:
        return value
    data = copy.deepcopy(data)
    at(data, path[:-1])[path[-1]] = value
    return data


# --- round trips ---


@given(any_document)
def test_json_text_round_trip(document):
    text = codec.dump_json(encode_document(document))
    assert same(document, decode_document(type(document), json.loads(text), "here"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("documents")


@both_formats
@given(document=any_document)
@settings(max_examples=examples(60))
def test_file_round_trip(folder, suffix, document):
    path = write_document(document, folder / f"document{suffix}")
    assert same(document, read_document(type(document), path))


@every_type
@both_formats
def test_examples_round_trip_and_name_their_schema(tmp_path, kind, suffix):
    document = EXAMPLES[kind]
    path = write_document(document, tmp_path / f"document{suffix}")
    assert same(document, read_document(type(document), path))
    assert f"meshwright/{kind}/{2 if kind in ('plan', 'placement') else 1}" in path.read_text()


@every_type
def test_examples_fill_every_field(kind):
    """Else the tests below would not reach it: no field of an example has its default."""

    def dataclasses_in(value):
        if dataclasses.is_dataclass(value):
            yield value
            for field in dataclasses.fields(value):
                yield from dataclasses_in(getattr(value, field.name))
        elif isinstance(value, tuple):
            for item in value:
                yield from dataclasses_in(item)

    seen, filled = set(), set()
    for value in dataclasses_in(EXAMPLES[kind]):
        for field in dataclasses.fields(value):
            if field.init and field.default is not dataclasses.MISSING:
                seen.add((type(value).__name__, field.name))
                if getattr(value, field.name) != field.default:
                    filled.add((type(value).__name__, field.name))
    # An op that is replicable or backward would not fit into the small graph, which is whole and for inference; nor
    # staleness to an own schedule, nor sharded states, an algorithm of all-reduces or states on the host to servers,
    # nor servers to experts, nor shares of microbatches to the schedules that other tests give the example, nor
    # scaling to groups, nor kept results to layers that are compiled.
    lacking = seen - filled - {("Op", "replicable"), ("Op", "phase"), ("Graph", "recompute"), ("Graph", "collectives")}
    lacking -= {("Graph", "keeps"), ("Plan", "keeps")}
    lacking -= {("Deployment", "scaling")}
    ways = ("staleness", "zero", "shard_size", "algorithm", "node_size", "every_steps")
    lacking -= {("GradientExchange", name) for name in ways} | {("OpPlacement", "input_dim"), ("Sharding", "expert")}
    lacking -= {("StagePlan", "shares"), ("Plan", "offload")}
    lacking -= {("Offload", name) for name in ("optimizer", "parameters", "activations")}
    assert not lacking, f"give {lacking} a value in tests/spec/examples.py"


def test_states_on_the_host_come_back():
    workload = dataclasses.replace(EXAMPLES["plan"].workload, kind="training")
    plan = dataclasses.replace(
        EXAMPLES["plan"],
        workload=workload,
        compiled=False,
        exchange=GradientExchange(zero=3),
        offload=Offload(optimizer="nvme", parameters="host", activations="host"),
    )
    document = encode_document(plan)
    assert document["offload"] == {"optimizer": "nvme", "parameters": "host", "activations": "host"}
    assert decode_document(Plan, document, "plan") == plan
    document["offload"]["optimizer"] = "tape"
    with pytest.raises(MeshwrightError, match="'tape'"):
        decode_document(Plan, document, "plan")


def test_the_staleness_of_waves_comes_back():
    plan = dataclasses.replace(
        EXAMPLES["plan"], schedule="hetpipe", schedule_hash="", exchange=GradientExchange(staleness=2)
    )
    assert encode_document(plan)["exchange"] == {"staleness": 2}
    assert decode_document(Plan, encode_document(plan), "plan") == plan


@pytest.mark.parametrize("facts", [{"zero": 1}, {"algorithm": "hierarchical", "node_size": 2}, {"every_steps": 4}])
def test_an_exchange_comes_back(facts):
    plan = dataclasses.replace(EXAMPLES["plan"], exchange=GradientExchange(**facts))
    assert encode_document(plan)["exchange"] == facts
    assert decode_document(Plan, encode_document(plan), "plan") == plan


def test_defaults_are_left_out_and_come_back():
    assert encode_document(Workload(global_batch=8)) == {"schema": "meshwright/workload/1", "global_batch": 8}


# --- what is refused ---


@every_type
def test_a_misspelt_key_is_refused_with_the_right_one_named(kind):
    document = EXAMPLES[kind]
    data = encode_document(document)
    misspelt = 0
    for path in places(data):
        if path and isinstance(path[-1], str) and path[-1] != "schema" and "peak_flops_per_s" not in path[:-1]:
            changed = copy.deepcopy(data)
            table = at(changed, path[:-1])
            table[path[-1] + "x"] = table.pop(path[-1])
            told = f"unknown key '{path[-1]}x' .did you mean '{path[-1]}'"
            if path[-1] == "kind":
                # Without it nobody knows which other keys there may be.
                told += "|key 'kind' is missing; expected one of"
            with pytest.raises(DocumentError, match=told):
                decode_document(type(document), changed, "here")
            misspelt += 1
    assert misspelt >= 5


@every_type
def test_a_missing_key_is_refused_or_was_optional(kind):
    document = EXAMPLES[kind]
    data = encode_document(document)
    required = {f.name for f in dataclasses.fields(document) if f.init and f.default is dataclasses.MISSING}
    for key in data:
        changed = {name: item for name, item in data.items() if name != key}
        if key == "schema" or key in required:
            with pytest.raises(DocumentError, match=key):
                decode_document(type(document), changed, "here")
        else:
            # Keys that need each other (schedule and schedule_hash, models and groups) are refused by the document.
            with contextlib.suppress(PlanError, ServingError):
                assert not same(document, decode_document(type(document), changed, "here"))


@every_type
def test_wrong_types_are_refused_everywhere(kind):
    document = EXAMPLES[kind]
    data = encode_document(document)
    for path in places(data):
        if path == ("schema",):
            continue
        value = at(data, path)
        wrong = [None, [None], {"": None}, math.nan, math.inf, 1e400]
        if not isinstance(value, bool):
            wrong.append(True)
        if not isinstance(value, float):
            wrong.append(1.5)
        if not isinstance(value, str):
            wrong.append("?")
        if isinstance(value, str):
            wrong.append(3)
        for item in wrong:
            if item is None and path[-1:] in (
                ("batch_size",),
                ("output_dim",),
                ("racks",),
                ("loader",),
                ("model_flops",),
                ("nvme",),
                ("until",),
                ("memory",),
                ("load",),
                ("device_memory",),
                ("after",),
                ("latency",),
                ("model",),
                ("preprocess",),
                ("postprocess",),
                ("sequence_length",),
                ("image_size",),
            ):
                continue  # these may be none
            if item == 3 and {"shape", "flops", "backward_flops", "model_flops"} & set(path):
                continue  # sizes are numbers or text
            with pytest.raises(DocumentError) as caught:
                decode_document(type(document), replaced(data, path, item), "here")
            assert str(caught.value).startswith("here")


@given(st.sampled_from(sorted(EXAMPLES)), st.data())
def test_random_damage_raises_nothing_but_our_errors(kind, data):
    document = EXAMPLES[kind]
    encoded = encode_document(document)
    path = data.draw(st.sampled_from(list(places(encoded))))
    try:
        decoded = decode_document(type(document), replaced(encoded, path, data.draw(plain_data)), "here")
    except MeshwrightError:
        return
    assert type(decoded) is type(document)


@given(plain_data)
def test_random_data_is_no_document(data):
    with pytest.raises(DocumentError):
        decode_document(Cluster, data, "here")


def test_infinite_toml_numbers_are_refused(tmp_path):
    text = write_document(CLUSTER, tmp_path / "cluster.toml").read_text()
    for word in ("inf", "nan", "-inf"):
        path = tmp_path / "changed.toml"
        path.write_text(text.replace("latency_s = 1e-06", f"latency_s = {word}"))
        with pytest.raises(DocumentError, match="not a finite number"):
            read_document(Cluster, path)


@pytest.mark.parametrize("number", [math.nan, math.inf, np.float64("nan")])
@both_formats
def test_what_is_not_finite_is_not_written(tmp_path, number, suffix):
    @dataclasses.dataclass(frozen=True)
    class Note:
        number: float

    path = tmp_path / f"note{suffix}"
    with pytest.raises(DocumentError, match="finite"):
        write_document(Note(number), path)
    assert names_in(tmp_path) == []


def test_another_schema_is_named():
    data = encode_document(WORKLOAD)
    with pytest.raises(DocumentError, match="not a cluster document"):
        decode_document(Cluster, data, "here")
    with pytest.raises(DocumentError, match="another version"):
        decode_document(Workload, {**data, "schema": "meshwright/workload/99"}, "here")


@pytest.mark.parametrize(("document", "text"), [(PLAN, "plan"), (PLACEMENT, "placement")])
def test_half_precision_of_the_first_schema_has_master_weights(document, text):
    data = encode_document(document)
    assert data["schema"] == f"meshwright/{text}/2"
    for written, read in (("bfloat16", "mixed-bf16-gradients"), ("float64", "float64")):
        old = {
            **data,
            "schema": f"meshwright/{text}/1",
            "workload": {**data["workload"], "precision": written},
        }
        assert decode_document(type(document), old, "here").workload.precision == read
    for wrong in ("meshwright/plan/0", "meshwright/plan/3", "meshwright/plan/x"):
        with pytest.raises(DocumentError, match="schema"):
            decode_document(type(document), {**data, "schema": wrong}, "here")


@pytest.mark.parametrize(
    ("schema", "kind"),
    [
        ("meshwright/plan/1", "plan"),
        ("meshwright/gptshape/99", "gptshape"),
        ("somebody/plan/1", None),
        ("meshwright/plan", None),
        ("meshwright//1", None),
        ("meshwright/plan/1/2", None),
        (["meshwright/plan/1"], None),
        (None, None),
    ],
)
def test_the_kind_of_a_document(schema, kind):
    assert document_kind({"a": 1, "schema": schema}) == kind


@pytest.mark.parametrize("data", [None, [], "meshwright/plan/1", {}, {"model_type": "gpt2"}])
def test_what_is_no_document_has_no_kind(data):
    assert document_kind(data) is None


# --- truncation ---


@every_type
@both_formats
def test_a_file_cut_anywhere_is_refused(tmp_path, kind, suffix):
    document = EXAMPLES[kind]
    content = write_document(document, tmp_path / f"whole{suffix}").read_bytes()
    path = tmp_path / f"cut{suffix}"
    last = len(content.rstrip()) if suffix == ".json" else len(content)
    for cut in range(last):
        # Every place of a short file; of a long one those around line ends, where TOML may stay whole, and each ninth.
        if last > 600 and cut % 9 and b"\n" not in content[cut - 1 : cut + 2]:
            continue
        path.write_bytes(content[:cut])
        with pytest.raises(DocumentError) as caught:
            read_document(type(document), path)
        assert path.name in str(caught.value)


# --- files ---


def test_places_that_cannot_be_written(tmp_path):
    occupied = tmp_path / "occupied.json"
    (occupied / "inside").mkdir(parents=True)
    (tmp_path / "file").write_text("")
    for path in (occupied, tmp_path / "file" / "workload.json"):
        with pytest.raises(DocumentError, match="cannot be written"):
            write_document(WORKLOAD, path)
    assert names_in(tmp_path) == ["file", "occupied.json"]


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
@pytest.mark.parametrize("function", ["fdopen", "replace"])
def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch, error, function):
    path = write_text("old", tmp_path / "file.txt")

    def fail(*args, **kwargs):
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(files.os if function == "fdopen" else files.Path, function, fail)
        with pytest.raises(DocumentError if isinstance(error, OSError) else KeyboardInterrupt):
            write_text("new", path)
    assert path.read_text() == "old"
    assert names_in(tmp_path) == ["file.txt"]


def test_a_half_written_text_leaves_the_old_file(tmp_path):
    path = write_text("old", tmp_path / "file.txt")
    with pytest.raises(UnicodeEncodeError):
        write_text("new" * 100_000 + "\ud800", path)
    assert path.read_text() == "old"
    assert names_in(tmp_path) == ["file.txt"]


def test_written_files_have_the_usual_permissions(tmp_path):
    plain = tmp_path / "plain"
    plain.write_text("")
    assert write_text("x", tmp_path / "new" / "ours").stat().st_mode == plain.stat().st_mode


# --- hashes ---


@every_type
def test_hashes_change_with_any_fact(kind):
    """Every leaf of every document is a fact: changing it changes the hash, or is refused."""
    document = EXAMPLES[kind]
    data = encode_document(document)
    changed = 0
    for path in places(data):
        value = at(data, path)
        if path == ("schema",) or isinstance(value, dict | list):
            continue
        other = not value if isinstance(value, bool) else value + ("x" if isinstance(value, str) else 1)
        try:
            decoded = decode_document(type(document), replaced(data, path, other), "here")
        except MeshwrightError:
            continue
        assert content_hash(decoded) != content_hash(document), path
        changed += 1
    assert changed >= 2


@given(any_document)
def test_hashes_survive_a_round_trip(document):
    copied = decode_document(type(document), json.loads(json.dumps(encode_document(document))), "here")
    assert content_hash(copied) == content_hash(document)
    assert len(content_hash(document)) == 16


def test_hashes_are_the_same_in_every_process(run_fresh, monkeypatch):
    code = (
        "from tests.spec.examples import EXAMPLES\n"
        "from meshwright.spec import content_hash\n"
        "print(*(content_hash(EXAMPLES[kind]) for kind in sorted(EXAMPLES)), EXAMPLES['graph'].content_hash)"
    )
    here = [*(content_hash(EXAMPLES[kind]) for kind in sorted(EXAMPLES)), EXAMPLES["graph"].content_hash]
    for seed in ("1", "2"):
        monkeypatch.setenv("PYTHONHASHSEED", seed)
        assert run_fresh(code).split() == here


def test_the_order_of_a_table_is_no_fact():
    kind = CLUSTER.device_kinds[0]
    turned = dataclasses.replace(kind, peak_flops_per_s=dict(reversed(kind.peak_flops_per_s.items())))
    assert list(turned.peak_flops_per_s) != list(kind.peak_flops_per_s)
    assert content_hash(turned) == content_hash(kind)


def test_types_that_the_codec_does_not_know_are_a_defect():
    @dataclasses.dataclass
    class Odd:
        value: typing.Any

    with pytest.raises(TypeError, match="not part of the codec"):
        codec.decode(Odd, {"value": object()})
