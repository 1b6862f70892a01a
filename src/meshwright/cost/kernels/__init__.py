"""How long a GPU kernel takes: products and attention, on devices that were measured, partly measured or never."""
