"""FlexFlow: Markov chains over the SOAP space (Jia et al. 2019).

graph     → layers, SOAP dims, legal degrees          `layers`
          → seconds and bytes of every part, arrays   `soap_spaces`, `soap_arrays`
strategy  → task graph                                `configure`
          → parts, placement                          `lowering`, `placing`
          → step time                                 `full`
search    → proposals, Metropolis' rule               `chain`, `temperature`, `soap_chains`
          → strategy, table, document                 `soap_result`
"""

from meshwright.planner.methods.flexflow.placing import place_strategy
from meshwright.planner.methods.flexflow.plan_chain import flexflow
from meshwright.planner.methods.flexflow.soap_chains import search_soap
from meshwright.planner.methods.flexflow.soap_result import SoapResult, read_strategy
from meshwright.planner.methods.flexflow.soap_spaces import SoapSpace, soap_space

__all__ = [
    "SoapResult",
    "SoapSpace",
    "flexflow",
    "place_strategy",
    "read_strategy",
    "search_soap",
    "soap_space",
]
