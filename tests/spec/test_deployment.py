"""Deployment documents: what they may say, and what is refused with its place."""

import time
from dataclasses import replace
from pathlib import Path

import pytest

from meshwright.spec import (
    Deployment,
    Diurnal,
    DocumentError,
    Gamma,
    Group,
    Head,
    Latency,
    MeshwrightError,
    ModelCall,
    Outage,
    Poisson,
    Query,
    ServedModel,
    ServingError,
    Straggler,
    Trace,
    Trunk,
    read_deployment,
    write_deployment,
    write_document,
)
from meshwright.spec.units import Seconds

GOOD = """
schema = "meshwright/deployment/1"
devices = 2
[[models]]
name = "a"
slo = "25 ms"
latency = { alpha = "1 ms", beta = "5 ms", largest = 8 }
arrivals = { kind = "poisson", rate = 30 }
"""
LINE = 'alpha = "1 ms", beta = "5 ms", largest = 8'
MODEL = ServedModel(name="a", slo=0.025, latency=Latency(alpha=0.001, beta=0.005, largest=8), arrivals=Poisson(rate=30))


def read(tmp_path, text, name="served.toml"):
    path = tmp_path / name
    path.write_text(text)
    return read_deployment(path)


def test_a_document_is_read(tmp_path):
    assert read(tmp_path, GOOD) == Deployment(models=(MODEL,), devices=2)
    more = GOOD + '[[troubles]]\nkind = "outage"\ndevice = 1\nsince = "2 s"\nuntil = "3 s"\n'
    more += '[[troubles]]\nkind = "straggler"\ndevice = 0\nfactor = 2\n'
    assert read(tmp_path, more).troubles == (
        Outage(device=1, since=2.0, until=3.0),
        Straggler(device=0, factor=2.0),
    )


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("devices = 2", "devices = 0", "devices is 0; expected 1 to"),
        ("devices = 2", "devices = 2000000", "expected 1 to 1e"),
        ("devices = 2", "devices = 1.5", "devices"),
        ("devices = 2", 'devices = 2\npolicy = "eager"\nslack = "2 min"', "slack is 120; expected 0 to 60"),
        ("devices = 2", "devices = 2\njitter = 3.0", "jitter is 3; expected 0 to 2"),
        ("devices = 2", "devices = 2\ndealy = 3", "unknown key 'dealy' .did you mean 'delay'"),
        ('"25 ms"', '"5 ms"', "no request can meet it"),
        ('"25 ms"', '"25 km"', r"models\[0\].slo"),
        ('"25 ms"', "-1", "slo"),
        ('"25 ms"', '"0 s"', "slo is 0"),
        ('"1 ms"', "-1", "alpha"),
        ("largest = 8", "largest = 0", "largest is 0; expected 1 to 65536"),
        ("largest = 8", "largest = 100000", "largest is 100000; expected 1 to 65536"),
        ('"1 ms", beta = "5 ms"', '"0 s", beta = "0 s"', "a batch of one sample takes 0 s; expected 10 ns or more"),
        ("rate = 30", "rate = -30", "rate is -30; expected at least 0"),
        ("rate = 30", "rate = nan", "finite"),
        ("rate = 30", 'rate = "30"', r"models\[0\].arrivals"),
        ('"poisson", rate = 30', '"poisson"', "rate"),
        ('"poisson"', '"gamma"', "shape"),
        ('"poisson", rate = 30', '"gamma", rate = 3, shape = 0', "shape is 0; expected 0.001 to 1000"),
        ('"poisson", rate = 30', '"diurnal", low = 3, high = 2', "low is 3; expected 0 to 2"),
        ('"poisson", rate = 30', '"diurnal", low = 1, high = 2, period = "0 s"', "period is 0"),
        ('"poisson", rate = 30', '"trace", file = "x", speed = 0', "speed is 0"),
        ('"poisson"', '"weekly"', "weekly"),
        ('name = "a"', 'name = "a"\ncopies = 0', "copies is 0; expected 1 to"),
        ('name = "a"', 'name = ""', "A model has an empty name"),
        ('name = "a"', 'name = "a"\ninputs = [{ name = "" }]', "A tensor has an empty name"),
        ('name = "a"', 'name = "a"\ninputs = [{ name = "x" }, { name = "x" }]', "two inputs with the same name"),
        ('name = "a"', 'name = "a"\noutputs = [{ name = "x" }, { name = "x" }]', "two outputs with the same name"),
        ("largest = 8", 'points = [[1, "1 ms"]]', "points, and alpha or beta as well"),
        (LINE, 'points = [[1, "2 ms"], [4, "1 ms"]]', "0.002 s for batches of 1, and next 0.001 s for batches of 4"),
        (LINE, 'points = [[4, "1 ms"], [4, "2 ms"]]', "expected ascending sizes"),
        (LINE, 'points = [[0, "1 ms"]]', "size is 0; expected 1 to 65536"),
        (LINE, 'points = [[1, "2 d"]]', "seconds is 172800; expected 0 to 86400"),
        (LINE, 'points = [[1, "0 s"]]', "a batch of one sample takes 0 s; expected 10 ns or more. Check the points"),
        (LINE, 'points = [[1, "30 ms"]]', "a batch of one takes 0.03 s, longer than its SLO"),
        (LINE, "points = [[1, 2]]", r"latency.points\[0\]\[1\]: 2 has no unit"),
        (LINE, "largest = 8", "a batch of one sample takes 0 s; expected 10 ns or more. Check alpha and beta"),
        ('name = "a"', 'name = "a"\nimage_size = 8', "no `model` for them"),
        ("[[models]]", "[[model]]", "unknown key 'model'"),
    ],
)
def test_a_bad_value_is_refused_with_its_file(tmp_path, old, new, words):
    assert old in GOOD
    with pytest.raises(DocumentError, match=words) as caught:
        read(tmp_path, GOOD.replace(old, new))
    assert str(caught.value).startswith(str(tmp_path / "served.toml"))


