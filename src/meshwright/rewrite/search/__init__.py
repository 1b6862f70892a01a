"""A cheaper graph among all that rules lead to."""
