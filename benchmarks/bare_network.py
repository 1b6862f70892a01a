"""Networks for the engine alone: columns that a benchmark does not give are those of nothing."""

from __future__ import annotations

from typing import Any

import numpy as np

from meshwright.simulator.network import Network


def bare_network(**columns: Any) -> Network:
    """A network of these columns, and without marks, links, collectives and joins unless they are among them."""
    none = np.zeros(0, np.int32)
    nothing: dict[str, Any] = {
        "mark_instruction": none,
        "mark_shift_ps": np.zeros(0, np.int64),
        "num_private": 0,
        "route_offsets": np.zeros(1, np.int64),
        "route_links": none,
        "collective_route": none,
        "collective_size": none,
        "collective_owner": none,
        "join_instruction": none,
        "join_need": none,
    }
    if "resource" not in columns:
        # Not before: of networks that hardly fit into memory it is given.
        nothing["resource"] = np.full(len(columns["cost_class"]), -1, np.int32)
    return Network(**{**nothing, **columns})
