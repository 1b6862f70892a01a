"""The tables of options in ``docs/commands``, made from the requests: ``python -m tests.docs.option_pages``."""

from __future__ import annotations

import re

from meshwright.cli.plan.plan_request import PlanRequest
from meshwright.cli.requests import option_rows
from meshwright.cli.simulate.simulate_request import SimulateRequest
from tests.project import ROOT

# Of each page: the request, and the words for its forms.
PAGES = {
    "plan": (PlanRequest, {"search": "a search", "from": "`--from`", "place": "`--method place`"}),
    "simulate": (
        SimulateRequest,
        {"plan": "a plan", "placement": "a placement", "sweep": "a sweep", "deployment": "a deployment"},
    ),
}
BAR = chr(92) + "|"
_TABLE = re.compile(r"(?<=<!-- made from the options -->\n\n).*?(?=\n\n<!-- end of the options -->)", re.DOTALL)


def make_table(name: str) -> str:
    """The table of a command."""
    lines = ["| option | meaning | of |", "|---|---|---|"]
    for typed, text, where in option_rows(*PAGES[name]):
        # A vertical bar would end the cell.
        lines.append(f"| {typed.replace('|', BAR)} | {text} | {where} |")
    return "\n".join(lines)


def make_page(name: str) -> str:
    """The page with its table as the options are now."""
    text = (ROOT / "docs" / "commands" / f"{name}.md").read_text()
    made, count = _TABLE.subn(lambda _: make_table(name), text)
    assert count == 1, name
    return made


if __name__ == "__main__":
    for page in PAGES:
        (ROOT / "docs" / "commands" / f"{page}.md").write_text(make_page(page))
