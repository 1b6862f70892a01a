"""Without the libraries of an extra: help, completion and inspection go on, and what needs one says how to get it."""

import itertools

import pytest

LIBRARIES = ("torch", "z3", "highspy", "pyarrow", "transformers", "msgspec")
# Stands in for an environment without some libraries.
HIDING = """
import importlib.abc, importlib.util, sys
hidden = {hidden!r}
class Hide(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in hidden:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Hide())
real = importlib.util.find_spec
importlib.util.find_spec = lambda name, package=None: None if name.partition(".")[0] in hidden else real(name, package)
"""
LOOKING = """
import inspect, pydoc, rlcompleter
import meshwright
assert pydoc.render_doc(meshwright)
members = dict(inspect.getmembers(meshwright))
words = rlcompleter.Completer({"meshwright": meshwright}).attr_matches("meshwright.")
space = {}
exec("from meshwright import *", space)
assert set(meshwright.__all__) <= set(members) | {"__version__"} and set(meshwright.__all__) <= space.keys()
print(*sorted(meshwright.__all__))
print(any(word.startswith("meshwright.search_plans") for word in words))
"""
SUBSETS = [(), *((name,) for name in LIBRARIES), LIBRARIES, *itertools.combinations(LIBRARIES[:3], 2)]


@pytest.mark.parametrize("hidden", SUBSETS, ids=lambda names: "+".join(names) or "none")
def test_introspection_works(run_fresh, hidden):
    names, completed = run_fresh(HIDING.format(hidden=hidden) + LOOKING).splitlines()
    assert completed == "True"
    needs_torch = {"capture_model", "differentiate", "part", "prepare", "Feed"}
    assert needs_torch.isdisjoint(names.split()) == ("torch" in hidden)
    assert ("optimize" in names.split()) == {"torch", "z3", "highspy"}.isdisjoint(hidden)


@pytest.mark.parametrize(
    ("hidden", "code", "words"),
    [
        ("torch", "meshwright.prepare", "meshwright.prepare needs torch, which is not installed. Run: pip install"),
        ("z3", "from meshwright import optimize", "meshwright.optimize needs z3-solver.*'meshwright[torch,rewrite]'"),
    ],
)
def test_what_is_missing_is_named(run_fresh, hidden, code, words):
    program = f"import meshwright\ntry:\n    {code}\nexcept ImportError as error:\n    print(error)\n"
    said = run_fresh(HIDING.format(hidden=(hidden,)) + program)
    first, _, last = words.partition(".*")
    assert said.startswith(first)
    assert last in said


def test_solvers_are_silent(run_fresh):
    code = """
import sys, types
import highspy
real = highspy.Highs
def loud():
    import os
    os.write(1, b"Running HiGHS\\n")
    return real()
highspy.Highs = loud
from meshwright.solving.integer_programs import _make_solver
print("before"); _make_solver(highspy); print("after")
"""
    assert run_fresh(code) == "before\nafter\n"


def test_the_zoo_and_training_load_no_transformers(run_fresh):
    program = "import meshwright.zoo, meshwright.training\nprint('transformers' in sys.modules)\n"
    assert run_fresh(HIDING.format(hidden=("transformers",)) + program).strip() == "False"
