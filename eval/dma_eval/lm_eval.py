"""``python -m dma_eval.lm_eval``: lm-eval's own command line, with the model ``dma-hf`` among its models."""

from __future__ import annotations

from lm_eval.__main__ import cli_evaluate

from . import harness  # noqa: F401 (registers the model)

if __name__ == "__main__":
    cli_evaluate()
