"""How long the kernels take that torch launches on a CUDA device, beside products: fitted to ops measured alone."""
