"""Rewrite graphs into equivalent, cheaper ones: rules, proofs, search, and conversion from and to fx graphs."""