def test_a_latency_of_points_goes_through_them():
    latency = Latency(points=((2, Seconds(0.004)), (4, Seconds(0.005)), (8, Seconds(0.011))), largest=16)
    expected = {1: 4.0, 2: 4.0, 3: 4.5, 4: 5.0, 5: 6.5, 8: 11.0, 10: 14.0, 16: 23.0}
    for batch, milliseconds in expected.items():
        assert latency.of(batch) == pytest.approx(milliseconds / 1e3, rel=1e-12)
    assert [latency.of(size) for size, _ in latency.points] == [seconds for _, seconds in latency.points]
    assert {Latency(points=((3, Seconds(0.004)),)).of(batch) for batch in (1, 3, 9)} == {0.004}
    # What a larger batch took less for is noise.
    measured = Latency.through([(4, 0.003), (1, 0.002), (8, 0.0029), (16, 0.004)])
    assert measured.points == ((1, 0.002), (4, 0.003), (8, 0.003), (16, 0.004))
    assert measured.largest == 16


def test_points_are_read_and_written(tmp_path):
    read_model = read(tmp_path, GOOD.replace(LINE, 'points = [[1, "1 ms"], [8, "2 ms"]], largest = 9')).models[0]
    assert read_model.latency == Latency(points=((1, Seconds(0.001)), (8, Seconds(0.002))), largest=9)
    deployment = Deployment(models=(read_model,), devices=1)
    write_document(deployment, tmp_path / "again.toml")
    assert read_deployment(tmp_path / "again.toml") == deployment


