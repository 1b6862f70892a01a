"""Select devices (`Devices`) and links (`Links`) of a cluster for a scenario by short texts, checked when read.

    devices   all · rank 5 · ranks 0-3,8 · node 1 · nodes 0-2 · kind A100 · every 4th · every 4th from 1 · 3 at random
    links     inside nodes · inside node 1 · between nodes · of node 1 · between node 0 and node 1
              between racks · to hosts

Nodes are selected by number or name. A random choice follows from the seed of the scenario.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

import numpy as np

from meshwright.spec.errors import ScenarioError, suggest

if TYPE_CHECKING:
    from collections.abc import Sequence

    from meshwright.spec.cluster import Cluster

# No cluster has a million of anything, and Python refuses to parse numbers of thousands of digits.
_NUMBER = "[0-9]{1,6}"
_LIST = rf"{_NUMBER}(?:-{_NUMBER})?(?:\s*,\s*{_NUMBER}(?:-{_NUMBER})?)*"
_DEVICES = tuple(
    re.compile(pattern)
    for pattern in (
        r"(?P<all>all)",
        rf"ranks? (?P<ranks>{_LIST})",
        r"nodes? (?P<nodes>\S.*)",
        r"kind (?P<kind>\S+)",
        rf"every (?P<every>[1-9][0-9]{{0,5}})(?:st|nd|rd|th)(?: from (?P<first>{_NUMBER}))?",
        r"(?P<random>[1-9][0-9]{0,5}) at random",
    )
)
_LINKS = tuple(
    re.compile(pattern)
    for pattern in (
        r"between node (?P<first>\S+) and node (?P<second>\S+)",
        r"(?P<what>inside) nodes?(?: (?P<nodes>\S.*))?",
        r"(?P<what>between) nodes",
        r"(?P<what>of) nodes? (?P<nodes>\S.*)",
        r"(?P<what>between racks)",
        r"(?P<what>to hosts)",
    )
)
# The number of existing names that a message lists.
_MOST_NAMED = 8

Way = Literal["inside", "between", "path", "racks", "hosts"]


@dataclass(frozen=True, slots=True)
class _Selector:
    """A text in one of several forms. Raises ScenarioError for any other text."""

    text: str

    FORMS: ClassVar[tuple[re.Pattern[str], ...]] = ()
    EXPECTED: ClassVar[str] = ""

    def __post_init__(self) -> None:
        if not any(form.fullmatch(self.text) for form in self.FORMS):
            raise ScenarioError(f"{self._refusal(self.text)}.")

    def encode_scalar(self) -> str:
        """Return the text."""
        return self.text

    @classmethod
    def decode_scalar(cls, data: Any) -> Self:
        """Parse the text. Raises ValueError if it has none of the expected forms."""
        if not isinstance(data, str) or not any(form.fullmatch(data) for form in cls.FORMS):
            raise ValueError(cls._refusal(data))
        return cls(data)

    @classmethod
    def _refusal(cls, data: Any) -> str:
        return f"{data!r} is not a selection; expected {cls.EXPECTED}"

    def _read(self) -> dict[str, str]:
        match = next(found for form in self.FORMS if (found := form.fullmatch(self.text)))
        return {name: text for name, text in match.groupdict().items() if text is not None}


@dataclass(frozen=True, slots=True)
class Devices(_Selector):
    """A selection of devices of a cluster, as text: ``ranks 0-3,8``, ``kind A100``, ``3 at random``."""

    FORMS: ClassVar = _DEVICES
    EXPECTED: ClassVar = (
        '"all", "rank 5", "ranks 0-3,8", "node 1", "kind A100", "every 4th", "every 4th from 1" or "3 at random"'
    )

    def select(self, cluster: Cluster, seed: Sequence[int]) -> tuple[int, ...]:
        """Return the selected ranks, ascending. ``seed`` (numpy's) determines a random choice.

        Raises ScenarioError if the cluster does not have such devices.
        """
        match self._read():
            case {"ranks": text}:
                return _numbers(self.text, text, cluster.num_ranks, "ranks", cluster.name)
            case {"nodes": text}:
                chosen = find_nodes(self.text, text, cluster)
                return tuple(rank for rank in range(cluster.num_ranks) if cluster.node_index(rank) in chosen)
            case {"kind": name}:
                kinds = {kind.name for kind in cluster.device_kinds}
                found = tuple(r for r in range(cluster.num_ranks) if cluster.device_kind(r).usual_name == name)
                return found or _refuse(self.text, f"has no such device{suggest(name, kinds)}", cluster.name)
            case {"every": step, **rest}:
                found = tuple(range(int(rest.get("first", 0)), cluster.num_ranks, int(step)))
                return found or _refuse(self.text, f"has ranks 0 to {cluster.num_ranks - 1}", cluster.name)
            case {"random": count}:
                if int(count) > cluster.num_ranks:
                    _refuse(self.text, f"has {cluster.num_ranks} devices", cluster.name)
                drawn = np.random.default_rng(seed).choice(cluster.num_ranks, int(count), replace=False)
                return tuple(sorted(drawn.tolist()))
            case _:
                return tuple(range(cluster.num_ranks))


@dataclass(frozen=True, slots=True)
class Links(_Selector):
    """A selection of links of a cluster, as text: ``inside nodes``, ``between node 0 and node 1``, ``to hosts``."""

    FORMS: ClassVar = _LINKS
    EXPECTED: ClassVar = (
        '"inside nodes", "inside node 1", "between nodes", "of node 1" (its NICs), "between node 0 and node 1", '
        '"between racks" or "to hosts"'
    )

    def select(self, cluster: Cluster) -> tuple[Way, tuple[int, ...]]:
        """Return the kind of the selected links, and the indices of their nodes (none for links between racks).

        Kinds: "inside" nodes, "between" nodes (NICs), "path" between two nodes, between "racks", to "hosts". Raises
        ScenarioError if the cluster does not have such links.
        """
        every = tuple(range(len(cluster.nodes)))
        match self._read():
            case {"first": first, "second": second}:
                ends = *find_nodes(self.text, first, cluster), *find_nodes(self.text, second, cluster)
                if len(set(ends)) != 2:
                    _refuse(self.text, "has such links only between two different nodes", cluster.name)
                return "path", ends
            case {"what": "inside", **rest}:
                nodes = find_nodes(self.text, rest["nodes"], cluster) if "nodes" in rest else every
                found = tuple(index for index in nodes if cluster.nodes[index].num_devices > 1)
                return "inside", found or _refuse(self.text, "has only one device on each of these nodes", cluster.name)
            case {"what": "between racks"}:
                if cluster.racks is None:
                    _refuse(
                        self.text,
                        "has no racks; an effect of kind 'oversubscription' before this one adds them",
                        cluster.name,
                    )
                return "racks", ()
            case {"what": "to hosts"}:
                return "hosts", every
            case {"what": "between" | "of", **rest}:
                if len(every) < 2:
                    _refuse(self.text, "has one node, so no links between nodes", cluster.name)
                return "between", find_nodes(self.text, rest["nodes"], cluster) if "nodes" in rest else every
            case other:
                raise AssertionError(other)


def find_nodes(selector: str, text: str, cluster: Cluster) -> tuple[int, ...]:
    """Return the indices, ascending, of the nodes that ``text`` gives by numbers (``0-2,5``) or by a name.

    Raises ScenarioError, which names ``selector``, for a node that the cluster does not have.
    """
    names = [node.name for node in cluster.nodes]
    if re.fullmatch(_LIST, text):
        return _numbers(selector, text, len(names), "nodes", cluster.name)
    if text not in names:
        named = suggest(text, names[:_MOST_NAMED])
        _refuse(selector, f"has nodes 0 to {len(names) - 1}{named}", cluster.name)
    return (names.index(text),)


def _numbers(selector: str, text: str, count: int, what: str, name: str) -> tuple[int, ...]:
    ends = [tuple(map(int, part.split("-"))) for part in text.replace(" ", "").split(",")]
    if any(pair[0] > pair[-1] or pair[-1] >= count for pair in ends):
        _refuse(selector, f"has {what} 0 to {count - 1}", name)
    return tuple(sorted({number for pair in ends for number in range(pair[0], pair[-1] + 1)}))


def _refuse(selector: str, has: str, name: str) -> Any:
    raise ScenarioError(f"{selector!r} was selected, but cluster {name!r} {has}. Correct the scenario or the cluster.")
