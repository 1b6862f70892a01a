"""Run the checks of `meshwright doctor` (`examine`); defines those of process limits, environment and versions.

Findings are shown in the order of `AREAS`. A check is a function of a `Host` (and of the facts from torch) that yields
findings. If a check fails on an unusual machine, a finding reports the failure, and the other checks continue.
"""

from __future__ import annotations

import importlib.metadata
import platform
import re
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from meshwright.host.findings import Finding
from meshwright.host.gpus import check_gpus
from meshwright.host.host import Host
from meshwright.host.memory_limits import check_memory
from meshwright.host.processor import check_processor, find_processor
from meshwright.host.reach import (
    check_addresses,
    check_host_name,
    check_interfaces,
    check_loopback,
    check_nics,
    check_rendezvous,
)
from meshwright.host.torch_probe import TorchFacts, ask_torch, check_pair, check_torch
from meshwright.spec import format_bytes

try:
    import resource
except ImportError:  # Windows does not have these limits
    resource = None  # type: ignore[assignment]

# gloo opens a socket per pair of ranks and group, and a DataLoader's workers pass tensors as open files
# (torch.multiprocessing, "file_descriptor"). 256 is the soft limit of macOS (launchctl limit), 1024 that of most Linux
# systems (systemd-system.conf, DefaultLimitNOFILE).
_FEW_FILES, _SOME_FILES = 256, 1024
# A rank with a thread pool per core, its agent and the DataLoader's workers; threads count as processes here.
_FEW_PROCESSES, _SOME_PROCESSES = 64, 1024
UNLIMITED = sys.maxsize

_LIMITS = {
    "open files": ("Max open files", "RLIMIT_NOFILE"),
    "processes": ("Max processes", "RLIMIT_NPROC"),
    "locked memory": ("Max locked memory", "RLIMIT_MEMLOCK"),
}


# Limits are those of ``/proc/self/limits`` (proc(5)), else of getrlimit(2).
def find_limit(host: Host, name: str) -> int | None:
    """Return the soft limit of ``open files``, ``processes`` or ``locked memory`` (bytes).

    UNLIMITED if there is no limit, None if the limit cannot be read.
    """
    label, constant = _LIMITS[name]
    for line in (host.read("/proc/self/limits") or "").splitlines():
        if line.startswith(label):
            soft = re.split(r"\s{2,}", line[len(label) :].strip())[0]
            return UNLIMITED if soft == "unlimited" else int(soft) if soft.isdigit() else None
    if host.root == Path("/") and hasattr(resource, constant):
        soft_limit, _ = resource.getrlimit(getattr(resource, constant))
        return UNLIMITED if soft_limit in (resource.RLIM_INFINITY, -1) else soft_limit
    return None


def check_limits(host: Host) -> Iterator[Finding]:
    """Check this process's limits of open files, processes and locked memory."""
    yield _judge_count(host, "open files", _FEW_FILES, _SOME_FILES, "ulimit -n 65536")
    yield _judge_count(host, "processes", _FEW_PROCESSES, _SOME_PROCESSES, "ulimit -u 4096")
    locked = find_limit(host, "locked memory")
    finding = Finding(area="limits", name="locked memory", found=_describe(locked, in_bytes=True))
    # InfiniBand pins the memory that it sends from (NCCL, "Troubleshooting": ulimit -l unlimited).
    if host.names("/sys/class/infiniband") and locked is not None and locked != UNLIMITED:
        remedy = "InfiniBand pins what it sends: ulimit -l unlimited, or docker run --ulimit memlock=-1."
        finding = finding.amended("problem", remedy, "infiniband-cannot-register-memory")
    yield finding


