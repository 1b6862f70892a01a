"""FlexFlow: Markov chains over the SOAP space (Jia et al. 2019).

A strategy splits every layer along sample, operator, attribute and parameter dims, and gives each part a device. The
modules derive, from left to right:

graph     → layers, SOAP dims, possible degrees       `layers`
          → seconds and bytes of every part, arrays   `soap_spaces`, `soap_arrays`
strategy  → task graph                                `configure`
          → graphs of the parts, placement            `lowering`, `placing`
          → step time                                 `full`
search    → proposals, Metropolis' rule               `chain`, `temperature`, `soap_chains`
          → best strategy, table, document            `soap_result`
`plan_chain` runs the same chain over plans: the search method `flexflow`.
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
