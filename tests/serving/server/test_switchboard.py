"""How a scheduler waits."""

from contextlib import closing

import pytest

from meshwright.serving.server.channel import Closed, connect
from meshwright.serving.server.switchboard import Switchboard


@pytest.mark.parametrize(("wait_ns", "asked_s"), [(1_000_000_000, 0.99), (5_000_000, 0.005), (-1, 0.0)])
def test_long_waits_are_waited_for_in_parts(tmp_path, monkeypatch, wait_ns, asked_s):
    """The system ends them up to a thousandth late."""
    with closing(Switchboard(tmp_path / "socket", None)) as board:
        asked = []
        monkeypatch.setattr(board._selector, "select", lambda seconds: asked.append(seconds) or [])
        board.wait(wait_ns)
        assert asked == [pytest.approx(asked_s)]


def test_whoever_has_not_been_met_is_disconnected_at_the_end(tmp_path):
    with closing(Switchboard(tmp_path / "socket", None)) as board, closing(connect(tmp_path / "socket")) as waiting:
        board.hear(board.wait(1_000_000_000), 0)
        assert list(waiting.receive()) == []
        board.close()
        with pytest.raises(Closed):
            next(waiting.receive())
