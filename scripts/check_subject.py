"""Check the subject of a commit message: imperative, at most 72 characters. Usage: check_subject.py MESSAGE_FILE"""

from __future__ import annotations

import re
import sys
from pathlib import Path

MAX_LENGTH = 72
# Imperatives that end as another form does.
_IMPERATIVES = {
    "Alias",
    "Bias",
    "Bring",
    "Embed",
    "Feed",
    "Focus",
    "Need",
    "Ring",
    "Seed",
    "Shed",
    "Speed",
    "Spring",
    "String",
}


def complaints(subject: str) -> list[str]:
    """Return what is wrong with a subject, empty if nothing is."""
    found = []
    if len(subject) > MAX_LENGTH:
        found.append(f"it has {len(subject)} characters; expected at most {MAX_LENGTH}")
    if subject.endswith("."):
        found.append("it ends with a full stop; leave that out")
    first = subject.split(" ", 1)[0]
    if not first[:1].isupper():
        found.append(f"it begins with {first!r}; begin with a capital letter")
    if re.search(r"(?:[^s]s|ed|ing)$", first) and first not in _IMPERATIVES:
        found.append(f"it begins with {first!r}; use the imperative, as in 'Add', 'Fix', 'Merge'")
    return found


def main() -> int:
    """Print what is wrong with the subject in the file; 1 if anything is."""
    lines = Path(sys.argv[1]).read_text().splitlines()
    subject = next((line for line in lines if line and not line.startswith("#")), "")
    if subject.startswith(("Merge ", "Revert ", "fixup! ", "squash! ")):
        return 0
    found = complaints(subject)
    for complaint in found:
        print(f"Commit subject {subject!r}: {complaint}.", file=sys.stderr)
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
