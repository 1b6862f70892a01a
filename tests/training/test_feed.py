"""Data sets: the same order for any number of ranks, bounded work ahead, failures and ends; and training on them."""

import itertools
import threading
import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from meshwright.spec import RunError
from meshwright.training import Feed
from meshwright.training.feed import MicrobatchQueue, load_to, unpack
from tests.rank_results import read_results


class Numbers:
    """Sample k is k; counts how many are read at a time."""

    def __init__(self, count, seconds=0.0, bad=None):
        self.count, self.seconds, self.bad = count, seconds, bad
        self.read = []

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        if index == self.bad:
            raise ValueError(f"sample {index} is torn")
        time.sleep(self.seconds)
        self.read.append(index)
        return torch.tensor(index), torch.tensor(-index)


class Stream(torch.utils.data.IterableDataset):
    """The same as a stream."""

    def __init__(self, count, bad=None):
        self.count, self.bad = count, bad

    def __iter__(self):
        for index in range(self.count):
            if index == self.bad:
                raise ValueError(f"sample {index} is torn")
            yield torch.tensor(index), torch.tensor(-index)


def make(feed):
    return lambda samples: load_to(unpack(feed.collate(samples)), torch.device("cpu"))


def flow(feed, global_batch, size, own=lambda _: True):
    """(batch, microbatch, samples) that a rank gets, one after the other."""
    batches = feed.batches(global_batch, size, own)
    with MicrobatchQueue(batches, make(feed), producers=feed.producers, depth=feed.depth) as queue:
        for index in itertools.count():
            count = queue.next_batch()
            if count is None:
                return
            for m in filter(own, range(count)):
                inputs, targets = queue.take(index, m).tensors
                assert torch.equal(inputs, -targets)
                yield index, m, inputs.tolist()
            queue.forget(index)


def read(*args, **options):
    """By batch and microbatch the samples that a rank gets."""
    return {(index, m): samples for index, m, samples in flow(*args, **options)}


@given(
    st.integers(0, 40),
    st.integers(1, 4),
    st.integers(1, 4),
    st.integers(1, 3),
    st.sampled_from([(1, 1), (2, 1), (2, 3), (3, 2)]),
    st.booleans(),
    st.booleans(),
)
def test_ranks_together_read_what_one_reads(count, size, num_microbatches, ranks, producing, shuffle, stream):
    producers, depth = producing
    dataset = Stream(count) if stream else Numbers(count)
    feed = Feed(dataset=dataset, shuffle=shuffle and not stream, epochs=2, producers=producers, depth=depth, seed=3)
    if count < size * num_microbatches:
        with pytest.raises(RunError, match="no step can be trained"):
            read(feed, size * num_microbatches, size)
        return
    whole = read(feed, size * num_microbatches, size)
    parts = {}
    for rank in range(ranks):
        parts |= read(feed, size * num_microbatches, size, own=lambda m, rank=rank: m % ranks == rank)
    assert parts == whole
    used = count // (size * num_microbatches) * size * num_microbatches
    orders = [list(range(count)) if stream else list(feed.order(epoch)) for epoch in range(2)]
    assert list(itertools.chain(*whole.values())) == [sample for order in orders for sample in order[:used]]


def test_what_can_be_read_once_has_one_epoch():
    with pytest.raises(RunError, match="can be read once, but 2 epochs were given"):
        Feed(dataset=iter(range(8)), epochs=2)
    assert Feed(dataset=iter(range(8))).is_iterable


def test_every_epoch_has_an_order_of_its_own():
    feed = Feed(dataset=Numbers(50), shuffle=True, seed=1)
    orders = [list(feed.order(epoch)) for epoch in range(3)]
    assert all(sorted(order) == list(range(50)) for order in orders)
    assert len({tuple(order) for order in orders}) == 3
    assert list(Feed(dataset=Numbers(50), shuffle=True, seed=1).order(0)) == orders[0]
    assert list(Feed(dataset=Numbers(50), shuffle=True, seed=2).order(0)) != orders[0]


@pytest.mark.parametrize("make_dataset", [Numbers, Stream])
def test_a_rest_is_left_out_or_makes_a_shorter_step(make_dataset):
    whole = read(Feed(dataset=make_dataset(14)), 8, 2)
    assert len(whole) == 4
    shorter = read(Feed(dataset=make_dataset(14), drop_last=False), 8, 2)
    assert shorter == whole | {(1, m): [8 + 2 * m, 9 + 2 * m] for m in range(3)}
    with pytest.raises(
        RunError, match="ends with a batch of 5 samples, which are 2 microbatches of 2 and 1 samples more"
    ):
        read(Feed(dataset=make_dataset(13), drop_last=False), 8, 2)


