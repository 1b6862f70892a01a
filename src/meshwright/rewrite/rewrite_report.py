"""Reports on a rewriting (rows, a sentence, an HTML page with both graphs and the rules), and on a rule's proof."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING, Any

from meshwright.rewrite.instances import MOST_DIMS
from meshwright.rewrite.proofs import Attempt, describe_sizes, number_at
from meshwright.rewrite.terms import INPUT, Terms
from meshwright.rewrite.verify import verify

if TYPE_CHECKING:
    from collections.abc import Iterator

    from meshwright.rewrite.matching import Directed
    from meshwright.rewrite.optimize import Candidate, Rewriting
    from meshwright.rewrite.rules import Rule
    from meshwright.rewrite.search.ruleset import Guided


_MOST_CHARACTERS = 2000


def explain_rule(rule: Rule, most_dims: int = MOST_DIMS) -> Iterator[str]:
    """Yield lines that explain the verdict on a rule.

    For a proved rule, the lines show one proved instance: the symbolic sizes, and the normal form of both sides'
    element at a symbolic index.
    """
    verdict = verify(rule, most_dims=most_dims)
    yield f"{rule.name}: {rule}"
    if rule.source:
        yield f"source: {rule.source}"
    yield f"{verdict.status}: {verdict.why}"
    yield f"{verdict.num_agreed} trials over a prime field agreed"
    proved = [attempt for attempt in verdict.proof.attempts if attempt.proved]
    if proved:
        # The last instance has the most dims, and shows the most.
        yield from _shown(rule, proved[-1])


def _shown(rule: Rule, attempt: Attempt) -> Iterator[str]:
    instance = attempt.instance
    yield f"with {describe_sizes(instance.shapes)}"
    letters = {name: value for name, value in instance.letters.items() if not str(value).startswith("$")}
    if letters:
        yield f"and {', '.join(f'{name} = {value}' for name, value in letters.items())}"
    for output in range(len(rule.left)):
        index, lines = number_at(rule, instance, output)
        yield f"both sides of output {output} at ({', '.join(index)}) are"
        for line in lines:
            yield f"  {line[:_MOST_CHARACTERS]}{' …' if len(line) > _MOST_CHARACTERS else ''}"


def rule_rows(candidate: Candidate, rules: Guided) -> list[dict[str, Any]]:
    """Return one row for each rule that led to a graph, the rule with the largest gain first.

    Keys: ``rule``; ``num_operators``, the operators that the rule added; ``num_equal``, the terms of the original graph
    that it showed to be equal to another; ``gain_s``, seconds (None if unknown); ``left`` and ``right``; ``proof``;
    ``source``.
    """
    ways = {way.rule.name: way for way in (*rules.simplify, *rules.explore, *rules.merge, *rules.fold)}
    rows = []
    made, united = candidate.found.rules, candidate.found.united
    for name in sorted({**made, **united}, key=lambda name: -candidate.gains.get(name, 0.0)):
        way = ways[name]
        rows.append(
            {
                "rule": name,
                "num_operators": made.get(name, 0),
                "num_equal": united.get(name, 0),
                "gain_s": candidate.gains.get(name),
                "left": [str(side) for side in way.rule.left],
                "right": [str(side) for side in way.rule.right],
                "proof": "not proved: named by the user" if way.ranks is None else proof_text(way),
                "source": way.rule.source,
            }
        )
    return rows


def proof_text(way: Directed) -> str:
    """Return, in words, the numbers of dims for which a rule is proved."""
    assert way.ranks is not None
    by_name = [dict(each) for each in way.ranks]
    dims = sorted({", ".join(str(each[name]) for name in way.rule.names) for each in by_name})
    names = ", ".join(way.rule.names)
    return f"for all sizes of {names} with {' or '.join(dims[:4])}{' and more' if len(dims) > 4 else ''} dims"


def operator_rows(terms: Terms) -> list[tuple[str, str, str]]:
    """Return (name, call with operands and attributes, type) of each operator that the outputs need, as text."""
    names: dict[int, str] = {}
    rows: list[tuple[str, str, str]] = []
    for term in terms.needed():
        node = terms.nodes[term]
        if node.operator == INPUT:
            names[term] = str(node.attribute("name"))
            continue
        names[term] = f"t{len(rows)}"
        shown = {name: value for name, value in node.attributes if not (node.operator == "opaque" and name == "key")}
        key = dict(node.attributes).get("key")
        called = str(key) if node.operator == "opaque" else node.operator
        arguments = [
            *(names[operand] for operand in node.operands),
            *(f"{name}={value}" for name, value in shown.items()),
        ]
        rows.append((names[term], f"{called}({', '.join(arguments)})", str(terms.types[term])))
    return rows


_STYLE = """
:root { color-scheme: light dark; }
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 80rem; padding: 0 1rem; }
table { border-collapse: collapse; width: 100%; margin: 1rem 0; }
th, td { text-align: left; padding: .25rem .6rem; vertical-align: top;
  border-bottom: 1px solid color-mix(in srgb, currentColor 20%, transparent); }
