"""Search for the cheapest graph among all that rules derive from a given one."""
