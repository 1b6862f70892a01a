"""Issue the all-reduces and reduce-scatters of gradient buckets, as the program orders them.

The sum of a bucket may be issued inside the backward that fills it, at its mark: as soon as the bucket is full. A rank
issues its sums in the order of their stream, so that all ranks of a group sum the same bucket at a time.
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
    """Fills the gradient buckets of a rank and sums them over its groups.

    ``exchange`` holds the buckets (None: the rank sums no gradients). ``issue(item)`` is called for each sum that is
    issued inside a backward, when its bucket is full. ``agreements``: the numbers that all ranks sum, by bucket number.
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
        """Allow the sums ``marked`` to be issued from now on, each as soon as its bucket is full."""
        if marked:
            self._marked.extend(marked)
            self._let_go()

    def sum_up(self, part: int, group: tuple[int, ...], behind: Sequence[Work] | None = None) -> Sequence[Work]:
        """All-reduce a part of a bucket (or an agreed number) over a group; return the works.

        ``behind``: works after which the all-reduce starts, without blocking the caller (None: at once).
        """
        if part in self._agreements:
            return self._agreements[part].begin(group)
        assert self._exchange is not None, "a rank that sums has buckets"
        self._ready.discard(part)
        values = self._exchange.to_sum(part)
        if behind is not None:
            return self._transport.sum_behind(behind, values, group)
        return self._transport.sum_over(values, group) if len(values) else []

    def scatter(self, bucket: int, group: tuple[int, ...]) -> Sequence[Work]:
        """Reduce-scatter the gradients of a bucket over a group; return the works."""
        return self._transport.share(self._sharded(bucket).scatter, group)

    def gather(self, bucket: int, group: tuple[int, ...]) -> Sequence[Work]:
        """All-gather the parameters of a bucket after each rank of the group has updated its part; return the works."""
        self._ready.discard(bucket)
        return self._transport.share(self._sharded(bucket).gather, group)

    def merge(self) -> None:
        """Add the oldest summed changes of the other replicas to the weights (`opening.WaveExchange`)."""
        assert self._exchange is not None, "a rank that merges has buckets"
        self._exchange.merge()

    def restart(self) -> None:
        """Reset the buckets, after all instructions have ended."""
        if self._exchange is not None:
            self._exchange.restart()

    @contextmanager
    def filling(self, buckets: Collection[int]) -> Iterator[None]:
        """Run the block as the last backward that fills ``buckets``: each bucket is summed as soon as it is full."""
        if buckets and self._exchange is not None:
            self._exchange.begin(buckets, self._raise_mark)
        yield
        if buckets and self._exchange is not None:
            self._exchange.finish()

    def last_backwards(self, program: RankProgram) -> dict[int, tuple[int, ...]]:
        """Return, by the index of a backward, the buckets for which it is the last backward before an update.

        After that backward the gradients in these buckets are final.
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
