"""When buckets are full and when their sums are issued: the gradient reduction of the program.

A sum may be issued inside the backward that fills its bucket, as soon as the bucket is ready: its mark is raised. Sums
of a rank are issued in the order of their stream, so that all ranks of a group sum the same bucket at a time.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager

from meshwright.runtime.agreed import AgreedNumber
from meshwright.runtime.gradient_reduction import Exchange
from meshwright.runtime.optimizer_steps import ShardedBucket, ShardedBuckets
from meshwright.runtime.rank_program import IssuedInstruction, RankProgram, bucket_of
from meshwright.runtime.transport import Transport, Work
from meshwright.spec import Backward, BackwardWeight, OptimizerStep


class BucketSums:
    """Fills the buckets of an exchange and sums them; ``issue(item)`` is called for sums that are issued at a mark.

    Other sums are those of numbers on which all ranks agree, by their indices.
    """

    def __init__(
        self,
        exchange: Exchange | None,
        transport: Transport,
        issue: Callable[[IssuedInstruction], None],
        agreements: Mapping[int, AgreedNumber],
    ) -> None:
        self._exchange, self._transport, self._issue, self._agreements = exchange, transport, issue, agreements
        # Sums that may be issued inside the running computation, and the parts that are ready but not yet issued.
        self._marked: deque[IssuedInstruction] = deque()
        self._ready: set[int] = set()

    def expect(self, marked: Collection[IssuedInstruction]) -> None:
        """Allow these sums to be issued from now on."""
        if marked:
            self._marked.extend(marked)
            self._let_go()

    def sum_up(self, part: int, group: tuple[int, ...], behind: Sequence[Work] | None = None) -> Sequence[Work]:
        """Sum a part of a bucket over a group, after other works."""
        if part in self._agreements:
            return self._agreements[part].begin(group)
        assert self._exchange is not None, "a rank that sums has buckets"
        self._ready.discard(part)
        values = self._exchange.to_sum(part)
        if behind is not None:
            return self._transport.sum_behind(behind, values, group)
        return self._transport.sum_over(values, group) if len(values) else []

    def scatter(self, bucket: int, group: tuple[int, ...]) -> Sequence[Work]:
        """Reduce-scatter a bucket over a group."""
        return self._transport.share(self._sharded(bucket).scatter, group)

    def gather(self, bucket: int, group: tuple[int, ...]) -> Sequence[Work]:
        """All-gather the parameters of a bucket; each rank of the group has updated its part."""
        self._ready.discard(bucket)
        return self._transport.share(self._sharded(bucket).gather, group)

    def merge(self) -> None:
        """Merge the oldest sums into the weights."""
        assert self._exchange is not None, "a rank that merges has buckets"
        self._exchange.merge()

    def restart(self) -> None:
        """Reset after everything has ended."""
        if self._exchange is not None:
            self._exchange.restart()

    @contextmanager
    def filling(self, buckets: Collection[int]) -> Iterator[None]:
        """The block is the last backward of some buckets: their sums are issued as soon as they are full."""
        if buckets and self._exchange is not None:
            self._exchange.begin(buckets, self._raise_mark)
        yield
        if buckets and self._exchange is not None:
            self._exchange.finish()

    def last_backwards(self, program: RankProgram) -> dict[int, tuple[int, ...]]:
        """Return buckets that are final after a computation, by its index.

        It is the last one before an update that adds to them.
        """
        stages_of: Mapping[int, Collection[int]] = self._exchange.stages if self._exchange is not None else {}
        last: dict[int, int] = {}
        updated: set[int] = set()
        finals: defaultdict[int, list[int]] = defaultdict(list)
        for item in program.computations:
            stage = item.instruction.stage
            if isinstance(item.instruction, OptimizerStep):
                updated.add(stage)
            elif isinstance(item.instruction, Backward | BackwardWeight):
                for bucket in (bucket for bucket, stages in stages_of.items() if stage in stages):
                    if bucket in last and stage in updated:
                        finals[last[bucket]].append(bucket)
                    last[bucket] = item.index
                updated.discard(stage)
        for bucket, index in last.items():
            finals[index].append(bucket)
        return {index: tuple(buckets) for index, buckets in finals.items()}

    def _sharded(self, bucket: int) -> ShardedBucket:
        assert isinstance(self._exchange, ShardedBuckets), "a rank that scatters has parts of buckets"
        return self._exchange.sharded[bucket]

    def _raise_mark(self, part: int) -> None:
        self._ready.add(part)
        self._let_go()

    def _let_go(self) -> None:
        while self._marked and bucket_of(self._marked[0].instruction) in self._ready:
            self._issue(self._marked.popleft())
