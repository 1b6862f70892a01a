"""Phrases that must not come back: an older dialect of this project, unclear to readers of the field."""

import io
import re
import subprocess
import sys
import tokenize

import pytest

from tests.project import ROOT

pytestmark = pytest.mark.lint

# The phrase, and what to write instead.
PHRASES = {
    r"\b(?:is|are|was|were|be|been|being) told\b|\btold of\b": "who gets it: 'the worker receives', 'is passed to'",
    r"\bthat there (?:is|are)\b": "the subject: 'all links', 'the existing ranks'",
    r"\bas many (?![^.;:]{0,60}\bas\b)": "'the same number of'",
    r"\b(?:is|are|was|were) none\b": "'there is no X', 'X is missing'",
    r"\bof which none\b|\bnone of which\b": "a sentence of its own: 'No X does that.'",
    r"(?<!\b[Tt]here )\b(?:is|are) no(?! longer| more| less| slower| faster| larger| smaller)\b": "'is not a'",
    r"[Aa]way from devices": "'in host memory'",
    r"\bcompute[sd]? again\b|\bcomputing again\b": "'recompute' (activation checkpointing)",
    r"\bshare[sd]? out\b": "'shards', 'divides', 'splits'",
    r"\bnever flush(?:es|ed)?\b": "'asynchronous'",
    r"\bboth ways\b": "'bidirectional', 'in both directions'",
    r"\bso many\b": "'the given number of', or the name of the number",
    r"\bwhoever\b|\bWhoever\b": "the caller, the user or the process",
    r"\bof theirs\b|\bsuch ones\b": "the name of the things",
    r"; repeat(?:\.| for\b| to\b)": "'May be given several times.'",
    r"\bmost of it are\b": "'the largest part: …'",
    r"\b[Aa]n own\b": "'your own', 'its own', 'a user's'",
    r"\bin the mean\b(?!\.)": "'on average'",
    r"\banew\b": "'again'",
    r"\bcan say it\b": "'supports it'",
    r"\b(?:lays|laid) experts out\b": "'has expert parallelism'",
    r"\b(?:was|were) to be\b": "'cannot be …; expected …'",
    r"\bshare states\b|\bshares states\b": "'shard states', unless all hold the same ones",
}
SOURCES = sorted((ROOT / "src").rglob("*.py"))
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


def prose_of(path):
    """Lines of prose with their numbers: all lines of a page, the comments and strings of a module."""
    text = path.read_text()
    if path.suffix == ".md":
        return list(enumerate(text.split("\n"), 1))
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    kinds = (tokenize.COMMENT, tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", -1))
    kept = [token for token in tokens if token.type in kinds]
    return [(token.start[0] + i, line) for token in kept for i, line in enumerate(token.string.split("\n"))]


def find_phrases(lines):
    """Line, phrase and advice of each hit; a phrase may continue on the next line."""
    text, starts = "", []
    for number, line in lines:
        starts.append((len(text), number))
        text += line.strip().lstrip("# ") + " "
    return [
        (max(number for start, number in starts if start <= match.start()), match.group().strip(), advice)
        for phrase, advice in PHRASES.items()
        for match in re.finditer(phrase, text)
    ]


@pytest.mark.parametrize("paths", [SOURCES, PAGES], ids=["source", "pages"])
def test_no_phrase_of_the_old_dialect(paths):
    found = [
        f"{path.relative_to(ROOT)}:{number}: {phrase!r}; write {advice}"
        for path in paths
        for number, phrase, advice in find_phrases(prose_of(path))
    ]
    assert not found, "\n".join(found)


def test_a_planted_phrase_is_found():
    assert find_phrases([(1, "# What is"), (2, "# told to ranks.")]) == [(1, "is told", next(iter(PHRASES.values())))]


@pytest.mark.parametrize(
    ("subject", "wrong"),
    [
        ("Add a check of commit subjects", ""),
        ("Pass costs to the search", ""),
        ("Added a check", "imperative"),
        ("Adds a check", "imperative"),
        ("Parsing of checks", "imperative"),
        ("Embed a picture", ""),
        ("add a check", "capital"),
        ("Add a check.", "full stop"),
        ("Add " + "x" * 70, "74 characters"),
    ],
)
def test_subjects_of_commits(tmp_path, subject, wrong):
    (tmp_path / "message").write_text(f"# a comment\n{subject}\n\nAnd a body.\n")
    command = [sys.executable, str(ROOT / "scripts" / "check_subject.py"), str(tmp_path / "message")]
    found = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert (found.returncode, wrong in found.stderr) == (int(bool(wrong)), True)
