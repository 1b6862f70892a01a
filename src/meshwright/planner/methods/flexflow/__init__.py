"""FlexFlow: Markov chains over the SOAP space, on a simulator that follows changes (Jia et al. 2019).

graph     → layers, SOAP dims, legal degrees       `layers`
→ seconds and bytes of every part        `parts`, `machine`
→ arrays                                 `space`, `assemble`, `arrays`
strategy  → task graph                             `configure`
          → parts, placement                       `lowering`, `placing`
→ step time                              `full`, `delta`
search    → proposals, Metropolis' rule            `chain`, `temperature`, `starts`, `search`
→ strategy, table, document              `result`
"""

from meshwright.planner.methods.flexflow.placing import place_strategy
from meshwright.planner.methods.flexflow.plan_chain import flexflow
from meshwright.planner.methods.flexflow.result import SoapResult, read_strategy
from meshwright.planner.methods.flexflow.search import search_soap
from meshwright.planner.methods.flexflow.space import SoapSpace, soap_space

__all__ = [
    "SoapResult",
    "SoapSpace",
    "flexflow",
    "place_strategy",
    "read_strategy",
    "search_soap",
    "soap_space",
]
