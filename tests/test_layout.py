"""The shape of the house: what is listed, who imports whom, how large a module may grow."""

import ast
import importlib.util
import re
import sys
from pathlib import Path

import pytest

import meshwright
from meshwright import compiled
from tests.project import CORE, EXTRAS, PROJECT, ROOT
from tests.reach import Module, imports

pytestmark = pytest.mark.lint

SOURCE = ROOT / "src" / "meshwright"
MODULES = sorted(SOURCE.rglob("*.py"))
PACKAGES = sorted(path.parent.name for path in SOURCE.glob("*/__init__.py"))
MAX_LINES = 600


def contract(name: str) -> dict:
    contracts = PROJECT["tool"]["importlinter"]["contracts"]
    return next(entry for entry in contracts if entry["id"] == name)


TORCH_FREE = [name.removeprefix("*.") for name in contract("no-torch")["source_modules"]]
# Modules of such packages that run torch models, and that nothing else of them imports.
TORCH_MODULES = [
    SOURCE.parent / (name.replace(".", "/") + ".py") for name in contract("no-torch-serving")["protected_modules"]
]


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(SOURCE.parent).with_suffix("").parts).removesuffix(".__init__")


def test_every_package_is_listed_in_the_architecture():
    text = (ROOT / "docs" / "architecture.md").read_text()
    listed = re.findall(r"^\| `(\w+)` \|", text, flags=re.MULTILINE)
    assert len(listed) == len(set(listed))
    assert set(PACKAGES) <= set(listed)


def test_every_package_is_on_the_api_page():
    text = (ROOT / "docs" / "api.md").read_text()
    assert set(PACKAGES) <= set(re.findall(r"^::: meshwright\.(\w+)$", text, flags=re.MULTILINE))


def test_every_package_has_its_layer():
    layers = {name for line in contract("layers")["layers"] for name in re.findall(r"\w+", line)}
    assert set(PACKAGES) <= layers
    assert set(TORCH_FREE) <= layers


def test_the_architecture_lists_packages_in_the_order_of_the_layers():
    text = (ROOT / "docs" / "architecture.md").read_text()
    depth = {
        name: number for number, line in enumerate(contract("layers")["layers"]) for name in re.findall(r"\w+", line)
    }
    listed = [depth[name] for name in re.findall(r"^\| `(\w+)` \|", text, flags=re.MULTILINE)]
    assert listed == sorted(listed)


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_a_module_fits_on_a_few_screens(path):
    num_lines = len(path.read_text().splitlines())
    assert num_lines <= MAX_LINES, f"{path.name} has {num_lines} lines: split it by what it answers"


def test_importing_meshwright_loads_neither_torch_nor_anything_heavy(run_fresh):
    heavy = {"torch", "numpy", "numba", "typer", "rich", "meshwright.spec"}
    loaded = run_fresh("import meshwright, sys; print(*sys.modules, sep='\\n')").split()
    assert "meshwright" in loaded
    assert heavy.isdisjoint(loaded)


def test_fronts_and_workers_of_a_server_load_no_numba(run_fresh):
    code = "import meshwright.serving.server.front_process, meshwright.serving.server.worker, sys; print(*sys.modules)"
    assert {"numba", "meshwright.cost"}.isdisjoint(run_fresh(code).split())


def test_a_public_name_has_one_way_to_be_imported():
    """What a package exports, other packages import from the package, not from the module that defines it."""
    roots = {name: Module(SOURCE / name / "__init__.py") for name in PACKAGES}
    found = []
    for path in MODULES:
        own = path.relative_to(SOURCE).parts[0]
        for node in ast.walk(ast.parse(path.read_text())):
            top, _, rest = (getattr(node, "module", None) or "").removeprefix("meshwright.").partition(".")
            if isinstance(node, ast.ImportFrom) and rest and top in roots and top != own:
                deep = imports(node)
                exported = roots[top].exported.keys() & deep.keys()
                same = [name for name in sorted(exported) if roots[top].imported.get(name) == deep[name]]
                found += [f"{path}:{node.lineno}: import {name} from meshwright.{top}" for name in same]
    assert not found, "\n".join(found)


def test_torch_free_packages_load_no_torch(run_fresh):
    modules = [
        module_name(path)
        for path in MODULES
        if path.relative_to(SOURCE).with_suffix("").parts[0] in TORCH_FREE and path not in TORCH_MODULES
    ]
    code = f"""
import importlib, sys
for name in {modules!r}:
    importlib.import_module(name)
    assert "torch" not in sys.modules, name
print("done")
"""
    assert run_fresh(code) == "done\n"


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_machine_code_is_named_by_all_that_a_module_imports(path):
    """`meshwright.compiled` reads imports by a pattern: what a module imports when it is loaded, as Python sees it."""
    module = module_name(path)
    imported = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Import):
            imported.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "a relative import"
            imported.update([node.module, *(f"{node.module}.{alias.name}" for alias in node.names)])
        elif isinstance(node, ast.Try) or (isinstance(node, ast.If) and ast.unparse(node.test) != "TYPE_CHECKING"):
            inside = [each for each in ast.walk(node) if isinstance(each, (ast.Import, ast.ImportFrom))]
            assert not [each for each in inside if "meshwright" in ast.unparse(each)], "an import under a condition"
    ours = {name for name in imported if name.partition(".")[0] == "meshwright" and compiled._file_of(name) is not None}
    assert set(compiled._read(module)[1]) == ours
    if "@compiled" in path.read_text():
        assert ours.isdisjoint({"meshwright", "meshwright.serving"}), "packages that load their names when asked"


@pytest.mark.parametrize("name", sorted(meshwright._PUBLIC))
def test_public_names_resolve(name):
    module_name, attribute = meshwright._PUBLIC[name].split(":")
    if importlib.util.find_spec(module_name) is None:
        pytest.skip(f"{module_name} is not begun")
    assert getattr(meshwright, name).__name__ == attribute
    assert name in dir(meshwright)


def test_an_unknown_public_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'captur_model'"):
        _ = meshwright.captur_model


def test_the_newest_entry_of_the_changelog_is_this_version():
    headings = re.findall(r"^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert headings[0] == meshwright.__version__


def third_party_imports(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names.add(node.module or "")
    return {name.split(".")[0] for name in names} - sys.stdlib_module_names - {"meshwright"}


# Extras that packages without torch may use, beside the core.
EXTRAS_WITHOUT_TORCH = {
    "spec": ("hf",),
    "records": ("tables",),
    "serving": ("serve",),
    "validation": ("tables", "validate"),
}


def test_what_the_code_imports_is_what_the_project_declares():
    for path in MODULES:
        package = path.relative_to(SOURCE).parts[0]
        usable = (
            EXTRAS_WITHOUT_TORCH.get(package, ())
            if package in TORCH_FREE and path not in TORCH_MODULES
            else set(EXTRAS) - {"dev", "docs"}
        )
        allowed = CORE.union(*(EXTRAS[name] for name in usable))
        assert third_party_imports(path) <= allowed, path


def test_the_core_install_names_no_torch():
    assert not [line for line in PROJECT["project"]["dependencies"] if line.startswith("torch")]
    constraints = (ROOT / "constraints.txt").read_text().splitlines()
    assert "torch==2.13.0" in constraints
