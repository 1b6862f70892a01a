"""The generator of rules: terms that are equal, candidates, readings, and a basis that derives the rest."""
