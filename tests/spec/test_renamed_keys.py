"""Keys that files had under another name are read as the new ones."""

from meshwright.spec.codec import decode, encode
from meshwright.spec.made_with import MadeWith


def test_an_older_name_of_a_key_is_read():
    assert decode(MadeWith, {"priced_for": "megatron"}, "made_with") == MadeWith(predicted_for="megatron")
    assert "priced_for" not in encode(MadeWith(predicted_for="megatron"))
