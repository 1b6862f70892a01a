"""Which modules a user reaches: by a verb of the command line, or by a documented public name.

Definitions are followed from the entry points of pyproject.toml, from ``python -m meshwright``, and from public names:
those that a package named in docs/api.md exports and that stand in the code of a page or an example. A definition
reaches the names in it. An import alone reaches nothing: names are followed through the packages that hand them on to
the module that defines them, also where a string names them (``module:name``, ``-m module``). A module is reached if
one of its definitions is, or if it is loaded and registers something.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from contextlib import suppress
from pathlib import Path

from tests.project import PROJECT, ROOT

# Decorators that register nothing.
PLAIN = {"cache", "compiled", "contextmanager", "dataclass", "inlined", "lru_cache", "runtime_checkable"}


def imports(node: ast.Import | ast.ImportFrom) -> dict[str, str]:
    """The names that an import binds, with what they stand for."""
    if isinstance(node, ast.ImportFrom):
        return {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    tops = [each.name if each.asname else each.name.split(".")[0] for each in node.names]
    return {each.asname or top: top for each, top in zip(node.names, tops, strict=True)}


def dotted_name(node: ast.AST) -> str:
    """``a.b`` of such an expression, else nothing."""
    if isinstance(node, ast.Attribute) and (before := dotted_name(node.value)):
        return f"{before}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


class Module:
    """What a module defines, where imported names come from, what it exports, and what runs when it is loaded.

    ``exported``: the names in ``__all__``, and those in tables of strings, with what these say of them.
    """

    def __init__(self, path: Path) -> None:
        self.is_package = path.name == "__init__.py"
        self.defined, self.imported, self.exported, self.run = defaultdict(list), {}, {}, []
        waiting = list(ast.parse(path.read_text()).body)
        while waiting:
            node = waiting.pop()
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                self.imported |= imports(node)
            elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                self.defined[node.name].append(node)
                decorators = {dotted_name(getattr(each, "func", each)).split(".")[-1] for each in node.decorator_list}
                self.run += [node] if decorators - PLAIN else []
            elif isinstance(node, (ast.Assign, ast.AnnAssign)):
                targets = getattr(node, "targets", None) or [node.target]
                names = [name.id for each in targets for name in getattr(each, "elts", [each]) if hasattr(name, "id")]
                for name in names:
                    self.defined[name].append(node)
                self.run += [] if names else [node]
                with suppress(ValueError):
                    value = ast.literal_eval(node.value)
                    table = dict.fromkeys(value, "") if names == ["__all__"] else value
                    pairs = table.items() if isinstance(table, dict) else ()
                    self.exported.update((key, text if isinstance(text, str) else "") for key, text in pairs)
            elif isinstance(node, (ast.If, ast.Try, ast.With)):
                waiting += [each for each in ast.iter_child_nodes(node) if isinstance(each, ast.stmt)]
            else:
                self.run.append(node)


class Reach:
    """What is reached in the modules of a package from dotted names, or from all that users reach.

    ``missed``: the modules that are not, but for packages, which hand names on.
    """

    def __init__(self, source: Path, roots: set[str] | None = None) -> None:
        found = {}
        for path in source.rglob("*.py"):
            parts = path.relative_to(source).with_suffix("").parts
            found[".".join(("meshwright", *parts)).removesuffix(".__init__")] = Module(path)
        self.modules, self.loaded, self.names, self.waiting = found, set(), set(), []
        # Strings, by the package in which they stand; packages of which an f-string names modules, f"package.{name}".
        self.words, self.prefixes = set(), set()
        for root in user_names(found) if roots is None else roots:
            self.follow(root)
        while self.waiting:
            self.scan(*self.waiting.pop())
            for package, word in [] if self.waiting else list(self.words):
                self.follow(f"{package}.{word}" if package in self.prefixes else "")
        done = {module for module, _ in self.names} | {name for name in self.loaded if found[name].run}
        self.missed = sorted(name for name in found if not found[name].is_package and name not in done)

    def load(self, name: str) -> None:
        """Reach what a module runs, and the modules that it imports as such."""
        if name in self.modules and name not in self.loaded:
            self.loaded.add(name)
            self.waiting += [(name, node) for node in self.modules[name].run]
            for target in self.modules[name].imported.values():
                self.load(target if target in self.modules and not self.modules[target].is_package else "")

    def follow(self, dotted: str) -> None:
        """Reach a definition; of a module that is named by itself, all that it defines."""
        parent, _, name = dotted.rpartition(".")
        if dotted in self.modules and (not parent or self.modules[parent].imported.get(name, dotted) == dotted):
            self.load(dotted)
            self.load(f"{dotted}.__main__")
            for each in [] if self.modules[dotted].is_package else self.modules[dotted].defined:
                self.follow(f"{dotted}.{each}")
            return
        while parent and parent not in self.modules:
            parent = parent.rpartition(".")[0]
        if not parent:
            return
        name, _, rest = dotted.removeprefix(f"{parent}.").partition(".")
        module = self.modules[parent]
        self.load(parent)
        if name in module.defined:
            self.waiting += [(parent, node) for node in module.defined[name] if (parent, name) not in self.names]
            self.names.add((parent, name))
        elif module.imported.get(name, dotted) != dotted:
            self.follow(f"{module.imported[name]}.{rest}".rstrip("."))
        elif name in module.exported:
            place = module.exported[name].replace(":", ".")
            self.follow(f"{place}.{name}" if place in self.modules else place or f"{parent}.__getattr__")

    def scan(self, module: str, root: ast.AST) -> None:
        """Follow the names and strings that stand in a definition."""
        bound, waiting = dict(self.modules[module].imported), [root]
        for node in ast.walk(root):
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                bound |= imports(node)
        while waiting:
            node = waiting.pop()
            if dotted := dotted_name(node):
                first, _, rest = dotted.partition(".")
                self.follow(f"{bound.get(first, f'{module}.{first}')}.{rest}".rstrip("."))
                continue
            waiting += ast.iter_child_nodes(node)
            if isinstance(node, ast.JoinedStr):
                self.prefixes.add(ast.unparse(node)[2:].replace("{__name__}", module).partition(".{")[0])
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                self.words.add((module if self.modules[module].is_package else module.rpartition(".")[0], node.value))
                if re.fullmatch(r"meshwright(\.\w+)+(:\w+)?", node.value):
                    self.follow(node.value.replace(":", "."))


def user_names(modules: dict[str, Module]) -> list[str]:
    """The entry points, and what packages of docs/api.md export of the words in code of pages and examples."""
    entries = [*PROJECT["project"]["scripts"].values(), "meshwright.__main__"]
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    code = [span for page in pages for span in re.findall(r"`+[^`]+`+", page.read_text())]
    code += [path.read_text() for path in (ROOT / "examples").rglob("*.[pi][yp]*")]
    words = set(re.findall(r"\w+", "\n".join(code)))
    packages = re.findall(r"(?:^::: |`)(meshwright[\w.]*)", (ROOT / "docs" / "api.md").read_text(), re.MULTILINE)
    listed = [(package, modules[package].exported) for package in packages if package in modules]
    public = [f"{package}.{name}" for package, exported in listed for name in words & exported.keys()]
    return [*public, *(entry.replace(":", ".") for entry in entries)]
