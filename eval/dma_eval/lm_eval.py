"""``python -m dma_eval.lm_eval``: lm-eval's own command line, with the model ``dma-hf`` among its models."""

from __future__ import annotations

import sys

from lm_eval.__main__ import cli_evaluate

from . import console, harness  # noqa: F401 (harness registers the model)
from .errors import UserError

if __name__ == "__main__":
    try:
        cli_evaluate()
    except UserError as error:
        console.print_error(str(error))
        sys.exit(console.USER_ERROR)
