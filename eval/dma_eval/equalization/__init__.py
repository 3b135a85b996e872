"""Balance the ranges of keys and queries in a model's weights, without changing what the model computes."""

from .balance import equalize, measure_ranges

__all__ = ["equalize", "measure_ranges"]
