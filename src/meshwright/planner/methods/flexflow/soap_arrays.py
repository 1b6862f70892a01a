"""The SOAP problem (`Soap`) and a strategy for it (`Strategy`), as plain arrays for compiled loops.

A **layer** (FlexFlow's operator) has SOAP dims m = 0 .. M - 1, each a sample, attribute or parameter dim. A
**candidate** of a layer is one degree per dim; the product of them is its number of parts, numbered with the last dim
fastest. A **configuration** is a candidate and a device for every part (the operator dim). A **strategy** has one for
every layer.

An edge is a tensor that one layer makes and another reads. For each of its dims, the arrays give the SOAP dim of the
producer and that of the consumer which split it (-1: none). Of a dim of length n, part x of c parts of a consumer reads

    [max(0, x l / c * stride - before),  min(n, ((x + 1) l / c - 1) * stride - before + window))

where l is the length of the consumer's own dim. Without a sliding window (stride 1, before 0, window 1, l = n), a part
reads its share; under a convolution, also the borders of its neighbours. The bytes between two parts are the
intersection of what one makes and what the other reads (Jia et al. 2019, section 5.1).

The number of a task follows from its layer, edge or weight, with P the largest number of parts (a power of two), n
layers and E edges:

    passes     (d n + o) P + i                  d = 0 forward, 1 backward, of part i of layer o
    transfers  2 n P + ((d E + e) P + j) P + i  from part j of the producer of e to part i of its consumer, or back
    syncs      2 n P + 2 E P P + w P + s        the all-reduce of shard s of weight w

Times are int64 picoseconds, and every task takes at least one.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Integers = NDArray[np.int64]
Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]
Lists = NDArray[np.int32]

FORWARD, BACKWARD = 0, 1


class Soap(NamedTuple):
    """The problem: n layers, K candidates in all, M SOAP dims, E edges of R dims, W weights, D devices, L links.

    Candidates: those of layer o are rows ``candidates[o]:candidates[o + 1]`` of ``degrees`` (K, M), with ``candidates``
    of shape (n + 1,). ``parts`` (K,): numbers of parts; ``place`` (K, P, M): the position of each part along each dim.
    Of one part: ``pass_ps`` (K, kinds, 2), forward and backward; ``update_ps`` (K, kinds), optimizer step;
    ``held_bytes`` (K,). ``trains`` (n,): whether a layer has a backward.

    Edges: ``source`` and ``target`` (E,), layers; ``element_bytes`` and ``has_gradient`` (E,); ``made_by`` and
    ``read_by`` (E, R), SOAP dims of producer and consumer; ``length`` (E, R); ``window`` (E, R, 4): l, stride, before,
    window. ``in_edges[in_offsets[o]:in_offsets[o + 1]]`` are the edges that layer o reads; ``out_edges`` and
    ``out_offsets`` give those that it makes.

    Weights: layer o has weights ``weight_offsets[o]`` to ``weight_offsets[o + 1] - 1``; ``weight_layer`` (W,);
    ``weight_bytes`` (W,), of the gradient of the unsplit weight; ``splits_weight`` (W, M), whether a SOAP dim splits
    it.

    Devices: ``kind`` and ``limit_bytes`` (D,); ``latency_ps`` and ``byte_ps`` (D, D): latency and time per byte of a
    message; ``hops`` (D, D, H): the links that it occupies, -1 for none. ``shift`` is log2 of P. With ``barrier``,
    gradients are reduced after all passes; without, as soon as all parts have made them. ``penalty_ps_per_byte`` is the
    penalty for memory beyond the limit.
    """

    candidates: Integers
    degrees: Integers
    parts: Integers
    place: Integers
    pass_ps: Integers
    update_ps: Integers
    held_bytes: Integers
    trains: Flags
    source: Integers
    target: Integers
    element_bytes: Integers
    has_gradient: Flags
    made_by: Integers
    read_by: Integers
    length: Integers
    window: Integers
    in_offsets: Integers
    in_edges: Integers
    out_offsets: Integers
    out_edges: Integers
    weight_offsets: Integers
    weight_layer: Integers
    weight_bytes: Integers
    splits_weight: Flags
    kind: Integers
    limit_bytes: Integers
    latency_ps: Integers
    byte_ps: Floats
    hops: Integers
    num_links: int
    shift: int
    barrier: bool
    penalty_ps_per_byte: int


class Strategy(NamedTuple):
    """A strategy and its task graph, which `configure` updates together.

    ``candidate`` (n,) and ``device`` (n, P): the configuration of each layer. ``num_shards`` (W,): shards of each
    weight. ``memory_bytes`` and ``update_ps`` (D,): memory and optimizer time of each device.

    ``task`` (T, 7) has the columns `TIME` to `HELD`. Three of them are positions in ``pool`` where a list begins: the
    tasks that wait for task t (`AFTER`), the tasks that it waits for (`BEFORE`), and what it occupies (`HELD`). The
    first two lists consist of sections of ``1 + P`` entries: a count, and that number of tasks. The list at `HELD` is a
    count, and that number of devices, or of links (numbered after the devices). A pass has one section for its other
    pass and its syncs, and one per edge of its layer, at ``in_section`` and ``out_section`` (E,); so a change of one
    edge leaves the other sections alone. ``share`` is scratch space.
    """

    candidate: Integers
    device: Integers
    num_shards: Integers
    memory_bytes: Integers
    update_ps: Integers
    task: Integers
    pool: Lists
    in_section: Integers
    out_section: Integers
    share: Integers


# Columns of `Strategy.task`: its duration, when it is ready and when it ends (picoseconds); the number of tasks that it
# still waits for; and the positions of its lists. Transfers within a device, and syncs on one device, take 0.
TIME, READY, END, NEED, AFTER, BEFORE, HELD = range(7)


class Schedule(NamedTuple):
    """The order in which the tasks of a strategy ran: the first ``num_run`` (1,) entries of ``order`` (T,).

    The other arrays are scratch space: ``free_ps``, when each device and link is free; a heap; 2 n zeros.
    """

    order: Integers
    num_run: Integers
    free_ps: Integers
    heap_ps: Integers
    heap: Integers
    no_tail_ps: Integers


def num_tasks(soap: Soap) -> int:
    """Return T, the largest number of tasks that a strategy can have."""
    width = 1 << soap.shift
    num_layers, num_edges = len(soap.trains), len(soap.source)
    return width * (2 * num_layers + 2 * num_edges * width + len(soap.weight_layer))


def empty_strategy(soap: Soap) -> Strategy:
    """Return a strategy with arrays of the right sizes in which no layer has a configuration (candidate -1)."""
    width = 1 << soap.shift
    num_layers, num_weights = len(soap.trains), len(soap.weight_layer)
    task, pool = _empty_tasks(soap)
    return Strategy(
        candidate=np.full(num_layers, -1, np.int64),
        device=np.zeros((num_layers, width), np.int64),
        num_shards=np.zeros(num_weights, np.int64),
        memory_bytes=np.zeros(len(soap.kind), np.int64),
        update_ps=np.zeros(len(soap.kind), np.int64),
        task=task,
        pool=pool,
        in_section=1 + np.argsort(soap.in_edges) - soap.in_offsets[soap.target],
        out_section=1 + np.argsort(soap.out_edges) - soap.out_offsets[soap.source],
        share=np.zeros((soap.length.shape[1], width, width), np.int64),
    )


def _empty_tasks(soap: Soap) -> tuple[Integers, Lists]:
    """Tasks, each with room for its lists, and sections that are empty."""
    width, num_devices, num_hops = 1 << soap.shift, len(soap.kind), soap.hops.shape[2]
    num_transfers, num_syncs = 2 * len(soap.source) * width**2, len(soap.weight_layer) * width
    reads, makes = (1 + np.repeat(np.diff(offsets), width) for offsets in (soap.in_offsets, soap.out_offsets))
    transfers, syncs = np.ones(num_transfers, np.int64), np.ones(num_syncs, np.int64)
    task, end = np.zeros((num_tasks(soap), 7), np.int64), 0
    places = []
    for column, passes in ((AFTER, (makes, reads)), (BEFORE, (reads, makes))):
        sections = np.concatenate([*passes, transfers, 0 * syncs if column == AFTER else syncs])
        sizes = 1 + sections * (1 + width)
        task[:, column] = end + np.cumsum(sizes) - sizes
        places.append((task[:, column], sections))
        end += int(sizes.sum())
    sizes = 1 + np.repeat([1, num_hops, num_devices * num_hops], [2 * len(reads), num_transfers, num_syncs])
    task[:, HELD] = end + np.cumsum(sizes) - sizes
    pool = np.zeros(end + int(sizes.sum()), np.int32)
    for at, sections in places:
        pool[at] = sections
    return task, pool


def empty_schedule(soap: Soap) -> Schedule:
    """Return a schedule with arrays of the right sizes for any strategy."""
    count = num_tasks(soap)
    return Schedule(
        order=np.zeros(count, np.int64),
        num_run=np.zeros(1, np.int64),
        free_ps=np.zeros(len(soap.kind) + soap.num_links, np.int64),
        heap_ps=np.zeros(count, np.int64),
        heap=np.zeros(count, np.int64),
        no_tail_ps=np.zeros(2 * len(soap.trains), np.int64),
    )
