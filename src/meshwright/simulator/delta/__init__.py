"""Delta simulation: after a change only what it moves is simulated again, bit for bit as all would be.

    durations     DeltaSimulation: durations of a network change; with links that are shared, too
    streams       DeltaStreams: instructions are put in, taken out, moved, rewired
    placement     DeltaPlacement: a stage of a placement moves to another rank

They share `graph`, the instructions in one order, and `carry`, which follows a change along it. `build` makes the graph
of a network, `times` its order by time; `rewire` changes rows of it, which `check` has looked at, and `placed_rows`
makes these of a placement.
"""

from meshwright.simulator.delta.durations import DeltaSimulation
from meshwright.simulator.delta.placement import DeltaPlacement
from meshwright.simulator.delta.streams import DeltaStreams

__all__ = ["DeltaPlacement", "DeltaSimulation", "DeltaStreams"]
