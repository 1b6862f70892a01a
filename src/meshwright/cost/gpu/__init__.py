"""Seconds of the kernels that torch launches on a CUDA device, except products, fitted to separately measured ops."""
