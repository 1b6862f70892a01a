"""The generator: terms, candidates, readings, proofs, a basis, and the book that ships."""

import numpy as np
import pytest

from meshwright.rewrite.calculus import Doubles
from meshwright.rewrite.fuzz import compute, try_rule
from meshwright.rewrite.generate.domain import steps_for, usual_domain
from meshwright.rewrite.generate.enumerate import enumerate_terms, hold_elsewhere
from meshwright.rewrite.generate.generate import (
    commuting,
    generate_rules,
    readings,
    rule_of_candidate,
    unique_candidates,
)
from meshwright.rewrite.proofs import prove
from meshwright.rewrite.rulebook import parse_rule_book, read_rule_book, shipped_rule_book, write_rule_book
from meshwright.rewrite.rules import rule_of
from meshwright.rewrite.special import Special, special_numbers
from meshwright.spec import RewriteError

ELSEWHERE = {"m": 3, "k": 4, "n": 2, "c": 5, "h": 5}


@pytest.fixture(scope="module")
def found():
    return enumerate_terms(usual_domain(), 2)


def test_terms_of_one_operator_are_all_that_are_well_typed():
    # By hand: three sums of x, y, z with themselves and three pairs are six; so for all shapes.
    terms = enumerate_terms(usual_domain(), 1)
    texts = [str(terms.expression(term)) for term in range(terms.num_terms)]
    sums = [text for text in texts if text.startswith("add(")]
    assert len(texts) == len(set(texts))
    assert len(sums) == 6 + 3 + 1 + 1 + 3 + 3 + 1
    assert "matmul(x, v)" in texts
    assert "matmul(x, y)" not in texts
    assert "conv2d(a, g, stride=(1, 1), padding=(0, 0), dilation=(1, 1), groups=1)" in texts


def test_terms_that_are_called_equal_are_equal_in_doubles(found):
    domain = usual_domain()
    rng = np.random.default_rng(3)
    arrays = {name: rng.standard_normal((1, *domain.shape(name))) for name, _ in domain.tensors}
    letters = dict(domain.sizes)
    holds = hold_elsewhere(found, usual_domain(**ELSEWHERE))
    for one, two in found.pairs[holds].tolist():
        sides = [compute([found.expression(term)], arrays, letters, Doubles())[0] for term in (one, two)]
        # Which of few numbers is larger is a matter of chance, here as in the field.
        if any(word in str(found.expression(term)) for term in (one, two) for word in ("max", "relu")):
            continue
        np.testing.assert_allclose(*sides, rtol=1e-8, atol=1e-8)


def test_what_holds_elsewhere_is_what_other_sizes_say(found):
    domain = usual_domain(**ELSEWHERE)
    rng = np.random.default_rng(4)
    arrays = {name: rng.standard_normal((1, *domain.shape(name))) for name, _ in domain.tensors}
    letters = dict(domain.sizes)
    holds = hold_elsewhere(found, domain)
    differing = 0
    for one, two in found.pairs[~holds][:80].tolist():
        try:
            sides = [compute([found.expression(term)], arrays, letters, Doubles())[0] for term in (one, two)]
        except Exception:
            continue
        differing += sides[0].shape != sides[1].shape or not np.allclose(*sides)
    assert 0 < holds.sum() < len(holds)
    assert differing


def test_candidates_are_general_and_occur_once(found):
    holds = hold_elsewhere(found, usual_domain(**ELSEWHERE))
    candidates = unique_candidates(found, holds)
    rules = [rule_of_candidate(found, item, str(number)) for number, item in enumerate(candidates)]
    texts = {str(rule) for rule in rules}
    assert len(texts) == len(rules)
    assert "neg(neg(x))  =  x" in texts
    assert "relu(relu(x))  =  relu(x)" in texts
    # The same of other shapes, or of one tensor twice.
    assert not {"neg(neg(v))  =  v", "neg(neg(a))  =  a", "add(x, sub(x, x))  =  x"} & texts


def test_readings_go_from_general_to_what_was_enumerated():
    cut = "slice(concat(x, y, axis=0), axis=0, start=0, stop={})"
    rule = rule_of("cut", cut.format("m"), "x", ranks={"x": 2, "y": 2})
    found = [str(reading) for reading in readings(rule, usual_domain())]
    assert found[0].startswith(cut.format("cut")[:-1])
    assert f"{cut.format('size(x, 0)')}  =  x" in found
    assert [prove(reading).status == "proved" for reading in readings(rule, usual_domain())].count(True) == 1


