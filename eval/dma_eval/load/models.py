"""Models by name: from the Hub, from a local folder, or from a GGUF file."""

# Whether psutil has types, in itself or in a package of stubs, must not matter.
# mypy: disable-error-code="import-untyped"

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from gguf import GGUFReader
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    CompileConfig,
    ContinuousBatchingConfig,
    PreTrainedModel,
)
from transformers.utils import cached_file

from dma_eval import console
from dma_eval.environment import portable
from dma_eval.errors import UserError, one_line
from dma_eval.names import ModelSource, check_device, parse_source
from dma_eval.results import ModelInfo
from dma_hf.integrations.internals import commit_of

from .data import Tokens, leading_tokens

GIB = 1 << 30
UNLOADABLE = (
    *(OSError, ValueError, TypeError, ImportError, RuntimeError, KeyError, SafetensorError),
    StrictDataclassError,  # of a configuration with a value of a wrong type
)
"""Exceptions of Transformers if it cannot load a model."""


@dataclass(frozen=True)
class LoadedModel:
    """A causal language model in evaluation mode with its tokenizer."""

    name: str  # as it was given
    model: PreTrainedModel
    tokenizer: Any
    revision: str | None = None  # the requested Hub revision
    device_map: str | None = None  # the requested device map
    yarn: float | None = None  # factor by which YaRN extends its positions
    quantization: str | None = None  # of the weights in its file or checkpoint

    @property
    def max_context(self) -> int | None:
        return getattr(self.model.config.get_text_config(), "max_position_embeddings", None)

    def check_positions(self, count: int, option: str) -> None:
        """Check that the model has as many positions as an option requests. If not, name a factor of YaRN for them."""
        limit = self.max_context
        if limit is not None and count > limit:
            message = f"{option}: {self.name} takes {limit:,} positions, got {count:,}; lower it"
            if self.yarn is not None or rope_of(self.model.config).get("rope_type") == "default":
                message += f", or extend the positions with --yarn {math.ceil(count * (self.yarn or 1) / limit)}"
            raise UserError(message)

    def tokenize(self, text: str) -> Tokens:
        """Return the tokens of a text. The model must have all of them: the tokenizer may be that of another model."""
        ids = self.tokenizer(text, verbose=False)["input_ids"]
        vocabulary, largest = self.model.get_input_embeddings().num_embeddings, max(ids, default=0)
        if largest >= vocabulary:
            raise UserError(
                f"{self.name}: the tokenizer gives token {largest:,}, but the model's vocabulary has "
                f"{vocabulary:,} entries"
            )
        begins_with = self.tokenizer.convert_ids_to_tokens(leading_tokens(self.tokenizer))
        return Tokens(torch.tensor(ids, dtype=torch.int64), begins_with)

    @property
    def folder(self) -> str | None:
        """Return the folder of a local model, because its name leaves out folders of the machine."""
        path = Path(parse_source(self.name).path)
        return str(path.resolve()) if path.is_dir() else None

    @property
    def files(self) -> list[list[Any]]:
        """Return name, size and modification time of each file of a local model, to detect replaced files."""
        source = parse_source(self.name)
        folder, file = Path(source.path), source.gguf_file
        found = sorted(folder.iterdir()) if folder.is_dir() else []
        facts = [(each.name, each.stat()) for each in found if each.is_file() and file in (None, each.name)]
        return [[name, each.st_size, each.st_mtime_ns] for name, each in facts]

    @property
    def info(self) -> ModelInfo:
        model = self.model
        config = model.config.get_text_config()
        heads, kv_heads, head_dim = heads_of(config)
        return ModelInfo(
            name=portable(self.name),
            revision=self.revision,
            commit=commit_of(model.config),
            architecture=type(model).__name__,
            parameters=model.num_parameters(),
            layers=getattr(config, "num_hidden_layers", None),
            query_heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            max_context=self.max_context,
            dtype=str(model.dtype).removeprefix("torch."),
            device=str(model.device),
            device_map=self.device_map,
            yarn=self.yarn,
            quantization=self.quantization,
        )


