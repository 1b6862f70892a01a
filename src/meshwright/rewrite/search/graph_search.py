"""`graph_search`: a cheaper graph of the same outputs, among all that rules lead to.

Rules fill an e-graph (`grow`), the cost model estimates its nodes, and HiGHS chooses (`extraction`).
"""

from __future__ import annotations

import math
import time
from collections import Counter, defaultdict
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, TypeAlias

from meshwright.rewrite.egraph import EGraph
from meshwright.rewrite.expressions import Call, Name
from meshwright.rewrite.matching import Match, SaturationLimits, bind, build, node_of, saturate
from meshwright.rewrite.search.call_costs import FREE, call_of
from meshwright.rewrite.search.extraction import extract, smallest
from meshwright.rewrite.terms import INPUT, ITEM, OPAQUE, TOKEN_DTYPE, TermNode, Terms

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Mapping, Sequence, Set
    from typing import Any

    from meshwright.rewrite.matching import Directed
    from meshwright.rewrite.search.call_costs import CallCosts, TorchCall
    from meshwright.rewrite.search.ruleset import Guided


# `Terms` → `EGraph`, and facts about its classes beside their types.

_GIVEN = ("parameter", "buffer", "constant")


def load(
    terms: Terms, outputs: Sequence[int], finite: Set[str] = frozenset(), *, frozen: bool = False
) -> tuple[EGraph, dict[int, int]]:
    """An e-graph of the terms that outputs need, and the class of each term.

    ``finite``: names of given tensors that contain finite numbers, and always will. ``frozen``: weights do not change.
    """
    graph = EGraph()
    classes: dict[int, int] = {}
    for term in terms.needed(outputs):
        node = terms.nodes[term]
        operands = tuple(classes[operand] for operand in node.operands)
        classes[term] = graph.add(TermNode(node.operator, operands, node.attributes), terms.types[term])
        if node.operator == INPUT and node.attribute("name") in finite:
            graph.finite.add(classes[term])
        if node.operator == INPUT and _is_fixed(node, frozen):
            graph.constant.add(classes[term])
    return graph, classes


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassFacts:
    """By class: whether it is independent of the batch (computed once), and its number, if the same everywhere."""

    constant: frozenset[int]
    number: Mapping[int, float]


def find_known(graph: EGraph, *, frozen: bool) -> ClassFacts:
    """Facts that follow from weights and numbers alone; ``frozen``: weights do not change (inference)."""
    constant: set[int] = set()
    number: dict[int, float] = {}
    readers: dict[int, set[int]] = {}
    todo = set()
    for cls in graph.classes():
        for node in graph.nodes(cls):
            for operand in node.operands:
                readers.setdefault(graph.find(operand), set()).add(cls)
            if not node.operands:
                todo.add(cls)
    while todo:
        cls = todo.pop()
        grown = False
        for node in graph.nodes(cls):
            if cls not in constant and _is_constant(graph, cls, node, constant, frozen):
                constant.add(cls)
                grown = True
            value = number.get(cls, _number(graph, node, number))
            if value is not None and cls not in number:
                number[cls] = value
                grown = True
        if grown:
            todo |= readers.get(cls, set())
    return ClassFacts(constant=frozenset(constant), number=number)


def _is_constant(graph: EGraph, home: int, node: TermNode, constant: set[int], frozen: bool) -> bool:
    if node.operator == INPUT:
        return _is_fixed(node, frozen)
    if node.operator in (OPAQUE, ITEM) and any(
        graph.types[graph.find(cls)].dtype == TOKEN_DTYPE for cls in (*node.operands, home)
    ):
        # Ordered, or one of several results.
        return False
    return all(graph.find(operand) in constant for operand in node.operands)


def _is_fixed(node: TermNode, frozen: bool) -> bool:
    kind = dict(node.attributes).get("kind")
    return kind == "constant" or (frozen and kind in _GIVEN)


def _number(graph: EGraph, node: TermNode, number: dict[int, float]) -> float | None:
    if node.operator == "full":
        return float(node.attribute("value"))
    if node.operator in ("broadcast", "reshape"):
        return number.get(graph.find(node.operands[0]))
    return None


def is_token(graph: EGraph, cls: int) -> bool:
    """Whether a class represents an order of effects, or several results, and is not a tensor."""
    return graph.types[cls].dtype == TOKEN_DTYPE


# Merges: operators that read one tensor become one operator on joined weights, and slices of its result.
#
# A rule of two outputs fits any two of n operators; all pairs, and pairs of their results, are too many. So operators
# that share an operand are taken in one order, and each is joined to the result of those before it: the chain 1, 1+2,
# 1+2+3 and so on. All members of the chain stay in the e-graph, and each operator is a slice of each member that
# contains it; slices of slices would repeat the same many times. An operator that needs the result of a member cannot
# be computed together with it, and starts a chain of its own.

