"""Device functions shared by Triton kernels: arithmetic, block formats, scores, queries."""
