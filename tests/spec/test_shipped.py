"""Graphs that ship with Meshwright can be read without torch, within bounds, and damage is told."""

import gzip
import json

import pytest

from meshwright.spec import DocumentError, ModelReferenceError, load_shipped_graph, shipped_graphs
from meshwright.spec import shipped as module
from meshwright.spec.shipped import pack, unpack


@pytest.mark.parametrize("name", shipped_graphs())
@pytest.mark.matrix
def test_a_shipped_graph_is_for_training_at_any_batch_size(name):
    graph = load_shipped_graph(name)
    assert graph.name == name
    assert graph.mode == "training"
    assert graph.has_loss
    assert graph.batch_size is None
    assert len(graph.layers) >= 4


def test_shipped_graphs_are_small():
    folder = module.resources.files("meshwright.spec") / "graphs"
    packed = {item.name: item.read_bytes() for item in folder.iterdir()}
    assert set(packed) == {f"{name}.json.gz" for name in shipped_graphs()}
    assert max(len(gzip.decompress(content)) for content in packed.values()) < 10 * 10**6
    assert sum(map(len, packed.values())) < 2 * 10**6


def test_an_unknown_name_gets_the_nearest():
    with pytest.raises(ModelReferenceError, match=r"did you mean 'gpt2-small'\?"):
        load_shipped_graph("gpt2-smal")


def test_pack_and_unpack():
    text = json.dumps({"name": "Größe", "sizes": list(range(1000))})
    assert unpack(pack(text), "a test").decode("utf-8") == text
    assert pack(text) == pack(text)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda packed: packed[:-9], "x.gz: it is truncated"),
        (lambda packed: b"", "x.gz: it is truncated"),
        (lambda packed: b"no gzip" + packed, "x.gz: not valid gzip"),
        (lambda packed: packed[:40] + bytes([packed[40] ^ 255]) + packed[41:], "x.gz: not valid gzip"),
    ],
)
def test_damage_is_told(damage, message):
    with pytest.raises(DocumentError, match=message):
        unpack(damage(pack("0123456789" * 50 + "abcdefghijklmnopqrstuvwxyz")), "x.gz")


def test_what_unpacks_to_too_much_is_refused_before_it_is_unpacked(monkeypatch):
    monkeypatch.setattr(module, "MAX_UNPACKED_BYTES", 1000)
    assert len(unpack(pack("a" * 1000), "x.gz")) == 1000
    with pytest.raises(DocumentError, match="unpacks to over 1000 bytes"):
        unpack(pack("a" * 1001), "x.gz")
