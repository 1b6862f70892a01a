"""The checks of `meshwright doctor`, in the order in which their findings are shown.

A check is a function of a `Host` (and of the facts from torch) that yields findings. It may fail on an unusual machine;
then a finding reports that, and the other checks continue.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from meshwright.host.findings import Finding
from meshwright.host.gpus import check_gpus
from meshwright.host.host import Host
from meshwright.host.limits import check_environment, check_limits, check_numba_cache
from meshwright.host.memory import check_memory
from meshwright.host.nics import check_nics
from meshwright.host.processor import check_processor
from meshwright.host.reach import (
    check_addresses,
    check_host_name,
    check_interfaces,
    check_loopback,
    check_rendezvous,
)
from meshwright.host.torch_probe import TorchFacts, ask_torch, check_pair, check_torch
from meshwright.host.versions import check_versions

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
    """Run all checks on a host, and try to reach ``addresses``; findings in the order of `AREAS`."""
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
            remedy="The check does not understand this machine; the other findings are valid.",
        )
