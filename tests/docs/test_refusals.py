"""The pages that list refusals, compared with the messages in the sources."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.blocks import ROOT

SOURCES = ROOT / "src/meshwright"
SERVER = SOURCES / "serving/server"
# Calls that make a refusal, and its status; None where it is the first argument.
STATUSES = {"Refusal": None, "_refuse": None, "BadRequest": 400, "NotFinite": 500}
ERRORS = {"ServingError": 400, "DocumentError": 400}


def text_of(node: ast.AST) -> str:
    """A string of the source, with … for what is put into it."""
    if isinstance(node, ast.JoinedStr):
        return "".join(text_of(value) or "…" for value in node.values)
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def listed(page: str) -> Iterator[tuple[str, str, str]]:
    """Module, status ("" without one) and message of each entry of a page."""
    for section in re.split(r"^##+ ", (ROOT / page).read_text(), flags=re.MULTILINE):
        module = "front" if section.startswith("Dropped") else (re.match(r"`([\w.]+)`\n", section) or [""] * 2)[1]
        for status, text in re.findall(
            r"^(?:- |\| )(\d{3})?(?: \| | )?(?:\w+ \| )?`(.+?)`(?= ?[|:(]|$)", section, re.M
        ):
            if module:
                yield module, status, text


def refusals_of(path: Path, statuses: dict[str, int | None]) -> Iterator[tuple[int, str]]:
    """Status and message of each refusal that a module makes with a message of its own."""
    for node in ast.walk(ast.parse(path.read_text())):
        name = getattr(node.func, "id", getattr(node.func, "attr", "")) if isinstance(node, ast.Call) else ""
        if name in statuses:
            status = statuses[name] or getattr(node.args[0], "value", None)
            texts = [text for text in map(text_of, node.args) if text]
            if texts and status:
                yield status, texts[0]


@pytest.mark.parametrize(("page", "folder"), [("refusals", SERVER), ("refused-deployments", SOURCES)])
def test_every_message_of_a_page_is_in_its_module(page, folder):
    entries = list(listed(f"docs/serving/{page}.md"))
    assert len(entries) > 50
    for module, _, message in entries:
        nodes = ast.walk(ast.parse((folder / f"{module.replace('.', '/')}.py").read_text()))
        assert any(message in text for text in map(text_of, nodes) if text), (module, message)


def test_the_page_has_every_refusal_of_the_server():
    entries = list(listed("docs/serving/refusals.md"))
    for path in SERVER.glob("*.py"):
        for status, text in refusals_of(path, STATUSES):
            assert any(
                module == path.stem and code == str(status) and message in text for module, code, message in entries
            ), (path.stem, status, text)


def test_the_pages_have_every_error_of_the_modules_of_deployments():
    entries = [*listed("docs/serving/refusals.md"), *listed("docs/serving/refused-deployments.md")]
    for name in {module for module, *_ in listed("docs/serving/refused-deployments.md")}:
        for _, text in refusals_of(SOURCES / f"{name.replace('.', '/')}.py", ERRORS):
            known = any(name.endswith(module) and message in text for module, _, message in entries)
            assert known or not text.strip("…: "), (name, text)
