"""What Triton kernels share: arithmetic, block formats, scores, queries."""
