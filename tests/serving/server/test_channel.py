"""Messages keep their bounds and order, whatever the other side has room for."""

import socket

import numpy as np
import pytest

from meshwright.serving.server.channel import MOST_CELLS, Closed, Kind, MessageChannel, connect, listen


@pytest.fixture
def pair():
    ends = [MessageChannel(end) for end in socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)]
    yield ends
    for end in ends:
        end.close()


def test_messages_come_as_they_were_sent(pair):
    first, second = pair
    first.send(np.array([Kind.SUBMIT, 1, 2, 3], np.int64))
    first.send_text({"a": [1, "two"]})
    first.send(np.array([Kind.RAN], np.int64))
    (kind, cells), (text, document), (last, nothing) = second.receive()
    assert (kind, cells.tolist()) == (Kind.SUBMIT, [1, 2, 3])
    assert (text, document) == (Kind.TEXT, {"a": [1, "two"]})
    assert (last, nothing.tolist()) == (Kind.RAN, [])


def test_what_has_no_room_waits_in_order(pair):
    first, second = pair
    for number in range(500):
        first.send(np.full(MOST_CELLS // 4, number + 2, np.int64))
    assert first.is_waiting
    seen = []
    while len(seen) < 500:
        seen += [kind for kind, _ in second.receive()]
        first.flush()
    assert seen == list(range(2, 502))
    assert not first.is_waiting


def test_what_was_sent_before_an_end_comes_although_not_all_was_read(pair):
    first, second = pair
    for number in range(3):
        second.send(np.array([Kind.RUN, number], np.int64))
    first.send(np.array([Kind.RAN, 7], np.int64))
    first.close()
    heard = second.receive()
    kind, cells = next(heard)
    assert (kind, cells.tolist()) == (Kind.RAN, [7])
    with pytest.raises(Closed):
        next(heard)


def test_a_long_document_comes_whole_among_other_messages(pair):
    first, second = pair
    long = {"models": ["x" * 1000] * 1000}
    first.send_text(long)
    first.send(np.array([Kind.RUN, 5], np.int64))
    seen = []
    while len(seen) < 2:
        seen += list(second.receive())
        first.flush()
    assert seen[0] == (Kind.TEXT, long)
    assert seen[1][0] == Kind.RUN


def test_the_largest_message_fits(pair):
    first, second = pair
    first.send(np.arange(MOST_CELLS, dtype=np.int64) + 2)
    ((kind, cells),) = second.receive()
    assert kind == 2
    assert cells[-1] == MOST_CELLS + 1


def test_the_end_of_the_other_side_is_told(pair):
    first, second = pair
    first.close()
    with pytest.raises(Closed):
        list(second.receive())
    with pytest.raises(Closed):
        second.send(np.array([1], np.int64))
    assert connect.__doc__


def test_nobody_listens_then_somebody_does(tmp_path):
    place = tmp_path / "here.sock"
    assert connect(place) is None
    with listen(place) as listener:
        channel = connect(place)
        assert channel is not None
        other = MessageChannel(listener.accept()[0])
        channel.send_text("hello")
        assert list(other.receive()) == [(Kind.TEXT, "hello")]
        channel.close()
        other.close()
    # What a killed process left behind is no hindrance.
    with listen(place):
        pass
