"""The SOAP problem and a strategy in it, as plain arrays that compiled loops read.

A **layer** (FlexFlow's operator) has SOAP dims m = 0 .. M - 1, each a sample, attribute or parameter dim. A
**candidate** of a layer is one degree per dim; the product of them is its number of parts, numbered with the last dim
fastest. A **configuration** is a candidate and a device for every part (the operator dim). A **strategy** has one for
every layer.

An edge hands a tensor from one layer to another. Of each of its dims it is known which SOAP dim of the producer and
which of the consumer splits it (-1: none). Part x of c of a consumer reads, of a dim of length n,

    [max(0, x l / c * stride - before),  min(n, ((x + 1) l / c - 1) * stride - before + window))

where l is the length of the consumer's own dim: whole shares where nothing slides (stride 1, before 0, window 1,
l = n), and the edges of the neighbours too under a convolution. Bytes of two parts are those in which what one makes
and what the other reads intersect (Jia et al. 2019, section 5.1).

Tasks are numbered so that tables need no search; with P parts at most (a power of two), n layers and E edges:

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

    ``candidates`` (n + 1,): those of layer o are rows ``candidates[o]:candidates[o + 1]`` of ``degrees`` (K, M) with
    ``parts`` (K,) that stand at ``place`` (K, P, M) along each dim; ``pass_ps`` (K, kinds, 2) of one part,
    ``update_ps`` (K, kinds) of its optimizer step and ``held_bytes`` (K,) of one part. ``trains`` (n,) says which
    layers have a backward.

    Edges: ``source``, ``target``, ``element_bytes`` and ``has_gradient`` (E,); ``made_by`` and ``read_by`` (E, R) are
    SOAP dims of producer and consumer, ``length`` (E, R), ``window`` (E, R, 4) is l, stride, before, window.
    ``in_edges[in_offsets[o]:in_offsets[o + 1]]`` are those that layer o reads, ``out_edges`` those that it makes.

    Weights: ``weight_offsets`` (n + 1,) of each layer's, ``weight_layer`` and ``weight_bytes`` (W,) of the gradients of
    a whole one, ``splits_weight`` (W, M).

    Devices: ``kind`` (D,), ``limit_bytes`` (D,); ``latency_ps`` and ``byte_ps`` (D, D) of a message, which holds the
    links ``hops`` (D, D, H), -1 for none. ``shift`` is the logarithm of P. With ``barrier``, gradients are summed after
    all passes, one sum of a link after the other; without, each as soon as its parts are made.
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
    """A strategy and its task graph; `configure` keeps all of it in step.

    ``candidate`` (n,), ``device`` (n, P), ``num_shards`` (W,), ``memory_bytes`` and ``update_ps`` (D,).

    ``task`` (T, 7) has the columns below. ``pool`` has lists: of what waits for a task from ``task[t, AFTER]`` on and
    of what it waits for from ``task[t, BEFORE]`` on, each as sections of ``1 + P`` places, a count and that
    number of tasks; and of what it holds from ``task[t, HELD]`` on, a count and that number of devices, or links, which
    come behind the devices. A pass has a section for its other pass and syncs, and one per edge of its layer,
    ``in_section`` and ``out_section`` (E,); a change of one edge leaves the others alone. ``share`` is room to work in.
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


# Columns of `Strategy.task`: what it takes; when it is ready and ends; how many it waits for still; and its lists.
# The time is 0 of a transfer within a device, and of the sync of what one device has alone.
TIME, READY, END, NEED, AFTER, BEFORE, HELD = range(7)


class Schedule(NamedTuple):
    """In which order the tasks of a strategy run: the first ``num_run`` (1,) entries of ``order`` (T,).

    The rest is room to work in: ``free_ps`` by device and link, a heap, and (2 n,) zeros.
    """

    order: Integers
    num_run: Integers
    free_ps: Integers
    heap_ps: Integers
    heap: Integers
    no_tail_ps: Integers


def num_tasks(soap: Soap) -> int:
    """Return the largest possible number of tasks."""
    width = 1 << soap.shift
    num_layers, num_edges = len(soap.trains), len(soap.source)
    return width * (2 * num_layers + 2 * num_edges * width + len(soap.weight_layer))


def empty_strategy(soap: Soap) -> Strategy:
    """Return a strategy that has no configuration yet (candidate -1)."""
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
    """Room for the schedule of any strategy."""
    count = num_tasks(soap)
    return Schedule(
        order=np.zeros(count, np.int64),
        num_run=np.zeros(1, np.int64),
        free_ps=np.zeros(len(soap.kind) + soap.num_links, np.int64),
        heap_ps=np.zeros(count, np.int64),
        heap=np.zeros(count, np.int64),
        no_tail_ps=np.zeros(2 * len(soap.trains), np.int64),
    )
