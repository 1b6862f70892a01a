"""FlexFlow: Markov chains over the SOAP space, on a simulator that follows changes (Jia et al. 2019)."""
