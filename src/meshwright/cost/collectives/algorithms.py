"""The traffic of collectives: steps, and bytes through the busiest port for each byte of the full tensor.

The full tensor is the input of an all-reduce, the output of an all-gather, the input of a reduce-scatter, and the
tensors of all ranks of an all-to-all together. n ranks on N nodes, r = n/N of them on each, G groups through each NIC,
L rings or trees over the links of a node at once (1 where each device has one port to a switch):

                    inside a node                        through a NIC                    steps
    all-reduce      ring  2(n-1)/(n·L)                   ring  G·2(n-1)/n                 2(n-1)
                    tree  1 for n = 2, else 2; or 1/L    tree  G·1 for N = 2, else G·2    2(r-1) + 2·log₂ N
    all-gather      (n-1)/(n·L)                          G·(n-1)/n                        n-1
    reduce-scatter  (n-1)/(n·L)                          G·(n-1)/n                        n-1
    all-to-all      (n-1)/n²                             G·r(n-r)/n²                      n-1
    broadcast       1/L                                  G                                n-1
    send            1                                    G                                1

The tree inside a node is a chain: a device between two others sends the sums up and the result down, both through its
one port to a switch. With links between pairs of devices, the two use opposite directions of different links: 1/L. A
ring enters and leaves each node once, whatever r is. In two nodes the two trees of NCCL carry half of the tensor up in
one direction and down in the other; with three or more nodes some node sends to two children and its parent. Spare
machines help as in BytePS: `parameter_server_seconds` is its closed form, with the ring (k = 0) and M/B (k = n) as
limits.

Sources: Patarasu and Yuan, JPDC 69 (2009); Sanders, Speck, Träff, Parallel Computing 35 (2009), two trees; NCCL
src/graph/tuning.cc and trees.cc; Jiang et al., OSDI 2020 (BytePS), 4.1.
"""

from __future__ import annotations

from math import log2
from typing import TYPE_CHECKING, Literal, get_args

import numpy as np

from meshwright.cost.collectives.groups import CollectiveGroup
from meshwright.spec import MeasurementError, suggest

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

CollectiveOp = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send"]
COLLECTIVE_OPS: tuple[CollectiveOp, ...] = get_args(CollectiveOp)
Algorithm = Literal["ring", "tree"]


def check_messages(op: str, num_bytes: ArrayLike) -> None:
    """Raise MeasurementError for an unknown collective, and for sizes that are negative or not numbers."""
    if op not in COLLECTIVE_OPS:
        raise MeasurementError(
            f"{op!r} is not a collective{suggest(op, COLLECTIVE_OPS)}; expected one of {', '.join(COLLECTIVE_OPS)}."
        )
    sizes = np.atleast_1d(np.asarray(num_bytes, np.float64))
    odd = sizes[~(np.isfinite(sizes) & (sizes >= 0))]
    if len(odd):
        raise MeasurementError(
            f"{len(odd)} of {len(sizes)} messages have sizes such as {odd[0]} bytes; expected zero or more. Give the "
            "bytes of the full tensor."
        )


def count_steps(op: CollectiveOp, group: CollectiveGroup, algorithm: Algorithm = "ring") -> float:
    """Return the number of messages that follow one another, per rank."""
    num_ranks = group.num_ranks
    if op == "send":
        return 1.0
    if op == "all_reduce":
        if algorithm == "tree":
            return 2.0 * (group.ranks_per_node - 1.0 + log2(group.num_nodes))
        return 2.0 * (num_ranks - 1)
    return float(num_ranks - 1)


def port_share(
    op: CollectiveOp, group: CollectiveGroup, *, num_lanes: float | None = None, algorithm: Algorithm = "ring"
) -> float:
    """Return the bytes through the busiest port, in one direction, per byte of the full tensor; 0 for one rank.

    The formulas are in the module's table. ``num_lanes``: L, for links between pairs of devices; None for devices with
    one port to a switch each.
    """
    num_ranks, per_node = group.num_ranks, group.ranks_per_node
    if num_ranks == 1:
        return 0.0
    around = (num_ranks - 1) / num_ranks
    if group.num_nodes == 1:
        chain = float(min(num_ranks - 1, 2)) if num_lanes is None else 1.0
        summing = chain if algorithm == "tree" else 2 * around
        lanes = num_lanes or 1.0
        shares = {"all_reduce": summing / lanes, "all_to_all": around / num_ranks}
        shares |= {"broadcast": 1.0 / lanes, "send": 1.0}
        return shares.get(op, around / lanes)
    if op == "all_reduce" and algorithm == "tree":
        return group.num_sharing * (1.0 if group.num_nodes == 2 else 2.0)
    shares = {
        "all_reduce": 2 * around,
        "all_to_all": per_node * (num_ranks - per_node) / num_ranks**2,
        "broadcast": 1.0,
        "send": 1.0,
    }
    return group.num_sharing * shares.get(op, around)


def ring_seconds(num_ranks: int, num_bytes: float, latency_s: float, bandwidth_bytes_per_s: float) -> float:
    """Return the seconds of a ring all-reduce over links of one latency and bandwidth; 0 for a single rank."""
    group = CollectiveGroup(num_ranks=num_ranks)
    share = port_share("all_reduce", group)
    return count_steps("all_reduce", group) * latency_s + share * num_bytes / bandwidth_bytes_per_s


def parameter_server_seconds(
    num_machines: int, num_spare: int, num_bytes: float, bandwidth_bytes_per_s: float
) -> float:
    """Return the seconds to reduce ``num_bytes`` of n machines with k spare ones, by BytePS.

    They are 2n(n-1)M / ((n² + kn - 2k)·B). Raises MeasurementError for fewer than two machines, for more spare machines
    than machines (more do not help), for negative bytes and for a bandwidth that is not positive.
    """
    check_messages("all_reduce", num_bytes)
    if not bandwidth_bytes_per_s > 0:
        raise MeasurementError(f"A bandwidth of {bandwidth_bytes_per_s} bytes/s; expected a positive one.")
    if num_machines < 2 or not 0 <= num_spare <= num_machines:
        raise MeasurementError(
            f"{num_machines} machines and {num_spare} spare ones; expected at least two, and 0 to {num_machines} spare."
        )
    shared = num_machines**2 + num_spare * num_machines - 2 * num_spare
    return 2 * num_machines * (num_machines - 1) * num_bytes / (shared * bandwidth_bytes_per_s)
