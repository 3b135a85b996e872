"""Which commit of a Hub repository a model was loaded from."""

from __future__ import annotations

from transformers import PreTrainedConfig


def commit_of(config: PreTrainedConfig) -> str | None:
    """Return the commit; ``None`` for a local folder."""
    commit: str | None = getattr(config, "_commit_hash", None)  # set by `from_pretrained` alone
    return commit
