"""Check that installed programs have versions that Meshwright supports.

Ranges are read from the metadata of the installed package, never written a second time. A core requirement outside of
its range is a problem, an extra's is a note: without an extra only its commands are missing.
"""

from __future__ import annotations

import importlib.metadata
import platform
from collections.abc import Iterator

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from meshwright.host.findings import Finding
from meshwright.host.host import Host

PACKAGE = "meshwright"
# Extras whose absence users notice, and what works without each.
_WATCHED_EXTRAS = {
    "torch": "capture, measure and run need it; planning, simulating and showing stored graphs do not",
    "hf": "only models of Hugging Face need it",
}


def check_versions(_host: Host) -> Iterator[Finding]:
    """Python, Meshwright, its core requirements and the extras that users notice, as in this process."""
    metadata = _metadata()
    python_range = metadata["Requires-Python"] if metadata is not None and "Requires-Python" in metadata else ""
    # A build between two releases ends with a plus sign, which is not part of any version.
    yield judge_version("Python", platform.python_version().removesuffix("+"), SpecifierSet(python_range))
    yield Finding(area="versions", name="system", found=_system())
    if metadata is None:
        yield Finding(
            area="versions",
            name=PACKAGE,
            found="not installed, only found on the path: ranges of versions are not known",
            status="note",
            remedy="Install it: pip install meshwright, or pip install . in its folder.",
            topic="a-package-is-missing-or-of-another-version",
        )
        return
    yield Finding(area="versions", name=PACKAGE, found=metadata["Version"])
    for line in metadata.get_all("Requires-Dist") or []:
        requirement = Requirement(line)
        extra = _asking_extra(requirement)
        if extra is not None:
            yield judge_version(requirement.name, _version_of(requirement.name), requirement.specifier, extra)


def judge_version(name: str, version: str | None, span: SpecifierSet, extra: str = "") -> Finding:
    """Compare an installed version (None: not installed) with its range; ``extra`` requires it, if it is not core."""
    install = f"pip install '{PACKAGE}[{extra}]'" if extra else f"pip install '{name}{span}'"
    topic = "a-package-is-missing-or-of-another-version"
    if version is None:
        return Finding(
            area="versions",
            name=name,
            found=f"not installed ({_WATCHED_EXTRAS[extra]})" if extra else "not installed",
            status="note" if extra else "problem",
            remedy=f"Run: {install}",
            topic=topic,
        )
    if lies_in_range(version, span):
        return Finding(area="versions", name=name, found=version)
    return Finding(
        area="versions",
        name=name,
        found=f"{version}; Meshwright supports {span}",
        status="note" if extra else "problem",
        remedy="Run Meshwright with a Python in that range." if name == "Python" else f"Run: {install}",
        topic=topic,
    )


def _asking_extra(requirement: Requirement) -> str | None:
    """The watched extra of a requirement that applies here; empty for the core's, None for any other."""
    marker = requirement.marker
    extras = ("", *_WATCHED_EXTRAS)
    return next((extra for extra in extras if marker is None or marker.evaluate({"extra": extra})), None)


def lies_in_range(version: str, span: SpecifierSet) -> bool:
    """Whether a version is in a range; local parts (``+cpu``) and suffixes such as ``rc1`` or ``a0`` do not count.

    Builds of torch for one vendor's images are called ``2.13.0a0+5f8c9d2`` and are not earlier than 2.13.
    """
    try:
        return span.contains(Version(version).base_version)
    except InvalidVersion:
        return False


def _system() -> str:
    """The operating system without its kernel's build: ``Linux x86_64, glibc 2.36``."""
    library = " ".join(filter(None, platform.libc_ver()))
    return f"{platform.system()} {platform.machine()}{f', {library}' if library else ''}"


def _version_of(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _metadata() -> importlib.metadata.PackageMetadata | None:
    try:
        return importlib.metadata.metadata(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        return None
