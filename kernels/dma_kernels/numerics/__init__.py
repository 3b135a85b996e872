"""Formats, quantization, transforms, the recipe and where its tiles lie: torch alone."""
