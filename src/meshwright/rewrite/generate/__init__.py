"""The rule generator: enumerate terms, find equal ones, generalise and prove the equalities, and choose a basis."""
