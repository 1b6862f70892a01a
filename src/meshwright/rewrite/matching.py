"""Find where rules match in an `EGraph` (`matches`), add their results (`apply`), and repeat that (`saturate`)."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import TYPE_CHECKING, Any, Literal

from meshwright.rewrite.calculus import IllTypedError, Indexed
from meshwright.rewrite.expressions import (
    Attribute,
    Call,
    Expression,
    Formula,
    Name,
    given_names,
    letters_of,
    names_of,
    value_of,
)
from meshwright.rewrite.instances import MOST_DIMS
from meshwright.rewrite.terms import TermNode

if TYPE_CHECKING:
    from meshwright.rewrite.egraph import EGraph
    from meshwright.rewrite.rules import Rule


@dataclass(frozen=True, slots=True)
class Match:
    """A position in an e-graph where a rule's source matches.

    ``tensors``: by tensor of the rule, its class. ``letters``: by letter, its value. ``outputs``: the class that each
    source expression matches.
    """

    tensors: dict[str, int]
    letters: dict[str, Any]
    outputs: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Directed:
    """A rule read in one direction: where ``sources`` match, ``targets`` are added as equal.

    ``ranks``: the combinations of (tensor, number of dims) for which the rule is proved; None: any. ``finite``: tensors
    that must be known to contain only finite numbers. ``folds``: used only if a part of the target becomes constant and
    no part of the source is. ``general``: not used where all outputs are constants, which are computed once anyway.
    """

    rule: Rule
    sources: tuple[Expression, ...]
    targets: tuple[Expression, ...]
    ranks: frozenset[tuple[tuple[str, int], ...]] | None = None
    finite: tuple[str, ...] = ()
    folds: bool = False
    general: bool = False

    @cached_property
    def depth(self) -> int:
        """The number of nested operators in the deepest source expression."""
        return max(map(_depth, self.sources))


def directions(
    rule: Rule, ranks: frozenset[tuple[tuple[str, int], ...]] | None = None, finite: tuple[str, ...] = ()
) -> list[Directed]:
    """Return the directions in which a rule can be used: none, one or both.

    The source must bind all tensors and letters of the target. A direction whose target contains its source is left
    out, because it would apply to its own result for ever. ``ranks`` and ``finite`` as in `Directed`.
    """
    found = []
    for sources, targets in ((rule.left, rule.right), (rule.right, rule.left)):
        names = {name for side in sources for name in names_of(side)}
        letters = {letter for side in sources for letter in _bound_letters(side)}
        needed = {name for side in targets for name in names_of(side)}
        wanted = {letter for side in (*targets, *sources) for _, letter in letters_of(side)}
        calls = all(isinstance(side, Call) for side in sources)
        grows = any(_contains(target, source) for source, target in zip(sources, targets, strict=True))
        if calls and needed <= names and wanted <= letters and not grows:
            found.append(Directed(rule=rule, sources=sources, targets=targets, ranks=ranks, finite=finite))
    return found


def bind(graph: EGraph, pattern: Call, cls: int) -> Iterator[tuple[dict[str, int], dict[str, Any]]]:
    """Yield (classes by tensor, values by letter) for each way in which a node of ``cls`` matches ``pattern``."""
    yield from _match(graph, pattern, cls, {}, {})


def node_of(graph: EGraph, call: Expression, match: Match) -> TermNode:
    """Return the node that ``call``, a target of the matched rule, becomes at a match; operands are added if needed."""
    assert isinstance(call, Call)
    tensors = {name: graph.find(cls) for name, cls in match.tensors.items()}
    shaped = {name: Indexed(graph.types[cls].shape, _unread) for name, cls in tensors.items()}
    operands = tuple(graph.find(_build(graph, operand, tensors, shaped, match.letters)) for operand in call.operands)
    return TermNode(
        call.operator, operands, tuple((name, value_of(v, shaped, match.letters)) for name, v in call.attributes)
    )


def matches(
    graph: EGraph, directed: Directed, among: Set[int] | None = None, deadline: float = math.inf
) -> Iterator[Match]:
    """Yield the matches of a directed rule's sources; stop at ``deadline`` (in seconds of ``time.perf_counter``).

    ``among``: if given, the first source expression must match one of these classes.
    """
    first, *others = directed.sources
    assert isinstance(first, Call)
    for cls in graph.holding(first.operator):
        if among is not None and cls not in among:
            continue
        if time.perf_counter() > deadline:
            return
        if graph.nodes_of(cls, "full"):
            # Nothing is simpler than a number.
            continue
        for tensors, letters in _match(graph, first, cls, {}, {}):
            yield from _join(graph, directed, others, Match(tensors, letters, (cls,)))


def apply(graph: EGraph, directed: Directed, match: Match) -> bool:
    """Add the targets at a match and merge them with the sources; return whether the e-graph changed.

    Does nothing where `build` returns None.
    """
    before = len(graph), graph.num_unions
    made = build(graph, directed, match)
    if made is None:
        return False
    for target, output in zip(made, match.outputs, strict=True):
        graph.merge(target, output)
    return (len(graph), graph.num_unions) != before


def build(graph: EGraph, directed: Directed, match: Match) -> list[int] | None:
    """Add the targets at a match; return their classes.

    Returns None if the rule must not be used there: it is ill typed, not proved for these ranks or sizes, a condition
    does not hold, a tensor is not known to be finite, or nothing becomes constant (`Directed`).
    """
    tensors = {name: graph.find(cls) for name, cls in match.tensors.items()}
    shaped = {name: Indexed(graph.types[cls].shape, _unread) for name, cls in tensors.items()}
    if directed.ranks is not None:
        ranks = tuple(sorted((name, tensor.rank) for name, tensor in shaped.items()))
        if ranks not in directed.ranks or not _is_covered(directed.rule, shaped, match.letters):
            return None
    if any(cls not in graph.finite for cls in (tensors[name] for name in directed.finite)):
        return None
    if directed.general and graph.constant.issuperset(map(graph.find, match.outputs)):
        # But it is computed once.
        return None
    if directed.folds and not _makes_constant(graph, directed, tensors):
        return None
    graph.reason = directed.rule.name
    try:
        if not all(condition.holds(shaped, match.letters) for condition in directed.rule.when):
            return None
        made = [_build(graph, side, tensors, shaped, match.letters) for side in directed.targets]
    except (IllTypedError, IndexError, ValueError, KeyError, TypeError):
        return None
    fits = all(graph.types[cls] == graph.types[graph.find(out)] for cls, out in zip(made, match.outputs, strict=True))
    return made if fits else None


def _makes_constant(graph: EGraph, directed: Directed, tensors: Mapping[str, int]) -> bool:
    fixed = {name for name, cls in tensors.items() if cls in graph.constant}
    if not fixed:
        return False
    found = any(_has_constant(side, fixed) for side in directed.targets)
    return found and not any(_has_constant(side, fixed) for side in directed.sources)


def _has_constant(side: Expression, fixed: Set[str]) -> bool:
    """Whether a call of constant tensors, one at least, is part of an expression."""
    if isinstance(side, Name):
        return False
    names = set(given_names(side))
    return (bool(names) and names <= fixed) or any(_has_constant(operand, fixed) for operand in side.operands)


def _is_covered(rule: Rule, shaped: Mapping[str, Indexed], letters: Mapping[str, Any]) -> bool:
    """Whether proofs cover these sizes and attributes: no dim of size 0, at most `MOST_DIMS` dims."""
    if any(size == 0 for tensor in shaped.values() for size in tensor.shape):
        return False
    places = dict(rule.letters)
    return all(
        len(value) <= MOST_DIMS if isinstance(value, tuple) else not places[name].endswith(".axis") or value < MOST_DIMS
        for name, value in letters.items()
    )


def _join(graph: EGraph, directed: Directed, others: list[Expression], found: Match) -> Iterator[Match]:
    if not others:
        yield found
        return
    following, *rest = others
    assert isinstance(following, Call)
    for cls in graph.holding(following.operator):
        if cls in found.outputs:
            continue
        for tensors, letters in _match(graph, following, cls, found.tensors, found.letters):
            yield from _join(graph, directed, rest, Match(tensors, letters, (*found.outputs, cls)))


def _match(
    graph: EGraph, pattern: Expression, cls: int, tensors: dict[str, int], letters: dict[str, Any]
) -> Iterator[tuple[dict[str, int], dict[str, Any]]]:
    if isinstance(pattern, Name):
        held = tensors.get(pattern.name)
        if held is None:
            yield {**tensors, pattern.name: cls}, letters
        elif held == cls:
            yield tensors, letters
        return
    for node in graph.nodes_of(cls, pattern.operator):
        if len(node.operands) != len(pattern.operands):
            continue
        known = _match_attributes(pattern, node, letters)
        if known is None:
            continue
        found = [(tensors, known)]
        for operand, child in zip(pattern.operands, node.operands, strict=True):
            found = [
                more for bound, values in found for more in _match(graph, operand, graph.find(child), bound, values)
            ]
            if not found:
                break
        for bound, values in found:
            if _computed_hold(graph, pattern, node, bound, values):
                yield bound, values


def _match_attributes(pattern: Call, node: TermNode, letters: dict[str, Any]) -> dict[str, Any] | None:
    known = letters
    for (_, wanted), (_, value) in zip(pattern.attributes, node.attributes, strict=True):
        if isinstance(wanted, Formula):
            if wanted.function:
                continue
            letter = wanted.arguments[0]
            if letter not in known:
                known = {**known, letter: value}
            elif known[letter] != value:
                return None
        elif isinstance(wanted, tuple):
            found = _match_tuple(wanted, value, known)
            if found is None:
                return None
            known = found
        elif wanted != value and not _is_as_good(wanted, value):
            return None
    return known


def _is_as_good(wanted: Any, value: Any) -> bool:
    """Whether two numbers are equal up to the last bits of float64, as 1 / √2 and √½ are: torch rounds far more."""
    return isinstance(wanted, float) and isinstance(value, float) and math.isclose(wanted, value, rel_tol=1e-15)


def _match_tuple(wanted: tuple[Attribute, ...], value: Any, letters: dict[str, Any]) -> dict[str, Any] | None:
    if not isinstance(value, tuple) or len(value) != len(wanted):
        return None
    known = letters
    for one, held in zip(wanted, value, strict=True):
        if isinstance(one, Formula) and not one.function:
            letter = one.arguments[0]
            if known.get(letter, held) != held:
                return None
            known = {**known, letter: held}
        elif not isinstance(one, Formula) and one != held:
            return None
    return known


def _computed_hold(
    graph: EGraph, pattern: Call, node: TermNode, tensors: dict[str, int], letters: dict[str, Any]
) -> bool:
    """Whether attributes that the pattern computes equal those of the node."""
    for (_, wanted), (_, value) in zip(pattern.attributes, node.attributes, strict=True):
        if not _is_computed(wanted):
            continue
        shaped = {name: Indexed(graph.types[cls].shape, _unread) for name, cls in tensors.items()}
        try:
            if value_of(wanted, shaped, letters) != value:
                return False
        except (KeyError, IndexError, ValueError, TypeError):
            return False
    return True


def _contains(expression: Expression, part: Expression) -> bool:
    return expression == part or (
        isinstance(expression, Call) and any(_contains(operand, part) for operand in expression.operands)
    )


def _depth(expression: Expression) -> int:
    return 0 if isinstance(expression, Name) else 1 + max(map(_depth, expression.operands), default=0)


def _is_computed(attribute: Attribute) -> bool:
    if isinstance(attribute, tuple):
        return any(map(_is_computed, attribute))
    return isinstance(attribute, Formula) and bool(attribute.function)


def _bound_letters(expression: Expression) -> Iterator[str]:
    """Letters that are an attribute by themselves, which a match binds."""
    if isinstance(expression, Name):
        return
    for operand in expression.operands:
        yield from _bound_letters(operand)
    for _, value in expression.attributes:
        for item in value if isinstance(value, tuple) else (value,):
            if isinstance(item, Formula) and not item.function:
                yield item.arguments[0]


def _build(
    graph: EGraph, side: Expression, tensors: dict[str, int], shaped: dict[str, Indexed], letters: dict[str, Any]
) -> int:
    if isinstance(side, Name):
        return tensors[side.name]
    operands = tuple(_build(graph, operand, tensors, shaped, letters) for operand in side.operands)
    attributes = tuple((name, value_of(value, shaped, letters)) for name, value in side.attributes)
    return graph.add(TermNode(side.operator, operands, attributes))


def _unread(*_: Any) -> Any:
    raise AssertionError("a condition reads no numbers")


@dataclass(frozen=True, slots=True, kw_only=True)
class SaturationLimits:
    """Limits of a saturation: rounds, nodes of the e-graph, seconds, and matches of one rule in one round."""

    rounds: int = 8
    nodes: int = 20_000
    seconds: float = 5.0
    matches: int = 4_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Saturation:
    """The result of `saturate`.

    ``rounds``: rounds begun. ``ended``: "saturated" if nothing new appeared, else the limit that was reached.
    ``applied``: by rule, the number of applications that changed the e-graph. ``cut``: rules that reached the limit of
    matches. ``until``: the state of the e-graph (`EGraph.now`) at the start of the last round; pass it as ``since`` of
    the next call.
    """

    rounds: int
    ended: Literal["saturated", "rounds", "nodes", "seconds"]
    applied: dict[str, int]
    cut: tuple[str, ...]
    until: int


def saturate(graph: EGraph, rules: Sequence[Directed], limits: SaturationLimits, since: int = 0) -> Saturation:
    """Apply rules round by round until nothing new appears or a limit is reached; what was added stays in ``graph``.

    ``since``: a former state (`EGraph.now`) in which the same rules were matched already; they then match only where
    the e-graph changed. 0: match everywhere.
    """
    start = time.perf_counter()
    applied: dict[str, int] = {}
    cut: dict[str, None] = {}

    def end(rounds: int, ended: Literal["saturated", "rounds", "nodes", "seconds"]) -> Saturation:
        return Saturation(rounds=rounds, ended=ended, applied=applied, cut=tuple(cut), until=since)

    for number in range(1, limits.rounds + 1):
        before = len(graph), graph.num_unions
        changed = graph.changed(since, max((rule.depth for rule in rules), default=0)) if since else None
        since = graph.now
        found = []
        for rule in rules:
            # A rule of several outputs may combine changed and unchanged classes.
            among = None if changed is None or len(rule.sources) > 1 else changed[rule.depth]
            places = list(islice(matches(graph, rule, among, start + limits.seconds), limits.matches + 1))
            if len(places) > limits.matches:
                cut[rule.rule.name] = None
            found.append((rule, places[: limits.matches]))
            if time.perf_counter() - start > limits.seconds:
                break
        for rule, places in found:
            for match in places:
                if apply(graph, rule, match):
                    applied[rule.rule.name] = applied.get(rule.rule.name, 0) + 1
                if len(graph) > limits.nodes:
                    graph.rebuild()
                    return end(number, "nodes")
            if time.perf_counter() - start > limits.seconds:
                graph.rebuild()
                return end(number, "seconds")
        graph.rebuild()
        if (len(graph), graph.num_unions) == before:
            return end(number, "saturated")
    return end(limits.rounds, "rounds")
