"""Attention of whole prompts on the Triton backend: quantiser, kernels, and the kernel for Hopper."""
