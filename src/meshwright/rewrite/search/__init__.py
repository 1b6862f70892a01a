"""Search for a cheaper graph among all that rules lead to."""