# Operators that joins add or remove.
_LOOKS = ("slice", "concat")

_Member: TypeAlias = "tuple[int, Mapping[str, int], Mapping[str, Any]]"


class Merging:
    """Joins operators along chains; remembers its results and the chains already done."""

    def __init__(self) -> None:
        self._made: set[int] = set()
        self._seen: set[tuple[str, frozenset[int]]] = set()

    def run(self, graph: EGraph, rule: Directed, most_members: int) -> int:
        """Join what can be joined; return how often something was new."""
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
    """Whether a rule turns two operators with a shared operand into slices of one, in their order."""
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


Ended = Literal["saturated", "rounds", "nodes", "seconds"]

# Operators that one chain of merges may join.
_MOST_MEMBERS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Grown:
    """How an e-graph grew: ``ended`` is why it stopped, ``cut`` the rules with too many matches."""

    rounds: int
    ended: Ended
    num_nodes: int
    cut: tuple[str, ...]
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundGraph:
    """A graph of the same outputs. ``before_s`` and ``after_s`` are predicted; ``proved``: no graph is cheaper.

    ``rules``: the rules that added chosen nodes, with the number of nodes. ``united``: the rules that showed two of
    the original graph's terms to be equal, so that one remains, with their number. ``choice``: its nodes by class of
    the e-graph.
    """

    terms: Terms
    effects: int | None
    before_s: float
    after_s: float
    proved: bool
    grown: Grown
    rules: Mapping[str, int]
    united: Mapping[str, int]
    choice: Mapping[int, TermNode]


class CircularError(Exception):
    """A choice in which a node needs its own result."""


class GraphSpace:
    """All graphs that rules lead to from one graph; estimated, ready for a choice."""

    def __init__(self, terms: Terms, effects: int | None, *, frozen: bool, finite: Set[str] = frozenset()) -> None:
        self._terms, self._effects, self._frozen = terms, effects, frozen
        self._roots = (*terms.outputs, *(() if effects is None else (effects,)))
        self.graph, self._classes = load(terms, self._roots, finite, frozen=frozen)
        self._look()

    def grow(self, rules: Guided, limits: SaturationLimits) -> Grown:
        """Apply rules within limits; the limit of nodes counts new ones."""
        limits = replace(limits, nodes=limits.nodes + len(self.graph))
        grown = grow(self.graph, rules, limits)
        self._look()
        return grown

    def _look(self) -> None:
        """Update the facts about the e-graph."""
        self.known: ClassFacts = find_known(self.graph, frozen=self._frozen)
        self._calls: dict[tuple[int, TermNode], TorchCall] = {}
        self._reasons = self.graph.reasons()
        self._first = self._as_it_was()
        # The number of originally different terms that each class now contains.
        self._origins = Counter(map(self.graph.find, set(self._classes.values())))

    def call(self, cls: int, node: TermNode) -> TorchCall | None:
        """The call that a node of a class becomes; None for one that costs nothing."""
        if node.operator in FREE:
            return None
        found = self._calls.get((cls, node))
        if found is None:
            found = self._calls[cls, node] = call_of(self.graph, self.known, cls, node)
        return found

    def calls(self) -> list[TorchCall]:
        """All calls that a choice may need."""
        pairs = ((cls, node) for cls in self._reachable() for node in self.graph.nodes(cls))
        return list(dict.fromkeys(call for cls, node in pairs if (call := self.call(cls, node)) is not None))

    def calls_of(self, found: FoundGraph) -> list[TorchCall]:
        """The calls of a chosen graph, and of the original one."""
        pairs = ((cls, node) for choice in (found.choice, self._first) for cls, node in choice.items())
        used = (self.call(cls, node) for cls, node in pairs if cls not in self.known.constant)
        return list(dict.fromkeys(call for call in used if call is not None))

    def seconds(self, choice: Mapping[int, TermNode], costs: CallCosts) -> float:
        """The seconds of a choice at these costs."""
        graph, constant = self.graph, self.known.constant
        pairs = ((cls, node) for cls, node in choice.items() if cls not in constant and not is_token(graph, cls))
        return sum(costs.seconds(call) for cls, node in pairs if (call := self.call(cls, node)) is not None)

    def with_costs(self, found: FoundGraph, costs: CallCosts) -> FoundGraph:
        """The same graph at other costs, at which it may not be the cheapest."""
        before_s, after_s = self.seconds(self._first, costs), self.seconds(found.choice, costs)
        return replace(found, before_s=before_s, after_s=after_s, proved=False)

    def _reachable(self) -> list[int]:
        graph, constant = self.graph, self.known.constant
        seen: dict[int, None] = {}
        todo = [graph.find(self._classes[root]) for root in self._roots]
        while todo:
            cls = todo.pop()
            if cls not in seen and cls not in constant:
                seen[cls] = None
                todo += [graph.find(operand) for node in graph.nodes(cls) for operand in node.operands]
        return list(seen)

    def _as_it_was(self) -> dict[int, TermNode]:
        """The original graph, as a choice."""
        chosen: dict[int, TermNode] = {}
        for term, cls in self._classes.items():
            node = self._terms.nodes[term]
            operands = tuple(self.graph.find(self._classes[operand]) for operand in node.operands)
            chosen.setdefault(self.graph.find(cls), node._replace(operands=operands))
        return chosen

    def choose(self, costs: CallCosts, grown: Grown, *, limit_s: float = 4.0, without: str = "") -> FoundGraph:
        """The cheapest graph; ``without``: without the nodes of that rule. All `calls` must have costs."""
        graph, constant, first, reasons = self.graph, self.known.constant, self._first, self._reasons
        kept = set(first.items())

        def seconds(cls: int, node: TermNode) -> float:
            if without and reasons.get((cls, node)) == without and (cls, node) not in kept:
                return math.inf
            call = self.call(cls, node)
            return 0.0 if call is None else costs.seconds(call)

        roots = [self._classes[root] for root in self._roots]
        choice = extract(graph, roots, seconds, start=first, leaves=constant, limit_s=limit_s)
        read = {graph.find(operand) for node in choice.nodes.values() for operand in node.operands}
        fixed = smallest(graph, [cls for cls in (*read, *map(graph.find, roots)) if cls in constant])
        nodes = {**fixed, **choice.nodes}
        terms, place = build_terms(graph, nodes, [graph.find(root) for root in roots])
        terms.outputs = tuple(place[graph.find(self._classes[output])] for output in self._terms.outputs)
        used: dict[str, int] = {}
        for cls in place:
            reason = reasons.get((cls, nodes[cls]))
            if reason is not None and (cls, nodes[cls]) not in kept:
                used[reason] = used.get(reason, 0) + 1
        return FoundGraph(
            terms=terms,
            effects=None if self._effects is None else place[graph.find(self._classes[self._effects])],
            before_s=self.seconds(first, costs),
            after_s=choice.seconds,
            proved=choice.proved,
            grown=grown,
            rules=used,
            united=Counter(rule for cls, rule in graph.united() if cls in place and self._origins[cls] > 1),
            choice=choice.nodes,
        )


