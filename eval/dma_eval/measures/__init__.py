"""The measurements: each reads a model under several backends and returns a section of a report."""