def check_numba_cache(host: Host) -> Iterator[Finding]:
    """Check that numba can store compiled loops on disk.

    The candidates are NUMBA_CACHE_DIR, the folder next to the sources, and the user's cache folder, in numba's own
    order (numba.core.caching: UserProvided, InTree, UserWide).
    """
    given = host.environment.get("NUMBA_CACHE_DIR")
    package = Path(__file__).resolve().parent.parent
    home = host.environment.get("XDG_CACHE_HOME") or str(Path(host.environment.get("HOME", "~")) / ".cache")
    places = [Path(given)] if given else []
    places += [package / "simulator" / "__pycache__", Path(home).expanduser() / "numba"]
    chosen = next((place for place in places if _can_fill(place)), None)
    if chosen is not None and (not given or chosen == places[0]):
        beside = "beside the sources" if chosen.is_relative_to(package) else str(chosen)
        yield Finding(area="limits", name="numba cache", found=beside)
        return
    if given:
        found = f"NUMBA_CACHE_DIR={given} cannot be written to"
    else:
        found = f"none of {', '.join(map(str, places))} can be written to"
    used = f"{chosen} is used" if chosen else "loops are compiled again in every process"
    yield Finding(area="limits", name="numba cache", found=f"{found}; {used}").amended(
        "note", "Set NUMBA_CACHE_DIR to a folder that you may write to.", "every-command-takes-some-seconds-longer"
    )


# Settings that change the behaviour of Meshwright or torch: a pattern for "NAME=value", the effect, and the heading.
_SETTINGS: tuple[tuple[str, str, str], ...] = (
    (
        r"NUMBA_DISABLE_JIT=[^0].*",
        "the planner's and simulator's loops run in plain Python, hundreds of times slower",
        "",
    ),
    (r"CUDA_LAUNCH_BLOCKING=[^0].*", "every kernel is waited for, so nothing overlaps", ""),
    (r"TORCH_DISTRIBUTED_DEBUG=(INFO|DETAIL)", "every collective is checked across ranks, which takes time", ""),
    (r"PYTORCH_NO_CUDA_MEMORY_CACHING=[^0].*", "every tensor is allocated by the driver, which is slow", ""),
    (r"PYTORCH_(CUDA_)?ALLOC_CONF=.+", "the allocator is tuned; measured memory differs from other machines'", ""),
    (r"NCCL_(P2P|IB|SHM)_DISABLE=1", "NCCL may not use the fastest link", ""),
    (r"NCCL_DEBUG=(INFO|TRACE)", "NCCL prints much", ""),
    (r"TORCHDYNAMO_DISABLE=1", "torch.compile does nothing", ""),
    (r"(RANK|WORLD_SIZE|LOCAL_RANK)=.*", "a process of a torchrun job is assumed; unset it elsewhere", "no-ranks-meet"),
)


def check_environment(host: Host) -> Iterator[Finding]:
    """Report environment variables that change speed, memory or the visible devices."""
    causes = [
        (f"{name}={value}", cause, topic)
        for name, value in sorted(host.environment.items())
        for pattern, cause, topic in _SETTINGS
        if re.fullmatch(pattern, f"{name}={value}", re.DOTALL)
    ]
    causes += _thread_settings(host)
    if host.environment.get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1"):
        causes.append(("CUDA_VISIBLE_DEVICES is empty", "no GPU is visible", "no-gpu-is-seen"))
    for found, cause, topic in causes:
        yield Finding(
            area="settings",
            name="environment",
            found=f"{found[:80]}: {cause}",
            status="note",
            remedy=f"Unset {re.split('[= ]', found)[0]}, unless it is intended.",
            topic=topic or "slower-than-it-should-be",
        )
    if not causes:
        yield Finding(area="settings", name="environment", found="no setting that changes speed, memory or devices")


def _thread_settings(host: Host) -> list[tuple[str, str, str]]:
    """OMP_NUM_THREADS above the number of cores: threads would wait for each other."""
    threads = host.environment.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    if not threads:
        return []
    if not threads.isdigit() or threads == "0":
        return [(f"OMP_NUM_THREADS={threads}", "not a number of threads", "")]
    num_cores = find_processor(host).num_allowed_threads
    if int(threads) <= num_cores:
        return []
    return [(f"OMP_NUM_THREADS={threads}", f"more threads than the {num_cores} hardware threads that may be used", "")]