td.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
code { font: 13px/1.4 ui-monospace, monospace; overflow-wrap: anywhere; }
.graphs { display: grid; grid-template-columns: 1fr 1fr; gap: 1.5rem; }
.new { background: color-mix(in srgb, #2a9d5c 18%, transparent); }
.gone { background: color-mix(in srgb, #c8553d 18%, transparent); }
@media (max-width: 60rem) { .graphs { grid-template-columns: 1fr; } }
"""


def report_page(title: str, rewriting: Rewriting) -> str:
    """Return an HTML page without scripts: candidates, the chosen one, its rules, and both graphs side by side."""
    before = operator_rows(rewriting.source.terms)
    best = rewriting.chosen or (rewriting.candidates[0] if rewriting.candidates else None)
    parts = [
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{escape(title)}, rewritten</title>",
        f"<style>{_STYLE}</style><h1>{escape(title)}, rewritten</h1><p>{escape(summary(rewriting))}</p>",
        _candidates(rewriting),
    ]
    if best is not None:
        parts.append(_rules(best, rewriting.rules))
        after = operator_rows(best.found.terms)
        parts.append(
            "<h2>Operators</h2><p>Operators that are computed only once, from weights alone, are not listed. Coloured: "
            "operators whose name and result type occur in only one of the two graphs.</p>"
            f"<div class=graphs>{_graph('before', before, after, 'gone')}{_graph('after', after, before, 'new')}</div>"
        )
    return "".join(parts) + "</html>\n"


def summary(rewriting: Rewriting) -> str:
    """Return one sentence on the result: the speedup of the chosen graph, or why the model stays as it is."""
    if rewriting.refused and rewriting.chosen is None:
        return (
            "Graphs that are not equal to the model on this batch were dropped, and no faster graph is left; the model "
            f"stays as it is. {rewriting.refused[0]}"
        )
    if not rewriting.candidates:
        return "No rule leads to a different graph; the model stays as it is."
    if rewriting.chosen is None:
        return "No graph that was found is faster than the model on this machine; the model stays as it is."
    chosen = rewriting.chosen
    measured = (
        ""
        if chosen.speedup is None
        else f"{chosen.speedup:.2f} ± {chosen.spread:.2f} × as fast as the model, measured; "
    )
    predicted = chosen.found.before_s / max(chosen.found.after_s, 1e-12)
    return f"{measured}{predicted:.2f} × predicted, equal to {chosen.worst:.0e} in float64."


def _candidates(rewriting: Rewriting) -> str:
    rows = []
    for each in rewriting.candidates:
        speed = "" if each.speedup is None else f"{each.speedup:.3f} ± {each.spread:.3f}"
        mark = " (chosen)" if each is rewriting.chosen else ""
        rows.append(
            f"<tr><td>{escape(each.name)}{mark}<td class=number>{each.found.before_s * 1e3:.3f}"
            f"<td class=number>{each.found.after_s * 1e3:.3f}<td class=number>{speed}<td class=number>{each.worst:.0e}"
        )
    return (
        "<h2>Graphs that were found</h2><table><tr><th>found by<th>predicted time of the model, ms<th>of the graph, ms"
        "<th>times as fast as the model, measured<th>largest relative difference in float64"
        f"{''.join(rows)}</table>"
    )


def _rules(candidate: Candidate, rules: Guided) -> str:
    rows = [
        f"<tr><td>{escape(row['rule'])}<td class=number>{row['num_operators']}<td class=number>{row['num_equal']}"
        f"<td class=number>{'' if row['gain_s'] is None else format(row['gain_s'] * 1e6, '.1f')}"
        f"<td><code>{escape(', '.join(row['left']))}</code><br>= <code>{escape(', '.join(row['right']))}</code>"
        f"<td>{escape(row['proof'])}"
        for row in rule_rows(candidate, rules)
    ]
    return (
        "<h2>Rules</h2><p>Operators: the operators of the chosen graph that the rule added. Shown equal: the operators "
        "of the model that the rule showed to be equal to another. Gain: the additional time of the cheapest graph "
        "that uses no operator of the rule.</p><table><tr><th>rule<th>operators<th>shown equal<th>gain, µs"
        "<th>left = right<th>proved"
        f"{''.join(rows)}</table>"
    )


def _graph(title: str, rows: list[tuple[str, str, str]], others: list[tuple[str, str, str]], mark: str) -> str:
    known = {(call.partition("(")[0], type_) for _, call, type_ in others}
    lines = []
    for name, call, type_ in rows:
        style = "" if (call.partition("(")[0], type_) in known else f" class={mark}"
        lines.append(
            f"<tr{style}><td><code>{escape(name)}</code><td><code>{escape(call)}</code><td><code>{type_}</code>"
        )
    return f"<div><h3>{title}: {len(rows)}</h3><table>{''.join(lines)}</table></div>"
