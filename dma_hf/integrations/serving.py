"""Transformers' HTTP server (``transformers serve``), which :mod:`dma_hf.serving` builds on.

Its handlers turn requests into prompts, and answers into OpenAI's format. Its streamers decode tokens. Only the server
imports this module, and with it the packages of the extra ``serve``.
"""

from __future__ import annotations

from .internals import check_version, private_imports

check_version("transformers serve")
with private_imports():
    from transformers.cli.serving.chat_completion import ChatCompletionHandler
    from transformers.cli.serving.completion import CompletionHandler
    from transformers.cli.serving.model_manager import ModelManager
    from transformers.cli.serving.response import ResponseHandler
    from transformers.cli.serving.utils import (
        CBStreamer,
        DirectStreamer,
        GenerationState,
        get_response_template,
    )
    from transformers.cli.serving.utils import _GenerationCancelled as GenerationCancelled
    from transformers.generation.continuous_batching.cb_logits_processors import (
        ContinuousBatchingTopKLogitsWarper as BatchTopK,
    )
    from transformers.generation.continuous_batching.cb_logits_processors import (
        ContinuousBatchingTopPLogitsWarper as BatchTopP,
    )
    from transformers.generation.continuous_batching.model_runner import infer_max_single_request_tokens

__all__ = [
    "BatchTopK",
    "BatchTopP",
    "CBStreamer",
    "ChatCompletionHandler",
    "CompletionHandler",
    "DirectStreamer",
    "GenerationCancelled",
    "GenerationState",
    "ModelManager",
    "ResponseHandler",
    "get_response_template",
    "infer_max_single_request_tokens",
]
