"""Sections of a report as tables, pages, plots and model cards. Nothing here needs PyTorch."""
