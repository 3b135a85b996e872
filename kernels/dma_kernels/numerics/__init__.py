"""Formats, quantization, transforms, the recipe and its tile geometry, in pure torch."""
