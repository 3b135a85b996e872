"""Transformers' HTTP server (``transformers serve``), which ``dma-hf serve`` builds on.

Its handlers turn requests into prompts, and answers into OpenAI's format. The interfaces of Transformers 5.17 to 5.24
are checked when this module is imported, which only the server does.
"""

from __future__ import annotations

from typing import Any

from .versions import check_parameters, private_imports

with private_imports():
    from transformers.cli.serving.chat_completion import ChatCompletionHandler
    from transformers.cli.serving.completion import CompletionHandler
    from transformers.cli.serving.model_manager import ModelManager
    from transformers.cli.serving.response import ResponseHandler
    from transformers.cli.serving.utils import (
        BaseGenerateManager,
        GenerationState,
        get_response_template,
        response_events_to_chunks,
    )

__all__ = [
    "ChatCompletionHandler",
    "CompletionHandler",
    "GenerationState",
    "ModelManager",
    "ResponseHandler",
    "get_response_template",
    "response_events_to_chunks",
]

_MODELS = "device dtype trust_remote_code attn_implementation"
_PARAMETERS: tuple[tuple[Any, ...], ...] = (
    (ChatCompletionHandler.__init__, "model_manager generation_state chat_template_kwargs"),
    *((each.handle_request, "body request_id") for each in (ChatCompletionHandler, CompletionHandler, ResponseHandler)),
    (
        ModelManager.__init__,
        f"{_MODELS} quantization model_timeout force_model",
        f"{_MODELS} continuous_batching quantization model_timeout force_model",
    ),
    (ModelManager.load_model_and_processor, "model_id_and_revision progress_callback tqdm_class gguf_file"),
    (ModelManager.process_model_name, "model_id"),
    (GenerationState.__init__, "continuous_batching compile cb_config"),
    (GenerationState.use_continuous_batching, "model modality"),
    (GenerationState.get_manager, "model_id use_cb"),
    (BaseGenerateManager.init_cb, "model gen_config"),
    (BaseGenerateManager.generate_streaming, "model processor inputs gen_config request_id response_parser"),
    (get_response_template, "processor model"),
    (response_events_to_chunks, "events"),
)
for _function, *_known in _PARAMETERS:
    check_parameters(_function, *_known)