def layers_of(config: Any) -> Sequence[Any]:
    """Return the configuration of each layer of a text model; its own alone if they all have the same (not Gemma 4)."""
    layers: Sequence[Any] = config.per_layer_config if getattr(config, "is_heterogeneous", False) else [config]
    return layers


def heads_of(config: Any) -> tuple[Any, Any, Any]:
    """Return query heads, key heads and head dimension of a text model. One is ``None`` if layers differ in it."""
    found = []
    for layer in layers_of(config):
        heads, hidden = (getattr(layer, name, None) for name in ("num_attention_heads", "hidden_size"))
        head_dim = getattr(layer, "head_dim", None) or (hidden // heads if hidden and heads else None)
        found.append((heads, getattr(layer, "num_key_value_heads", None) or heads, head_dim))
    columns = zip(*found, strict=True)
    heads, kv_heads, head_dim = (each[0] if each.count(each[0]) == len(each) else None for each in columns)
    return heads, kv_heads, head_dim


def parse_device(name: str) -> torch.device:
    """Return the device of that name. ``auto`` is CUDA if present, else the CPU."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    check_device(name)
    device = torch.device(name)
    count = torch.cuda.device_count()
    if device.type == "cuda" and (device.index or 0) >= count:
        raise UserError(f"--device: {name!r} does not exist: {count} CUDA devices found; --device cpu works everywhere")
    return device


def load_model(
    name: str,
    *,
    dtype: str = "auto",
    device: str = "auto",
    device_map: str | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
    yarn: float | None = None,
    tensor_parallel: int = 1,
    option: str = "--model",
) -> LoadedModel:
    """Load a causal language model and its tokenizer, as the options of the same names say. Errors name ``option``.

    Of ``tensor_parallel`` processes in a process group, each loads its share of every layer.
    """
    source = parse_source(name, option)
    default = None if source.gguf_file is None else torch.float32
    chosen_dtype: torch.dtype | None = default if dtype == "auto" else getattr(torch, dtype)
    chosen_device = parse_device(device)
    is_spread = device_map is not None or tensor_parallel > 1
    options: dict[str, Any] = {"revision": revision, "trust_remote_code": trust_remote_code}
    options |= {} if source.gguf_file is None else {"gguf_file": source.gguf_file}
    try:
        tokenizer = AutoTokenizer.from_pretrained(source.path, **options)
        config = AutoConfig.from_pretrained(source.path, **options)
        if yarn is not None:
            rescale(config, yarn)
        if source.gguf_file is None:
            where = None if is_spread else chosen_device
            check_memory(f"{option}: {name}", config, chosen_dtype, where, trust_remote_code)
        options |= {"config": config, "dtype": chosen_dtype or "auto", "device_map": device_map}
        options |= {"distributed_config": {"tp_size": tensor_parallel}} if tensor_parallel > 1 else {}
        model, loading = AutoModelForCausalLM.from_pretrained(source.path, output_loading_info=True, **options)
        if not is_spread:
            model = model.to(chosen_device)
    except UNLOADABLE as error:
        raise UserError(f"{option}: cannot load {name!r}: {_damage(source) or one_line(error)}") from error
    if dtype == "auto" and model.device.type == "cpu" and model.dtype in (torch.bfloat16, torch.float16):
        console.print_note(
            f"{name} has weights in {str(model.dtype).removeprefix('torch.')}, in which a CPU computes slowly; "
            "--dtype float32 is several times faster"
        )
    missing = sorted(loading["missing_keys"])
    if missing:  # Transformers initializes them at random
        raise UserError(
            f"{option}: cannot load {name!r}: the checkpoint lacks {len(missing)} weights of {type(model).__name__}, "
            f"such as {missing[0]}; check that it belongs to its configuration"
        )
    quantization = _quantization(source, revision, config)
    return LoadedModel(name, model.eval(), tokenizer, revision, device_map, yarn, quantization)


def _quantization(source: ModelSource, revision: str | None, config: Any) -> str | None:
    """Return the quantization of the weights: llama.cpp's name for a file, the method for a checkpoint."""
    if source.gguf_file is None:
        method = (getattr(config, "quantization_config", None) or {}).get("quant_method")
        return None if method is None else str(method)
    kinds = Counter[str]()
    for tensor in GGUFReader(cached_file(source.path, source.gguf_file, revision=revision)).tensors:
        kinds[tensor.tensor_type.name] += int(tensor.n_elements)
    most = kinds.most_common(1)[0][0]
    return None if most in ("F64", "F32", "F16", "BF16") else most


def rope_of(config: Any) -> dict[str, Any]:
    """Return the parameters of a model's rotary embedding. It can be rescaled if their ``rope_type`` is ``default``."""
    return getattr(config.get_text_config(), "rope_parameters", None) or {}


def rescale(config: Any, factor: float) -> None:
    """Extend a model's positions by ``factor`` with Transformers' YaRN."""
    text, rope = config.get_text_config(), rope_of(config)
    if rope.get("rope_type") != "default" or not 1 < factor < math.inf:
        raise UserError(
            f"--yarn: expected a factor above 1, and a model with one rotary embedding that is not rescaled; got "
            f"{factor:g} and {config.model_type} with {rope or 'none'}"
        )
    trained = text.max_position_embeddings
    yarn = {"rope_type": "yarn", "factor": float(factor), "original_max_position_embeddings": trained}
    text.rope_parameters, text.max_position_embeddings = rope | yarn, int(factor * trained)


def _damage(source: ModelSource) -> str:
    """Say what is wrong with a local GGUF file, or nothing if it can be read."""
    path = Path(source.path) / (source.gguf_file or "")
    if not path.is_file():
        return ""
    try:
        GGUFReader(path)
    except (ValueError, IndexError, KeyError, OSError, MemoryError):  # its arrays depend on bytes that are missing
        return f"the file is damaged, or was cut off at {path.stat().st_size:,} bytes; download it again"
    return ""


def check_memory(
    what: str, config: Any, dtype: torch.dtype | None, device: torch.device | None, trust_remote_code: bool
) -> None:
    """Check that unquantized weights fit in the memory of a device, or of all devices and the host together."""
    if getattr(config, "quantization_config", None) is not None:
        return
    chosen = dtype or config.dtype or torch.float32
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=chosen, trust_remote_code=trust_remote_code)
    needed = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    free = free_memory(device)
    if needed > free:
        place = "this machine" if device is None else str(device)
        raise UserError(
            f"{what} needs {needed / GIB:,.1f} GiB for its weights in {str(chosen).removeprefix('torch.')}, "
            f"and {place} has {free / GIB:,.1f} GiB free; use another --dtype, a larger device, or --device-map auto"
        )


