"""Rules of other systems: all of TASO's and Unity's are proved or refuted, damaged files are refused."""

import gzip
import json
from collections import Counter
from pathlib import Path

import pytest

from meshwright.rewrite.importing import read_rule_file, read_taso, read_unity
from meshwright.rewrite.proofs import prove
from meshwright.rewrite.rules import read_rules
from meshwright.rewrite.verify import verify
from meshwright.spec import RewriteError

HERE = Path(__file__).parent / "others"
TASO = HERE / "taso_graph_subst.pb"


@pytest.fixture(scope="module")
def unity(tmp_path_factory):
    place = tmp_path_factory.mktemp("unity") / "graph_subst_3_v2.json"
    place.write_bytes(gzip.decompress((HERE / "graph_subst_3_v2.json.gz").read_bytes()))
    return place


@pytest.mark.long
def test_all_rules_of_taso_are_proved_or_refuted():
    verdicts = [verify(rule) for rule in read_taso(TASO)]
    refuted = [verdict for verdict in verdicts if verdict.status == "refuted"]
    assert Counter(verdict.status for verdict in verdicts) == {"proved": 129, "refuted": 4}
    # The four that TASO's own verifier hangs on (TASO, issue 62).
    assert [verdict.rule.name for verdict in refuted] == ["taso-99", "taso-100", "taso-130", "taso-131"]
    assert all(verdict.counter_example is not None for verdict in refuted)


@pytest.mark.long
def test_grouped_convolutions_make_more_rules_of_taso_false():
    # Two more that add up, and five that put channels of groups side by side.
    number = {f"taso-{i}" for i in (98, 105, 125, 126, 127, 128, 129)}
    rules = [rule for rule in read_taso(TASO, grouped=True) if rule.name in number]
    assert {verify(rule, num_sizes=40).status for rule in rules} == {"refuted"}


@pytest.mark.long
def test_all_rules_of_unity_are_proved_or_refuted(unity):
    verdicts = [verify(rule, num_sizes=2) for rule in read_unity(unity)]
    assert Counter(verdict.status for verdict in verdicts) == {"proved": 633, "refuted": 7}


@pytest.mark.long
def test_listed_rules_of_xla_keep_what_was_proved():
    rules = read_rules(Path(__file__).parents[2] / "src/meshwright/rewrite/rulebook/xla.toml")
    assert len(rules) > 190
    assert all("algebraic_simplifier.cc:" in rule.source for rule in rules)
    # All of them, at all ranks, take minutes: `benchmarks/rewrite.py --only xla`.
    matrices = [rule for rule in rules if "reshape" not in str(rule) and "broadcast" not in str(rule)]
    assert sum(prove(rule, 2).status == "proved" for rule in matrices) == 91


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("rules.txt", b"", "ends in '.txt'"),
        ("rules.pb", b"\x07\x01\x02", "not a rule file of TASO"),
        ("rules.pb", b"\x0a\xff\xff\xff\xff\x0f", "not a rule file of TASO"),
        ("rules.json", b"[1, 2", "not a rule file of Unity"),
        ("rules.json", b'{"rule": [{"srcOp": 3}]}', "not a rule file of Unity"),
        ("rules.json", b'{"schema_version": 2, "rules": [{}]}', "damaged rule book"),
        ("rules.json", b'{"schema_version": 7}', "schema version 2"),
        ("rules.toml", b"rule = 3", r"expected tables \[\[rule\]\]"),
        ("rules.toml", b"[[rule]]\nleft = 'relu(x)'", "expected left and right"),
        ("rules.toml", b"[[rule]]\nleft = 'relu(x)'\nright = 'rely(x)'", "'rely', which is not declared"),
        ("rules.toml", b"[[rule]]\nleft = 'relu(x, y)'\nright = 'x'", "2 operands; expected 1"),
        ("rules.toml", b"[[rule]]\nleft = 'relu(x)'\nright = '__import__(\"os\")'", "not declared"),
        ("rules.toml", b"[[rule]]\nleft = 'relu(x)'\nright = 'x'\nranks = { x = 99 }", "numbers of dims"),
        ("rules.toml", b"[[rule]]\nleft = 'relu(x)'\nright = 'x'\nwhen = ['size(z, 0) == 1']", r"\['z'\]"),
        ("rules.toml", b"\xff\xfe", "not a TOML file"),
    ],
)
def test_files_that_are_no_rules_are_refused(tmp_path, name, content, words):
    place = tmp_path / name
    place.write_bytes(content)
    with pytest.raises(RewriteError, match=words):
        read_rule_file(place)


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(RewriteError, match="There is no file"):
        read_rule_file(tmp_path / "none.pb")


def test_a_rule_of_unity_that_refers_to_nothing_is_refused(tmp_path, unity):
    document = json.loads(unity.read_text())
    document["rule"] = document["rule"][:1]
    document["rule"][0]["mappedOutput"][0]["srcOpId"] = 40
    place = tmp_path / "rules.json"
    place.write_text(json.dumps(document))
    with pytest.raises(RewriteError, match="refers to operator 40"):
        read_rule_file(place)
