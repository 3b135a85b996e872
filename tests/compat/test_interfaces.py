"""The private interfaces of continuous batching that ``dma_hf.integrations`` uses, in the installed Transformers.

If a test fails with a new version, compare the interface with the code that uses it before adding its new form.
"""

from __future__ import annotations

import dis
import inspect
from typing import Any

import pytest

pytest.importorskip("transformers.generation.continuous_batching.cache_allocators", reason="before Transformers 5.18")

from tiny_models import FAMILIES
from transformers import GenerationConfig
from transformers.generation.continuous_batching.cache import PagedAttentionCache, PagedAttentionMemoryHandler
from transformers.generation.continuous_batching.cache_allocators import CachePool, FullAttentionCacheAllocator
from transformers.generation.continuous_batching.continuous_api import (
    BackgroundThreadStatus,
    ContinuousBatchingManager,
    ContinuousBatchProcessor,
)
from transformers.generation.continuous_batching.initialization import update_cb_config_after_cache_creation
from transformers.generation.continuous_batching.scheduler import SCHEDULER_MAPPING
from transformers.generation.continuous_batching.utils import WorkloadHints, find_head_dim, find_num_key_value_heads

_MEMORY = (
    "config cb_config dtype bytes_per_sector tokens_per_sector bytes_per_block attn_types model_supports_logits_to_keep"
)
_PARAMETERS: tuple[tuple[Any, ...], ...] = (
    (ContinuousBatchingManager.__init__, "model generation_config continuous_batching_config workload_hints"),
    (ContinuousBatchingManager.switch_to_cb_friendly_attn, "model", "model auto_switch_to_flash"),
    (ContinuousBatchingManager.warmup, ""),
    (ContinuousBatchingManager.stop, "block timeout keep_for_next_session hard_stop"),
    (ContinuousBatchingManager.destroy, ""),
    (ContinuousBatchingManager._run_generation_loop, "", "use_inference_mode"),
    (ContinuousBatchingManager._create_batch_processor, ""),
    (ContinuousBatchingManager._handle_critical_error, "error batch_processor"),
    (
        ContinuousBatchProcessor.__init__,
        "cache config generation_config continuous_batching_config logit_processor input_queue cancel_queue "
        "output_router background_thread_status model_device model_dtype scheduler distributed_helper",
    ),
    (PagedAttentionCache.extend_read_and_write_indices, "request_id past_length query_length read_index write_index"),
    (
        PagedAttentionCache.update,
        "key_states value_states layer_idx read_index write_index",
        "key_states value_states layer_idx kwargs",
    ),
    (PagedAttentionMemoryHandler.__init__, _MEMORY, f"{_MEMORY} kv_tp_size"),
    (PagedAttentionMemoryHandler.infer_max_batch_tokens_and_num_sectors, ""),
    (CachePool.__init__, "num_sectors num_allocators num_reserved_sectors"),
    (
        FullAttentionCacheAllocator._before_cache_tensor_init,
        "index layer_indices tokens_per_page bytes_per_page allow_block_sharing",
    ),
    (FullAttentionCacheAllocator._after_cache_tensor_init, "non_trash_bytes bytes_per_sector cache_tensor pool"),
    (FullAttentionCacheAllocator._compute_blocks_needed, "allocated_blocks past_length query_length"),
    (FullAttentionCacheAllocator.register_cache_tensor, "bytes_per_sector non_trash_bytes cache_tensor pool"),
    (FullAttentionCacheAllocator.fill_block_table, "request_id past_length query_length block_table"),
    (update_cb_config_after_cache_creation, "cb_config num_blocks max_batch_tokens"),
    (WorkloadHints, "max_prompt_length max_generated_length num_requests"),
    (find_head_dim, "config"),
    (find_num_key_value_heads, "config"),
    *((scheduler, "cache safety_margin max_requests_per_batch") for scheduler in SCHEDULER_MAPPING.values()),
)
"""Functions that are called or overridden, with their parameters in the supported versions."""

_ATTRIBUTES = (
    *("background_thread_status", "batch_processor", "cancel_queue", "continuous_batching_config"),
    *("distributed_helper", "generation_config", "input_queue", "is_tp_driver", "logit_processor", "output_router"),
    "_use_prefix_sharing",
)
"""Attributes of a manager that are read or set."""

_CACHE_ATTRIBUTES = frozenset(
    {
        *("_block_table_key", "allow_block_sharing", "bytes_per_sector", "cache_allocators", "cache_tensor", "config"),
        *("device", "dtype", "layer_to_allocator", "max_batch_tokens", "max_blocks_per_request", "num_blocks"),
        *("max_decode_fast_path_length", "max_tokens_read", "num_sectors", "pool", "read_cache_limit"),
        *("tokens_per_sector", "use_prefix_sharing"),
    }
)
"""Attributes that the constructor of Transformers' paged cache sets. :class:`PackedPagedCache` does not call it.

Only FlashAttention's kernel needs ``_block_table_key``.
"""


@pytest.mark.parametrize("form", _PARAMETERS, ids=lambda form: form[0].__qualname__)
def test_functions_have_the_parameters_of_a_supported_version(form):
    function, *known = form
    assert " ".join(name for name in inspect.signature(function).parameters if name != "self") in known


def test_the_paged_cache_sets_no_other_attributes():
    code = dis.get_instructions(PagedAttentionCache.__init__)
    assert {each.argval for each in code if each.opname == "STORE_ATTR"} <= _CACHE_ATTRIBUTES


def test_a_manager_has_the_attributes_that_are_read():
    model = FAMILIES["llama"].build("dma_mxfp")
    manager = model.init_continuous_batching(GenerationConfig(max_new_tokens=2, do_sample=False, eos_token_id=-1))
    assert [name for name in _ATTRIBUTES if not hasattr(manager, name)] == []
    assert hasattr(manager.output_router, "result_handlers")
    assert hasattr(manager.logit_processor, "logits_processor")
    assert hasattr(BackgroundThreadStatus, "mark_as_stopped")