def _judge_count(host: Host, name: str, few: int, some: int, command: str) -> Finding:
    limit = find_limit(host, name)
    finding = Finding(area="limits", name=name, found=_describe(limit))
    if limit is None or limit >= some:
        return finding
    remedy = f"Raise it in the shell that starts the run: {command}"
    return finding.amended("note" if limit >= few else "problem", remedy, "too-many-open-files")


def _describe(limit: int | None, *, in_bytes: bool = False) -> str:
    if limit is None:
        return "not known"
    if limit == UNLIMITED:
        return "unlimited"
    return format_bytes(limit) if in_bytes else f"at most {limit:,}"


def _can_fill(folder: Path) -> bool:
    """Whether a file can be created in a folder, or the folder itself; everything created by the test is removed."""
    try:
        existing = next(place for place in (folder, *folder.parents) if place.exists())
        with tempfile.TemporaryFile(dir=existing):
            return True
    except (OSError, StopIteration):
        return False


PACKAGE = "meshwright"
# Extras whose absence users notice, and what works without each.
_WATCHED_EXTRAS = {
    "torch": "capture, measure and run need it; planning, simulating and showing stored graphs do not",
    "hf": "only models of Hugging Face need it",
}


# Ranges are read from the metadata of the installed package, never written a second time. A core requirement outside of
# its range is a problem, an extra's is a note: without an extra only its commands are missing.
def check_versions(_host: Host) -> Iterator[Finding]:
    """Check versions of Python, Meshwright, its core requirements and the extras that users notice."""
    metadata = _metadata()
    python_range = metadata["Requires-Python"] if metadata is not None and "Requires-Python" in metadata else ""
    # A build between two releases ends with a plus sign, which is not part of any version.
    yield judge_version("Python", platform.python_version().removesuffix("+"), SpecifierSet(python_range))
    yield Finding(area="versions", name="system", found=_system())
    if metadata is None:
        yield Finding(
            area="versions",
            name=PACKAGE,
            found="imported from a folder, not installed: the supported versions of its requirements are not known",
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
    """Compare an installed version (None: not installed) with its supported range ``span``.

    ``extra`` is the extra that requires the package, "" for a core requirement.
    """
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
    """Return whether a version is in a range; local parts (``+cpu``) and suffixes (``rc1``, ``a0``) do not count.

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


AREAS = ("versions", "devices", "memory", "links", "reach", "limits", "settings")

CHECKS: tuple[Callable[[Host], Iterable[Finding]], ...] = (
    check_versions,
    check_processor,
    check_gpus,
    check_memory,
    check_nics,
    check_loopback,
    check_host_name,
    check_rendezvous,
    check_interfaces,
    check_limits,
    check_numba_cache,
    check_environment,
)
TORCH_CHECKS: tuple[Callable[[Host, TorchFacts], Iterable[Finding]], ...] = (check_torch, check_pair)


def examine(host: Host, addresses: Sequence[tuple[str, int]] = ()) -> tuple[Finding, ...]:
    """Run all checks on a host, and try to connect to ``addresses`` (host, port).

    Returns the findings in the order of `AREAS`.
    """
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(ask_torch, host)  # its processes start while the other checks run
        findings = [finding for check in CHECKS for finding in _survive(partial(check, host), check.__name__)]
        findings += _survive(partial(check_addresses, addresses), "check_addresses")
        facts = asked.result()
    for check in TORCH_CHECKS:
        findings += _survive(partial(check, host, facts), check.__name__)
    return tuple(sorted(findings, key=lambda finding: AREAS.index(finding.area)))


def _survive(check: Callable[[], Iterable[Finding]], name: str) -> Iterator[Finding]:
    """The findings of a check; an error of the check becomes another finding."""
    try:
        yield from check()
    except Exception as error:  # a failing check must not stop the others
        yield Finding(
            area="settings",
            name=name.removeprefix("check_").replace("_", " "),
            found=f"not known ({type(error).__name__}: {str(error)[:120]})",
            status="note",
            remedy="This check failed on this machine; the other findings are valid.",
        )
