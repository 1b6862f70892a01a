"""A user's files find the modules beside them: each those of its own folder, as they are when it is loaded."""

import pickle
import sys

import pytest

from meshwright.spec import ServingError
from meshwright.spec.own_code import afresh, folder_at, importable, load_function

FILE = """
import dataclasses, helper_of_test
from package_of_test.inner import NAME
from bare_of_test.inner import NAME as BARE
@dataclasses.dataclass
class Pair:
    a: "int"
def told():
    assert BARE == NAME
    return helper_of_test.WORD, NAME
def later():
    import later_of_test
    return later_of_test
def pair():
    return Pair(1)
def thing():
    return helper_of_test.Thing()
def is_thing(value):
    return isinstance(value, helper_of_test.Thing)
"""
NAMES = (
    "helper_of_test",
    "later_of_test",
    "package_of_test",
    "package_of_test.inner",
    "bare_of_test",
    "bare_of_test.inner",
)


def write(folder, word):
    for name in ("package_of_test", "bare_of_test"):
        (folder / name).mkdir(parents=True, exist_ok=True)
        (folder / name / "inner.py").write_text(f"NAME = {word!r}\n")
    (folder / "own.py").write_text(FILE)
    (folder / "other.py").write_text(FILE)
    (folder / "helper_of_test.py").write_text(f"WORD = {word!r}\nclass Thing: pass\n")
    (folder / "later_of_test.py").write_text(f"WORD = {word!r}\n")
    (folder / "package_of_test" / "__init__.py").write_text("")
    return folder / "own.py"


def load(path, name="told"):
    return load_function(path, name, expected="returns words", error=ServingError)


def call(function, path):
    with importable(path.parent):
        return function()


def test_files_of_two_folders_have_helpers_of_their_own(tmp_path):
    one, two = write(tmp_path / "one", "1"), write(tmp_path / "two", "2")
    of_one, of_two = load(one), load(two)
    assert (of_one(), of_two()) == (("1", "1"), ("2", "2"))
    assert (call(load(one, "later"), one).WORD, call(load(two, "later"), two).WORD) == ("1", "2")
    assert not set(NAMES) & set(sys.modules)


def test_a_file_that_is_loaded_again_has_its_helpers_as_they_are_now(tmp_path):
    path = write(tmp_path, "a")
    before = load(path)
    # Of the same size, within the same second.
    write(tmp_path, "b")
    assert (before(), load(path)()) == (("a", "a"), ("b", "b"))


def test_what_is_imported_later_is_the_same_each_time_and_that_of_its_load(tmp_path):
    path = write(tmp_path, "a")
    with afresh():
        later, folder = load(path, "later"), folder_at(path.parent)
    with folder.importable():
        first = later()
    write(tmp_path, "b")
    with afresh():
        assert call(load(path, "later"), path).WORD == "b"
    with folder.importable():
        assert later() is first
    assert first.WORD == "a"


def test_files_of_a_folder_share_their_helpers_until_they_are_loaded_afresh(tmp_path):
    path = write(tmp_path, "a")
    thing = load(path, "thing")()
    assert load(tmp_path / "other.py", "is_thing")(thing)
    with afresh():
        assert not load(path, "is_thing")(thing)
        assert load(tmp_path / "other.py", "is_thing")(load(path, "thing")())


def test_classes_of_two_files_of_one_name_can_be_pickled(tmp_path):
    pairs = [load(write(tmp_path / name, name), "pair")() for name in ("one", "two")]
    assert [pickle.loads(pickle.dumps(pair)) for pair in pairs] == pairs
    assert type(pairs[0]) is not type(pairs[1])


def test_what_was_imported_otherwise_stays(tmp_path, monkeypatch):
    path = write(tmp_path, "a")
    monkeypatch.setitem(sys.modules, "later_of_test", sys)
    load(path)()
    assert sys.modules["later_of_test"] is sys


def test_a_helper_that_raises_is_tried_again(tmp_path):
    path = write(tmp_path, "a")
    (tmp_path / "helper_of_test.py").write_text("1 / 0\n")
    with pytest.raises(ServingError, match="ZeroDivisionError"):
        load(path)
    write(tmp_path, "b")
    assert load(path)() == ("b", "b")
