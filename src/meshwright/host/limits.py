"""Limits of files, processes and locked memory of a process here, and settings in the environment that matter.

Limits are those of ``/proc/self/limits`` (proc(5)), else of getrlimit(2).
"""

from __future__ import annotations

import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from meshwright.host.findings import Finding
from meshwright.host.host import Host
from meshwright.host.processor import find_processor
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


def find_limit(host: Host, name: str) -> int | None:
    """The soft limit of ``open files``, ``processes`` or ``locked memory``; UNLIMITED, or None if not known."""
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
    """Open files, processes, locked memory."""
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
    """Check that numba can keep compiled loops: in NUMBA_CACHE_DIR, beside the sources, or in the user's cache folder.

    The order is numba's own (numba.core.caching: UserProvided, InTree, UserWide).
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
    used = f"{chosen} is used" if chosen else "loops are compiled anew in every process"
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
    (r"(RANK|WORLD_SIZE|LOCAL_RANK)=.*", "a process of a run is assumed; unset it outside torchrun", "no-ranks-meet"),
)


def check_environment(host: Host) -> Iterator[Finding]:
    """Settings in the environment that change speed, memory or what is visible."""
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
