"""Parts of memory and their groups: every part has one group, so groups add up to the whole everywhere."""

from hypothesis import given
from hypothesis import strategies as st

from meshwright.spec.memory import MEMORY_GROUPS, MEMORY_PARTS, group_parts


def test_every_part_is_in_exactly_one_group():
    named = [part for names in MEMORY_GROUPS.values() for part in names]
    assert sorted(named) == sorted(MEMORY_PARTS)


@given(st.lists(st.integers(0, 2**50), min_size=len(MEMORY_PARTS), max_size=len(MEMORY_PARTS)))
def test_groups_add_up_to_the_parts(sizes):
    parts = dict(zip(MEMORY_PARTS, sizes, strict=True))
    assert sum(group_parts(parts).values()) == sum(sizes)