@pytest.mark.parametrize(("producers", "depth"), [(1, 1), (3, 2), (2, 5), (1, 11)])
def test_as_many_are_made_ahead_as_the_depth_says_and_no_more(producers, depth):
    dataset = Numbers(64)
    feed = Feed(dataset=dataset, producers=producers, depth=depth)
    with MicrobatchQueue(feed.batches(8, 2, lambda _: True), make(feed), producers=producers, depth=depth) as queue:
        for index, m in itertools.product(range(4), range(4)):
            if m == 0:
                assert queue.next_batch() == 4
            deadline = time.monotonic() + 5
            # Producers come to a stop with as many as are allowed, and go no further.
            while queue.num_ahead < min(depth, 32 - 4 * index - m) and time.monotonic() < deadline:
                time.sleep(0.001)
            time.sleep(0.005)
            assert queue.num_ahead == min(depth, 32 - 4 * index - m)
            assert len(dataset.read) <= 2 * (4 * index + m + depth)
            queue.take(index, m)


def test_no_more_is_begun_than_there_is_room_for_where_all_have_waited_for_the_same_batch():
    feed = Feed(dataset=Numbers(8), producers=3, depth=1)

    def later():
        time.sleep(0.3)
        yield from feed.batches(8, 2, lambda _: True)

    with MicrobatchQueue(later(), make(feed), producers=3, depth=1) as queue:
        assert queue.next_batch() == 4
        queue.take(0, 0)
        time.sleep(0.1)
        assert queue.num_ahead <= 1


def test_several_producers_work_at_a_time():
    both = threading.Barrier(2, timeout=20)

    class Meeting(Numbers):
        def __getitem__(self, index):
            both.wait()
            return super().__getitem__(index)

    assert len(read(Feed(dataset=Meeting(4), producers=2, depth=2), 2, 1)) == 4


@pytest.mark.parametrize("producers", [1, 3])
@pytest.mark.parametrize("make_dataset", [Numbers, Stream])
def test_what_a_data_set_raises_is_told_where_it_is_awaited(make_dataset, producers):
    feed = Feed(dataset=make_dataset(32, bad=13), producers=producers, depth=3)
    taken = []
    with pytest.raises(RunError, match=r"The data set failed at .*: ValueError: sample 13 is torn") as caught:
        taken.extend(samples for _, _, samples in flow(feed, 8, 2))
    assert isinstance(caught.value.__cause__, ValueError)
    # Whole batches are read of a stream: the first one is whole.
    assert taken[:4] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert all(13 not in samples for samples in taken)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("meshwright-producer")]


def test_microbatches_may_be_taken_in_another_order_than_they_come():
    """An own schedule takes first what others take last: depth does not keep it waiting."""
    feed = Feed(dataset=Numbers(32), depth=2)
    with MicrobatchQueue(feed.batches(16, 2, lambda _: True), make(feed), producers=1, depth=2) as queue:
        queue.next_batch()
        for m in (0, 4, 1, 7, 2, 3, 6, 5):
            assert queue.take(0, m).tensors[0].tolist() == [2 * m, 2 * m + 1]


def test_producers_end_when_nobody_takes():
    feed = Feed(dataset=Numbers(64), producers=3, depth=2)
    queue = MicrobatchQueue(feed.batches(8, 2, lambda _: True), make(feed), producers=3, depth=2)
    queue.next_batch()
    queue.take(0, 0)
    queue.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("meshwright-producer")]
    with pytest.raises(RunError, match="closed before microbatch 3 of batch 0 was made"):
        queue.take(0, 3)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"dataset": 3}, "of type int was given; expected a data set with `len`"),
        ({"dataset": Stream(3), "shuffle": True}, "Stream is an iterable data set"),
        ({"dataset": Numbers(3), "depth": 0}, "depth = 0 was given; expected 1 or more"),
    ],
)
def test_what_is_no_feed_is_refused(options, words):
    with pytest.raises(RunError, match=words):
        Feed(**options)


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return read_results("tests.training.feed_worker", 2, tmp_path_factory.mktemp("feed"))


@pytest.mark.long
@pytest.mark.distributed
@pytest.mark.parametrize("case", ["pipeline", "replicas", "stream"])
def test_losses_are_those_of_one_process(results, case):
    assert len(results[case]["losses"]) == 8
    assert results[case]["losses"] == pytest.approx(results["wanted"], rel=1e-9)


@pytest.mark.long
@pytest.mark.distributed
def test_a_rank_makes_what_its_stages_read(results):
    assert results["pipeline"]["read"] == [56, 56]  # inputs for the first stage, targets for the last one
    assert results["replicas"]["read"] == [28, 28]
    assert results["stream"]["read"] == [56, 56]


@pytest.mark.long
@pytest.mark.distributed
def test_loads_are_in_the_timeline(results):
    starts, ends = results["pipeline"]["loads"]
    assert len(starts) == 2 * 4 * 2, "both ranks make four microbatches in each of two steps"
    assert all(0 <= start < end for start, end in zip(starts, ends, strict=True))
    assert results["pipeline"]["slowest"] > 0.9 * 0.01 * 2
