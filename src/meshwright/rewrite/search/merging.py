"""Horizontal merging: operators that read one tensor become one operator on concatenated weights, and slices of it.

A rule of two outputs matches any two of n operators; all pairs, and pairs of their results, are too many. So the
operators that share an operand are put into one order, and each is joined with the result of the previous ones: the
chain 1, 1+2, 1+2+3 and so on. All results of the chain stay in the e-graph, and each operator is a slice of every
result that contains it. There are no slices of slices, which would be duplicates. An operator that depends on the
result of another one of the chain cannot be computed together with it, and starts another chain.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any, TypeAlias

from meshwright.rewrite.expressions import Call, Name
from meshwright.rewrite.matching import Directed, Match, bind, build, node_of

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Mapping

    from meshwright.rewrite.egraph import EGraph
    from meshwright.rewrite.terms import TermNode

# Operators that joins add or remove.
_LOOKS = ("slice", "concat")

_Member: TypeAlias = "tuple[int, Mapping[str, int], Mapping[str, Any]]"


class Merging:
    """Joins operators along chains; remembers joined operators and chains, so that no chain is made twice."""

    def __init__(self) -> None:
        self._made: set[int] = set()
        self._seen: set[tuple[str, frozenset[int]]] = set()

    def run(self, graph: EGraph, rule: Directed, most_members: int) -> int:
        """Join all operators to which ``rule`` applies; return the number of joins that changed the e-graph.

        ``most_members``: the most operators of one chain.
        """
        source, following = rule.sources
        assert isinstance(source, Call)
        assert isinstance(following, Call)
        shared = sorted(_operands(source) & _operands(following))
        renamed = dict(zip(_names(following), _names(source), strict=True))
        chains: defaultdict[Hashable, list[_Member]] = defaultdict(list)
        made = {graph.find(cls) for cls in self._made}
        for cls in graph.holding(source.operator):
            if cls in made:
                continue
            for tensors, letters in bind(graph, source, cls):
                key = (tuple(tensors[name] for name in shared), tuple(sorted(letters.items(), key=str)))
                chains[key].append((cls, tensors, letters))
        count = 0
        for entries in chains.values():
            if len(entries) < 2:
                continue
            unlike = {cls: (cls, tensors, letters) for cls, tensors, letters in entries}
            ordered = sorted(
                unlike.values(), key=lambda member: (_is_absorbed(graph, member[0], rule), graph.age(member[0]))
            )
            for members in _independent(graph, ordered, most_members):
                label = (rule.rule.name, frozenset(graph.age(cls) for cls, _, _ in members))
                if len(members) < 2 or label in self._seen:
                    continue
                self._seen.add(label)
                count += self._join(graph, rule, members, renamed)
        return count

    def _join(
        self,
        graph: EGraph,
        rule: Directed,
        members: list[_Member],
        renamed: Mapping[str, str],
    ) -> int:
        (cls, tensors, letters), *others = members
        source, (first, second) = rule.sources[0], rule.targets
        assert isinstance(source, Call)
        # By operator, its slice of the joined one.
        places: dict[int, TermNode] = {}
        count = 0
        for other, bound, _ in others:
            match = Match({**tensors, **{name: bound[renamed[name]] for name in renamed}}, dict(letters), (cls, other))
            before = len(graph), graph.num_unions
            if graph.find(cls) == graph.find(other) or build(graph, rule, match) is None:
                continue
            if not places:
                places[cls] = node_of(graph, first, match)
            places[other] = node_of(graph, second, match)
            (joined,) = places[other].operands
            for member, place in places.items():
                # Operators joined before come first, so that their slices stay valid.
                graph.merge(member, graph.add(place._replace(operands=(joined,))))
            count += (len(graph), graph.num_unions) != before
            self._made.add(joined)
            again = next(iter(bind(graph, source, graph.find(joined))), None)
            if again is None:
                break
            cls, (tensors, letters) = joined, again
        return count


def _is_absorbed(graph: EGraph, cls: int, rule: Directed) -> bool:
    """Whether all readers of an operator have another node of its kind, as after folding a batch norm into it.

    Joining it with others is then of little use, so it comes last in a chain.
    """
    (source, _) = rule.sources
    assert isinstance(source, Call)
    homes = {home for node, home in graph.readers(cls) if node.operator not in _LOOKS}
    return bool(homes) and all(
        any(cls not in map(graph.find, node.operands) for node in graph.nodes_of(home, source.operator))
        for home in homes
    )


def joins(rule: Directed) -> bool:
    """Return whether a rule turns two operators with a shared operand into two slices of one, the first at start 0."""
    if len(rule.sources) != 2 or len(rule.targets) != 2:
        return False
    one, other = rule.sources
    first, second = rule.targets
    return (
        isinstance(one, Call)
        and isinstance(other, Call)
        and isinstance(first, Call)
        and isinstance(second, Call)
        and one.operator == other.operator
        and bool(_operands(one) & _operands(other))
        and first.operator == second.operator == "slice"
        and first.operands == second.operands
        and dict(first.attributes)["start"] == 0
    )


def _independent(graph: EGraph, members: list[_Member], most_members: int) -> list[list[_Member]]:
    """Members in groups within which no member needs another's result."""
    groups: list[tuple[list[_Member], set[int]]] = []
    below = {cls: _below(graph, tensors.values()) for cls, tensors, _ in members}
    for member in members:
        cls = member[0]
        for group, below_group in groups:
            clash = cls in below_group or any(other in below[cls] for other, _, _ in group)
            if not clash and len(group) < most_members:
                group.append(member)
                below_group.update(below[cls])
                break
        else:
            groups.append(([member], set(below[cls])))
    return [group for group, _ in groups]


def _below(graph: EGraph, wanted: Iterable[int]) -> set[int]:
    """Classes from which some are computed, by each class's earliest node."""
    seen: set[int] = set()
    todo = [graph.find(cls) for cls in wanted]
    while todo:
        cls = todo.pop()
        if cls not in seen:
            seen.add(cls)
            todo += map(graph.find, graph.earliest(cls).operands)
    return seen


def _operands(call: Call) -> set[str]:
    return set(_names(call))


def _names(call: Call) -> list[str]:
    return [item.name for item in call.operands if isinstance(item, Name)]
