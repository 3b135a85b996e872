"""The Hub without a network: noticed at once, before slow imports."""

from __future__ import annotations

import os
import ssl
import urllib.request
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError

from dma_eval import console
from dma_eval.errors import UserError, one_line
from dma_eval.names import parse_source, text_file

HUB = "https://huggingface.co"
OFFLINE = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
"""Variables by which all libraries use the cache only. They are read at import."""
SECONDS = 5.0  # within which the Hub must answer


def check_inputs(model: str | None, *texts: str | None) -> None:
    """Check that a model and texts exist. Those of the Hub need a network, or its cache.

    If the Hub cannot be reached, only its cache is used. The libraries would retry for a minute.
    """
    path = None if model is None else parse_source(model).path
    is_on_hub = path is not None and not Path(path).is_dir()
    has_remote_text = None in [text_file(each) for each in texts if each is not None]
    if not is_on_hub and not has_remote_text:
        return
    variable = next((name for name in OFFLINE if os.environ.get(name, "").upper() in ("1", "ON", "YES", "TRUE")), None)
    reason = f"{variable} is set" if variable else _unreachable(os.environ.get("HF_ENDPOINT") or HUB)
    if reason is None:
        return
    if variable is None:
        os.environ[OFFLINE[0]] = "1"
    if path is not None and is_on_hub and not _is_cached(path):
        raise UserError(
            f"--model: cannot load {path!r}: no such folder here, the Hub's cache has no such model, and {reason}"
        )
    if variable is None:
        console.print_warning(f"{reason}; the Hub's cache is used")


def _unreachable(endpoint: str) -> str | None:
    """Return why the Hub does not answer; ``None`` if it does."""
    try:
        with urllib.request.urlopen(urllib.request.Request(endpoint, method="HEAD"), timeout=SECONDS):
            return None
    except (HTTPError, HTTPException):  # an answer
        return None
    except (OSError, ValueError) as error:  # the latter for an address that is none
        cause: Any = error.reason if isinstance(error, URLError) else error
        if isinstance(cause, ssl.SSLError):  # the libraries may have other certificates
            return None
        return f"{endpoint} cannot be reached ({getattr(cause, 'strerror', None) or one_line(cause)})"


def _is_cached(name: str) -> bool:
    from huggingface_hub import constants  # which reads the variable

    return (Path(constants.HF_HUB_CACHE) / f"models--{name.replace('/', '--')}" / "snapshots").is_dir()
