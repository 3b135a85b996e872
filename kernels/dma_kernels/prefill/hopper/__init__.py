"""Prefill kernels that run on Hopper only, written in Gluon, and the code that launches them."""