def test_models_are_found_beside_their_document(tmp_path):
    def model(text):
        return read(tmp_path, GOOD.replace('name = "a"', f'name = "a"\n{text}')).models[0]

    assert model('model = "gpt-tiny"').model == "gpt-tiny"
    for reference in ("mine.py:build", "m.pt2", "shape.toml", "folder/", "../m.pt2"):
        assert model(f'model = "{reference}"').model == str(tmp_path / reference)
    assert model('model = "/there/m.pt2"').model == "/there/m.pt2"
    hooked = model('model = "gpt-tiny"\npreprocess = "a.py:f"\npostprocess = "b.py:g"\ninputs = [{ name = "x" }]')
    assert (hooked.preprocess, hooked.postprocess) == (str(tmp_path / "a.py:f"), str(tmp_path / "b.py:g"))


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ('kind = "outage"\ndevice = 2\nsince = "0 s"', "device 2, but the deployment has devices 0 to 1"),
        ('kind = "outage"\ndevice = -1\nsince = "0 s"', "names device -1"),
        ('kind = "outage"\ndevice = 0\nsince = "3 s"\nuntil = "2 s"', "expected an end after the start"),
        ('kind = "outage"\ndevice = 0\nsince = "1e20 s"', "since is 1e"),
        ('kind = "straggler"\ndevice = 0\nfactor = 0', "factor is 0"),
        ('kind = "fire"\ndevice = 0', "fire"),
    ],
)
def test_a_bad_trouble_is_refused_with_its_file(tmp_path, more, words):
    with pytest.raises(DocumentError, match=words) as caught:
        read(tmp_path, f"{GOOD}[[troubles]]\n{more}\n")
    assert str(caught.value).startswith(str(tmp_path / "served.toml"))


def test_models_have_names_of_their_own():
    with pytest.raises(ServingError, match="Two models are called 'a'"):
        Deployment(models=(MODEL, MODEL), devices=1)
    with pytest.raises(ServingError, match="no models"):
        Deployment(models=(), devices=1)
    many = replace(MODEL, copies=60_000)
    with pytest.raises(ServingError, match="models is 120000"):
        Deployment(models=(many, replace(many, name="b")), devices=1)


def test_traces_are_found_beside_their_document(tmp_path, monkeypatch):
    (tmp_path / "inner").mkdir()
    monkeypatch.chdir(tmp_path)
    text = GOOD.replace('"poisson", rate = 30', '"trace", file = "FILE"')

    def file(name):
        return read(tmp_path / "inner", text.replace("FILE", name)).models[0].arrivals.file

    assert file("day.txt") == str(tmp_path / "inner" / "day.txt")
    assert file("../day.txt") == str(tmp_path / "inner" / ".." / "day.txt")
    assert file("/elsewhere/day.txt") == "/elsewhere/day.txt"
    monkeypatch.setenv("HOME", str(tmp_path))
    assert file("~/day.txt") == str(tmp_path / "day.txt")


@pytest.mark.parametrize(
    "make",
    [
        lambda bad: Poisson(rate=bad),
        lambda bad: Gamma(rate=bad, shape=1.0),
        lambda bad: Gamma(rate=1.0, shape=bad),
        lambda bad: Diurnal(low=0.0, high=bad),
        lambda bad: Trace(file="x", speed=bad),
        lambda bad: Latency(alpha=bad, beta=0.0),
        lambda bad: replace(MODEL, slo=bad),
        lambda bad: Straggler(device=0, factor=bad),
        lambda bad: Outage(device=0, since=bad),
        lambda bad: Outage(device=0, since=0.0, until=bad),
        lambda bad: Deployment(models=(MODEL,), devices=1, jitter=bad),
    ],
)
def test_what_is_no_number_is_refused_by_every_part(make):
    for bad in (float("nan"), float("inf"), -1.0):
        with pytest.raises(MeshwrightError):
            make(bad)


def in_groups(*groups, devices=4, memory=2.0, limit=4.0):
    models = tuple(replace(MODEL, name=name, memory=memory) for name in "abc")
    return Deployment(models=models, devices=devices, device_memory=limit, groups=groups)


