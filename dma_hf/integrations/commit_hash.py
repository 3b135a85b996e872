"""The commit of the Hub repository that a model was loaded from."""

from __future__ import annotations

from transformers import PreTrainedConfig


def commit_of(config: PreTrainedConfig) -> str | None:
    """Return the commit, or ``None`` for a local folder."""
    commit: str | None = getattr(config, "_commit_hash", None)  # set only by `from_pretrained`
    return commit