@pytest.mark.long
def test_rules_of_two_operators_are_found_proved_and_derived():
    book = generate_rules(2)
    texts = {str(entry.rule) for entry in book.rules}
    for text in (
        "matmul(matmul(x, v), u)  =  matmul(x, matmul(v, u))",
        "transpose(transpose(u, order=(1, 0)), order=(1, 0))  =  u",
        "add(x, y)  =  add(y, x)",
        "matmul(x, neg(v))  =  neg(matmul(x, v))",
    ):
        assert text in texts
    assert 30 < len(book.basis) < len(book.rules) < 150
    assert all(try_rule(entry.rule, num_sizes=2).counter_example is None for entry in book.rules)


def test_an_operator_that_is_added_gets_its_rules():
    book = generate_rules(2, steps=steps_for("reverse"))
    texts = {str(entry.rule) for entry in book.rules}
    assert all("reverse" in text for text in texts)
    assert "reverse(reverse(x, axis=0), axis=0)  =  x" in texts
    assert {
        "matmul(reverse(x, axis=0), v)  =  reverse(matmul(x, v), axis=0)",
        "reverse(matmul(x, v), axis=0)  =  matmul(reverse(x, axis=0), v)",
    } & texts
    assert all(prove(entry.rule).status == "proved" for entry in book.basis)


@pytest.mark.parametrize(
    ("name", "attributes", "words"),
    [
        ("revers", {}, "did you mean 'reverse'"),
        ("clamp", {}, "'high', 'low'.* no default value"),
        ("relu", {"axis": "0"}, r"\['axis'\] were given"),
    ],
)
def test_operators_that_cannot_be_enumerated_are_refused(name, attributes, words):
    with pytest.raises(RewriteError, match=words):
        steps_for(name, attributes)


def test_the_book_that_ships_is_large_small_based_and_readable():
    book = shipped_rule_book()
    assert len(book.rules) >= 1_000
    assert len(book.basis) <= 200
    assert {rule.name for rule in commuting(usual_domain())} <= {entry.rule.name for entry in book.rules}
    assert book.provenance["most_operators"] == 3
    merged = [entry.rule for entry in book.rules if len(entry.rule.left) > 1]
    assert "matmul(u, x), matmul(u, y)" in {", ".join(map(str, rule.left)) for rule in merged}
    assert len(book.provenance["operators"]) >= 16


@pytest.mark.long
def test_the_basis_that_ships_is_proved_again():
    statuses = {entry.rule.name: prove(entry.rule).status for entry in shipped_rule_book().basis}
    assert set(statuses.values()) == {"proved"}, statuses


def test_a_book_is_read_as_it_was_written(tmp_path):
    book = shipped_rule_book()
    place = tmp_path / "rules.json"
    write_rule_book(book, place)
    assert read_rule_book(place) == book


@pytest.mark.parametrize(
    "document",
    [[], {}, {"schema_version": 1}, {"schema_version": 2, "rules": [3], "provenance": {}}],
)
def test_damaged_books_are_refused(document):
    with pytest.raises(RewriteError, match="rule book"):
        parse_rule_book(document, "here")


@pytest.mark.parametrize(
    ("left", "right", "special"),
    [
        ("sub(x, x)", "full(shape=shape(x), value=0.0)", Special(lost=("x",))),
        ("mul(x, full(shape=shape(x), value=0.0))", "full(shape=shape(x), value=0.0)", Special(lost=("x",))),
        ("sub(add(x, y), y)", "x", Special(lost=("y",))),
        ("matmul(matmul(x, y), z)", "matmul(x, matmul(y, z))", Special(changed=("x", "z"))),
        ("logical_not(greater(x, y))", "less_equal(x, y)", Special(lost=("x", "y"))),
        ("add(x, y)", "add(y, x)", Special()),
        ("relu(concat(x, y, axis=d))", "concat(relu(x), relu(y), axis=d)", Special()),
        ("transpose(tanh(x), order=p)", "tanh(transpose(x, order=p))", Special()),
        (
            "matmul(x, concat(y, z, axis=rank(y) - 1))",
            "concat(matmul(x, y), matmul(x, z), axis=rank(x) - 1)",
            Special(),
        ),
    ],
)
def test_what_becomes_of_nan_and_infinity(left, right, special):
    assert special_numbers(rule_of("special", left, right), most_dims=2) == special