def test_groups_that_fit():
    found = in_groups(Group(devices=1, models=("a", "b")), Group(devices=2, models=("b",), weights=(0.5,)))
    assert [found.memory_of(group.models) for group in found.groups] == [4, 2]
    assert [group.weight_of("b") for group in found.groups] == [1, 0.5]
    assert found.groups[1].weight_of("a") == 0
    assert replace(MODEL, memory=None) == MODEL  # memory is asked for only where devices have some
    # Copies are held one by one, and rounding is no reason to refuse.
    third = replace(MODEL, copies=3, memory=4.0 / 3)
    assert Deployment(models=(third,), devices=1, device_memory=4.0, groups=(Group(devices=1, models=("a",)),)).groups


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Group(devices=0, models=("a",)), "devices is 0; expected 1 to"),
        (lambda: Group(devices=1, models=("a", "a")), "names a model twice: a, a"),
        (lambda: Group(devices=1, models=("a", "b"), weights=(1.0,)), "2 models and 1 weights"),
        (lambda: Group(devices=1, models=("a",), weights=(0.0,)), "weight is 0; expected"),
        (lambda: in_groups(Group(devices=1, models=("d",))), "'d', but the deployment has no such model"),
        (
            lambda: in_groups(Group(devices=3, models=()), Group(devices=2, models=())),
            "have 5 devices in all, but .* 4",
        ),
        (lambda: in_groups(Group(devices=1, models=("a", "b", "c"))), r"group 0 \(a, b, c\) take 6 B, .* has 4 B"),
        (lambda: in_groups(memory=5.0), "'a' takes 5 B, but a device has 4 B"),
        (lambda: in_groups(memory=None), "'a' has no `memory`"),
        (lambda: in_groups(limit=0.0), "device_memory is 0"),
        (
            lambda: Deployment(
                models=(replace(MODEL, copies=3, memory=2.0),),
                devices=1,
                device_memory=4.0,
                groups=(Group(devices=1, models=("a",)),),
            ),
            "take 6 B",
        ),
    ],
)
def test_groups_that_do_not_fit(make, words):
    with pytest.raises(ServingError, match=words):
        make()


def test_what_is_written_is_read_again_from_any_folder(tmp_path, monkeypatch):
    (tmp_path / "inner").mkdir()
    (tmp_path / "day.txt").write_text("1\n2\n")
    monkeypatch.chdir(tmp_path)
    text = GOOD.replace('"poisson", rate = 30', '"trace", file = "day.txt"')
    text += 'model = "mine.py:build"\nmemory = "1 GiB"\n[[groups]]\ndevices = 1\nmodels = ["a"]\nweights = [2]\n'
    (tmp_path / "served.toml").write_text(text)
    found = read_deployment("served.toml")
    assert found.groups == (Group(devices=1, models=("a",), weights=(2.0,)),)
    for name in ("inner/placed.toml", "inner/placed.json", "placed.toml"):
        write_deployment(found, name)
        monkeypatch.chdir(tmp_path / "inner")
        again = read_deployment(tmp_path / name)
        assert Path(again.models[0].arrivals.file).samefile(tmp_path / "day.txt")
        assert again.groups == found.groups
        assert Path(again.models[0].model).parent.samefile(tmp_path)
        assert Path(again.models[0].model).name == "mine.py:build"
        assert again.models[0].memory == 2**30
        monkeypatch.chdir(tmp_path)


def asking(*calls, rate=10.0):
    return Query(name="q", slo=0.1, rate=rate, calls=calls)


def call(name, after=None, **facts):
    return ModelCall(name=name, after=after, latency=MODEL.latency, **facts)


