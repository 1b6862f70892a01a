"""Equivalent, cheaper graphs."""
