"""Attention of whole prompts on the Triton backend: quantizer, kernels, and the kernel for Hopper."""
