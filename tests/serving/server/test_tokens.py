"""What is a token, is one wherever it is read; what a request brings is compared as a whole."""

import pytest

from meshwright.cli.main import invoke
from meshwright.serving.load import read_target
from meshwright.serving.server.tokens import is_bearer, read_token
from meshwright.spec import ServingError


@pytest.mark.parametrize("text", ["s3cret", "a" * 16_000, "-._~+/0aZ=", "!\"#$%&'()*"])
def test_tokens(tmp_path, text):
    path = tmp_path / "token"
    path.write_text(f"  {text}\n\n")
    assert read_token(path) == text
    assert read_target("http://127.0.0.1:8000", text).headers["Authorization"] == f"Bearer {text}"


@pytest.mark.parametrize("text", ["", "a b", "a\tb", "a\nb", "a\x7f", "tökén", "a" * 2**14 + "b"])
def test_what_is_none_is_refused_wherever_it_is_read(tmp_path, capsys, text):
    path = tmp_path / "token"
    path.write_bytes(text.encode())
    with pytest.raises(ServingError, match="expected a token, one line of ASCII"):
        read_token(path)
    for command in (["load", "http://127.0.0.1:9", "--rate", "1"], ["models", "http://127.0.0.1:9"]):
        assert invoke(["serve", *command, "--token-file", str(path)]) == 1
        assert "expected a token, one line of ASCII" in " ".join(capsys.readouterr().err.split())
    if len(text) < 2**14:
        with pytest.raises(ServingError, match="token"):
            read_target("http://127.0.0.1:8000", text)


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ServingError, match="missing: cannot be read"):
        read_token(tmp_path / "missing")


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (b"Bearer s3cret", True),
        (b"bearer   s3cret ", True),
        (b"BEARER s3cret", True),
        (b"", False),
        (b"s3cret", False),
        (b"Bearer", False),
        (b"Bearer ", False),
        (b"Bearer s3cre", False),
        (b"Bearer s3crets", False),
        (b"Bearer S3CRET", False),
        (b"Basic s3cret", False),
        (b"Bearer s3\xffret", False),
    ],
)
def test_bearers(given, expected):
    assert is_bearer(given, b"s3cret") is expected
