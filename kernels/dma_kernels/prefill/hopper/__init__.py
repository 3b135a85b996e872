"""Prefill kernels for Hopper only, in Gluon, and their host code."""