def grow(graph: EGraph, rules: Guided, limits: SaturationLimits) -> Grown:
    """Simplify until nothing is new, then explore one round and merge, and so on, within limits."""
    start = time.perf_counter()
    merging = Merging()
    seen = [0, 0, 0]
    cut: dict[str, None] = {}
    ended: Ended = "rounds"

    def left(rounds: int) -> SaturationLimits:
        spent = time.perf_counter() - start
        return SaturationLimits(
            rounds=rounds, nodes=limits.nodes, seconds=limits.seconds - spent, matches=limits.matches
        )

    number = 0
    for number in range(1, limits.rounds + 1):
        before = len(graph), graph.num_unions
        for i, (phase, rounds) in enumerate(((rules.simplify, 8), (rules.explore, 1), (rules.fold, 2))):
            done = saturate(graph, phase, left(rounds), seen[i])
            seen[i] = done.until
            cut.update(dict.fromkeys(done.cut))
            if done.ended in ("nodes", "seconds"):
                return _grown(graph, number, done.ended, cut, start)
        for rule in rules.merge:
            merging.run(graph, rule, _MOST_MEMBERS)
        graph.rebuild()
        if (len(graph), graph.num_unions) == before:
            ended = "saturated"
            break
    saturate(graph, rules.simplify, left(8), seen[0])
    return _grown(graph, number, ended, cut, start)


def _grown(graph: EGraph, rounds: int, ended: Ended, cut: Mapping[str, None], start: float) -> Grown:
    seconds = time.perf_counter() - start
    return Grown(rounds=rounds, ended=ended, num_nodes=len(graph), cut=tuple(cut), seconds=seconds)


def build_terms(graph: EGraph, nodes: Mapping[int, TermNode], roots: Iterable[int]) -> tuple[Terms, dict[int, int]]:
    """Terms of a choice, and the term of each class that the roots need. Raises CircularError for one with a circle."""
    terms = Terms()
    place: dict[int, int] = {}
    open_: set[int] = set()
    todo = [(root, False) for root in roots]
    while todo:
        cls, ready = todo.pop()
        if cls in place:
            continue
        node = nodes[cls]
        operands = [graph.find(operand) for operand in node.operands]
        if ready:
            place[cls] = terms.add(
                node._replace(operands=tuple(place[operand] for operand in operands)), graph.types[cls]
            )
        else:
            if cls in open_:
                raise CircularError
            open_.add(cls)
            todo.append((cls, True))
            todo += [(operand, False) for operand in operands if operand not in place]
    return terms, place
