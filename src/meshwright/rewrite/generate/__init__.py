"""The rule generator: equal terms, candidates, readings, and a basis that derives the other rules."""