def test_a_deployment_may_have_queries_alone(tmp_path):
    text = """
schema = "meshwright/deployment/1"
devices = 2
groups = [{ devices = 1, models = ["q.find"] }]
[[queries]]
name = "q"
slo = "100 ms"
rate = 10
calls = [
    { name = "find", latency = { alpha = "1 ms", beta = "5 ms", largest = 8 } },
    { name = "tell", after = "find", fan_out = 2.5, latency = { alpha = "1 ms", beta = "5 ms", largest = 8 } },
]
"""
    found = read(tmp_path, text)
    assert found.queries == (asking(call("find"), call("tell", "find", fan_out=2.5)),)
    assert found.models == ()
    assert asking(call("a"), call("b", "a"), call("c", "a"), call("d", "b")).calls[3].after == "b"


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (asking, "calls is 0; expected 1 to 100"),
        (lambda: asking(call("a", "b")), "'a' comes after 'b'; expected no `after` in the first call"),
        (lambda: asking(call("a"), call("b")), "'b' comes after None; expected one of the earlier calls a"),
        (
            lambda: asking(call("a"), call("b", "c"), call("c", "a")),
            "'b' comes after 'c'; expected one of the earlier calls a",
        ),
        (lambda: asking(call("a"), call("a", "a")), "two calls 'a'"),
        (lambda: asking(call("a", fan_out=2.0)), "first call has a fan_out"),
        (lambda: asking(call("a"), call("b", "a", fan_out=-1.0)), "fan_out is -1; expected 0 to"),
        (lambda: asking(call("a"), call("b", "a", fan_out=1e6), rate=1e6), "call 'b': rate is 1e[+]12; expected"),
        (lambda: asking(call("a"), rate=-1.0), "rate is -1"),
        (lambda: Deployment(models=(replace(MODEL, name="q.a"),), devices=1, queries=(asking(call("a")),)), "'q.a'"),
    ],
)
def test_bad_queries_are_refused(make, words):
    with pytest.raises(ServingError, match=words):
        make()


def test_a_deployment_may_have_trunks_alone(tmp_path):
    text = """
schema = "meshwright/deployment/1"
devices = 2
[[trunks]]
name = "t"
slo = "100 ms"
latency = { alpha = "1 ms", beta = "5 ms", largest = 8 }
heads = [{ name = "a", rate = 3, latency = { alpha = "1 ms", beta = "5 ms", largest = 8 } }]
"""
    heads = (Head(name="a", latency=MODEL.latency, rate=3.0),)
    assert read(tmp_path, text).trunks == (Trunk(name="t", slo=0.1, latency=MODEL.latency, heads=heads),)
    with pytest.raises(ServingError, match="Two models are called 'a'"):
        Deployment(models=(MODEL,), devices=1, trunks=(Trunk(name="a", slo=1.0, latency=MODEL.latency, heads=heads),))
    with pytest.raises(ServingError, match="two heads with the same name"):
        Trunk(name="t", slo=0.1, latency=MODEL.latency, heads=heads * 2)
    with pytest.raises(ServingError, match="heads is 0; expected 1 to"):
        Trunk(name="t", slo=0.1, latency=MODEL.latency, heads=())
    with pytest.raises(ServingError, match="rate is -1"):
        replace(heads[0], rate=-1.0)


def test_an_own_policy_lies_beside_the_file(tmp_path, monkeypatch):
    folder = tmp_path / "served"
    folder.mkdir()
    (folder / "d.toml").write_text(GOOD.replace("devices = 2", 'devices = 2\npolicy = "mine.py:Mine"'))
    monkeypatch.chdir(tmp_path)
    read = read_deployment("served/d.toml")
    assert read.policy == f"{folder}/mine.py:Mine"
    other = write_deployment(read, tmp_path / "other.toml")
    assert 'policy = "served/mine.py:Mine"' in other.read_text()
    assert read_deployment(other) == read
    monkeypatch.chdir(folder)
    assert Path(read_deployment("../other.toml").policy).resolve() == Path(read.policy)
    # A name is none of a file.
    (folder / "e.toml").write_text(GOOD.replace("devices = 2", 'devices = 2\npolicy = "timeouts:wait=10"'))
    assert read_deployment("e.toml").policy == "timeouts:wait=10"


def test_many_names_are_compared_at_once():
    line = Latency(alpha=Seconds(1e-3), beta=Seconds(0.0))
    models = [ServedModel(name=f"m{number}", slo=Seconds(1.0), latency=line) for number in range(20_000)]
    begin = time.perf_counter()
    Deployment(models=tuple(models), devices=1)
    with pytest.raises(ServingError, match="Two models are called 'm7'"):
        Deployment(models=(*models, models[7]), devices=1)
    # Each with each other, it was a minute.
    assert time.perf_counter() - begin < 5