def free_memory(device: torch.device | None) -> int:
    """Return the free bytes on ``device``, or on all CUDA devices and the host together."""
    host = int(psutil.virtual_memory().available)
    if device is None:
        return host + sum(torch.cuda.mem_get_info(i)[0] for i in range(torch.cuda.device_count()))
    return host if device.type == "cpu" else torch.cuda.mem_get_info(device)[0]


def batching_settings(
    model: PreTrainedModel, cache_gib: float | None, *, most_requests: int, is_compiled: bool
) -> ContinuousBatchingConfig:
    """Return Transformers' settings of continuous batching, with ``cache_gib`` GiB or most of the free memory."""
    config = ContinuousBatchingConfig(max_requests_per_batch=most_requests)
    if is_compiled:
        config.varlen_compile_config = config.decode_compile_config = CompileConfig(
            mode="default", fullgraph=False, dynamic=True
        )
    if hasattr(config, "auto_switch_to_flash"):  # Transformers 5.19 and later; keep the chosen attention
        config.auto_switch_to_flash = False
    if cache_gib is not None:
        text = model.config.get_text_config()
        _, kv_heads, head_dim = heads_of(text)
        if not kv_heads or not head_dim:
            raise UserError("--cache-gib: the heads of this model have no single size; leave it out")
        # Counted in blocks of the model's own dtype, also if pages are packed.
        token = 2 * text.num_hidden_layers * kv_heads * head_dim * model.dtype.itemsize
        config.num_blocks = int(cache_gib * GIB / (token * config.page_size))
        if config.num_blocks < 1:
            least = token * config.page_size / GIB
            raise UserError(f"--cache-gib: expected at least {least:.3g} for a page in every layer, got {cache_gib:g}")
    return config
