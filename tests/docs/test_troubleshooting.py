"""What the page on troubleshooting quotes is what the code says."""

import re

import pytest

from tests.docs.blocks import ROOT

PAGE = (ROOT / "docs" / "troubleshooting.md").read_text()
SECTIONS = dict(zip(*[iter(re.split(r"^## (.+)$", PAGE, flags=re.MULTILINE)[1:])] * 2, strict=True))
SOURCES = [*(ROOT / "src").rglob("*.py"), *(ROOT / "scripts").glob("*")]
# Literals that follow each other on two lines are one message.
CODE = re.sub(r"[\"']\s*\n\s*f?[\"']", "", "\n".join(path.read_text() for path in SOURCES if path.is_file()))
ROWS = [
    pytest.param(symptom, id=f"{title}: {symptom[:50]}")
    for title, text in SECTIONS.items()
    for symptom in re.findall(r"^\| ([^|]*`[^|]*) \|", text, re.MULTILINE)
]


@pytest.mark.parametrize("symptom", ROWS)
def test_a_quoted_message_is_one_of_the_codes(symptom):
    """Every piece between dots; a value that the message inserts may stand at its ends."""
    for quote in re.findall(r"`([^`]+)`", symptom):
        for piece in quote.split("…"):
            words = piece.strip(" '\"().,;:")
            assert words in CODE, f"{words!r} of {quote!r}"


def test_there_is_an_entry_for_most_of_what_goes_wrong():
    machine = SECTIONS["This machine"].split("\n### ")[1:]
    assert len(machine) + len(ROWS) >= 20
    for entry in machine:
        assert [line.split(":")[0] for line in entry.splitlines() if re.match(r"(Symptom|Cause|Fix):", line)] == [
            "Symptom",
            "Cause",
            "Fix",
        ], entry
