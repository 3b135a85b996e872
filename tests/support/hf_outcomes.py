"""Compare a model class with ``dma_mxfp`` to Transformers' own attention, feature by feature.

The model is tiny and random, and ``dma_mxfp`` does not quantize, so its output must equal SDPA's. Where SDPA lacks
something, such as a softcap, eager attention is the reference. A feature that Transformers' own attention does not
support either is an upstream limit. An error of ours must name ``dma_mxfp``; everything else is a failure.
"""

from __future__ import annotations

import gc
import inspect
import logging
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from hf_architectures import Architecture
from hf_inputs import LENGTH, Inputs, candidate_inputs
from hf_shrink import CannotShrink, tiny_configs
from tiny_models import IDENTITY
from torch import Tensor
from transformers import (
    AttentionInterface,
    ContinuousBatchingConfig,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    StaticCache,
)
from transformers.initialization import no_init_weights

import dma_hf
from dma_hf.attention import dma_attention_forward
from dma_hf.cache_layers import DMALayer
from dma_hf.integrations.internals import CACHE_ARGUMENT

WORKS, FALLBACK, REFUSED, UPSTREAM, FAILS = "works", "fallback", "refused", "upstream", "FAILS"

TOLERANCE = 2e-5
"""Relative to the largest logit: fp32 rounding through a few layers."""
MAX_PARAMETERS = 60_000_000
OURS = re.compile(r"dma_mxfp|dma_hf\.configure")
"""What an error of this package names."""
NEW_TOKENS = 5
PADDING = 5
CHUNKS = ((0, 9), (9, LENGTH - 1), (LENGTH - 1, LENGTH))


@dataclass(frozen=True)
class Outcome:
    """The outcome of a feature."""

    status: str  # one of the five above
    detail: str = ""  # the error, or the reference if it was not SDPA


@dataclass
class Record:
    """The outcomes of an architecture."""

    architecture: Architecture
    skipped: str = ""  # why nothing could be tested
    features: dict[str, Outcome] = field(default_factory=dict)

    @property
    def failures(self) -> dict[str, Outcome]:
        """The features that neither work nor are rejected correctly."""
        return {name: outcome for name, outcome in self.features.items() if outcome.status == FAILS}


Feature = Callable[[PreTrainedModel, Inputs], Tensor]


def examine(architecture: Architecture) -> Record:
    """Build the architecture twice and try every feature of its kind."""
    record = Record(architecture)
    try:
        pair, inputs = find_pair(architecture, architecture.model_class)
    except (ImportError, AttributeError, CannotShrink) as error:  # the first two: in the registry, not in the library
        record.skipped = str(error) if isinstance(error, CannotShrink) else f"upstream: {_brief(error)}"
        return record
    gc.collect()
    gc.freeze()  # each start of continuous batching collects garbage, and the model's library is a million objects
    for name, feature in features_of(architecture, pair.reference, inputs).items():
        record.features[name] = pair.compare(feature, inputs)
        if name == "forward" and pair.calls == 0 and record.features[name].status == WORKS:
            record.skipped = "no attention layer that calls an implementation"
            record.features.clear()
            break
    return record


def find_pair(architecture: Architecture, model_class: type[PreTrainedModel]) -> tuple[_Pair, Inputs]:
    """Return models and inputs on which Transformers' own attention runs.

    Raises:
        CannotShrink: There are none; the message is that of the best attempt.
    """
    problem = "no inputs: its forward pass takes other things than text, images and sound"
    is_new = True
    for config in tiny_configs(model_class, architecture.model_type):
        try:
            if isinstance(config, CannotShrink):
                raise config
            _let_decode(architecture, config)
            reference = build(model_class, config, ("sdpa", "eager"))
        except CannotShrink as error:
            problem = f"no tiny configuration: {error}" if is_new else problem
            continue
        wants_more, is_new = False, False
        for inputs in candidate_inputs(architecture, reference):
            result = _run(forward, reference, inputs)
            if isinstance(result, Tensor):
                return _Pair(model_class, config, reference), inputs
            problem = f"no inputs: {_brief(result)}"
            wants_more = isinstance(result, TypeError) and "required positional argument" in str(result)
        if wants_more:  # other sizes do not help
            break
    raise CannotShrink(problem)


def _let_decode(architecture: Architecture, config: PreTrainedConfig) -> None:
    """Make decoders of BERT and its kin, which are encoders by default."""
    decoder = getattr(config, "decoder", None)
    if architecture.kind == "decoder" and hasattr(config, "is_decoder"):
        config.is_decoder = True
    elif hasattr(decoder, "add_cross_attention"):
        decoder.is_decoder = decoder.add_cross_attention = True


def features_of(architecture: Architecture, model: PreTrainedModel, inputs: Inputs) -> dict[str, Feature]:
    """Return the features to try, by name."""
    features: list[Feature] = [forward]
    if inputs.is_text and "attention_mask" in inspect.signature(model.forward).parameters:
        features.append(padded_batch)
    if architecture.kind in ("decoder", "multimodal") and not model.config.is_encoder_decoder and inputs.is_text:
        features += [chunked_prefill, static_cache]
    if architecture.kind not in ("encoder", "tower") and model.can_generate():
        features += [generate, packed_cache, *((generate_batch, packed_pages) if static_cache in features else ())]
    names = {each: each.__name__.replace("_", " ") for each in features} | {generate_batch: "generate_batch"}
    return {names[each]: each for each in features}


def build(model_class: type[PreTrainedModel], config: PreTrainedConfig, implementations: tuple[str, ...]) -> Any:
    """Return a random model with the first implementation that its class supports.

    Raises:
        CannotShrink: It has too many parameters, or building it fails.
    """
    try:
        with torch.device("meta"), no_init_weights():
            size = sum(p.numel() for p in model_class(deepcopy(config)).parameters())
    except Exception as error:
        raise CannotShrink(_brief(error)) from error
    if size > MAX_PARAMETERS:
        raise CannotShrink(f"it still has {size // 10**6} million parameters")
    problem = ""
    for implementation in implementations:
        try:
            model = model_class._from_config(deepcopy(config), attn_implementation=implementation).eval()
        except Exception as error:
            problem = _brief(error)
            continue
        randomise(model)
        return model
    raise CannotShrink(problem)


def randomise(model: PreTrainedModel, seed: int = 0) -> None:
    """Draw larger weights: with Transformers' own initialization, every score is almost zero."""
    generator = torch.Generator().manual_seed(seed)
    for weight in model.parameters():
        if not weight.is_floating_point() or weight.numel() == 0:
            continue
        if weight.ndim >= 2:
            weight.normal_(0.0, weight[0].numel() ** -0.5, generator=generator)
        elif not weight.any() or not weight.isfinite().all():
            weight.normal_(0.0, 0.1, generator=generator)


def forward(model: PreTrainedModel, inputs: Inputs) -> Tensor:
    """One forward pass over a batch without padding."""
    return inputs.output(model(**inputs.arguments))


def padded_batch(model: PreTrainedModel, inputs: Inputs) -> Tensor:
    """A batch with left (decoders) or right (encoders) padding in its first row; the output at real tokens."""
    mask = inputs.padding_mask(PADDING)
    out = inputs.output(model(**inputs.arguments | {"attention_mask": mask}))
    return out[mask.bool()] if out.shape[:2] == mask.shape else out


def chunked_prefill(model: PreTrainedModel, inputs: Inputs, **options: Any) -> Tensor:
    """The prompt in three chunks, each attending to the cache of the earlier ones."""
    ids = inputs.arguments["input_ids"]
    outputs = []
    for start, end in CHUNKS:
        out = model(input_ids=ids[:, start:end], use_cache=True, **options)
        options = {"past_key_values": out.past_key_values}
        outputs.append(inputs.output(out))
    return torch.cat(outputs, dim=1)


def static_cache(model: PreTrainedModel, inputs: Inputs) -> Tensor:
    """The same with a preallocated, partly filled cache."""
    cache = StaticCache(config=model.config, max_cache_len=LENGTH + 7)
    return chunked_prefill(model, inputs, past_key_values=cache)


def generate(model: PreTrainedModel, inputs: Inputs) -> Tensor:
    """Greedy decoding of a left-padded batch, as token ids."""
    tokens: Tensor = _generated(model, inputs).sequences
    return tokens


def packed_cache(model: PreTrainedModel, inputs: Inputs) -> Tensor:
    """The same with a packed cache, which every decoder layer with keys must use."""
    with _packed(model) as is_ours, warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*another cache")
        output = _generated(model, inputs)
        if is_ours:
            _check_packed(model, output.get(CACHE_ARGUMENT, output.get("past_key_values")))
    tokens: Tensor = output.sequences
    return tokens


def generate_batch(model: PreTrainedModel, inputs: Inputs) -> Tensor:
    """Greedy decoding of two requests by continuous batching, as token ids."""
    rows = inputs.arguments["input_ids"].tolist()
    settings = GenerationConfig(max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=0, eos_token_id=-1)
    batching = ContinuousBatchingConfig(num_blocks=16, max_batch_tokens=64, use_cuda_graph=False)
    logger = logging.getLogger("ContinuousBatchingLogger")
    with mock.patch.object(logger, "disabled", True):  # it logs the errors that it raises
        outputs = model.generate_batch(
            [rows[0][:-PADDING], rows[1]], generation_config=settings, continuous_batching_config=batching
        ).values()
    errors = [output.error for output in outputs if output.error]
    if errors:
        raise RuntimeError(errors[0])
    return torch.tensor([output.generated_tokens for output in outputs])


def packed_pages(model: PreTrainedModel, inputs: Inputs) -> Tensor:
    """The same over packed pages."""
    with _packed(model):
        return generate_batch(model, inputs)


SAME_REFERENCE: dict[Feature, Feature] = {packed_pages: generate_batch}
"""Features that differ from another one in our model alone."""


@contextmanager
def _packed(model: PreTrainedModel) -> Iterator[bool]:
    """Set a packed cache if the model runs ``dma_mxfp``, and yield whether it does. Its prompts fit in a tile."""
    is_ours = "dma_mxfp" in str(model.config.get_text_config(decoder=True)._attn_implementation)
    if is_ours:
        dma_hf.configure(model, cache="int8")
        dma_hf.reset_stats(model)
    try:
        yield is_ours
    finally:
        if is_ours:
            dma_hf.configure(model, cache=None)


def _check_packed(model: PreTrainedModel, cache: Any) -> None:
    """Raise if the cache keeps keys in 16 bits, or attention did not read the packed ones, in each step of a layer."""
    cache = getattr(cache, "self_attention_cache", cache)
    unpacked = []
    if isinstance(cache, dma_hf.DMACache):  # Whisper returns a copy of another class
        kinds = [type(layer) for layer in cache.layers if getattr(layer, "keys", None) is not None]
        unpacked = [kind.__name__ for kind in kinds if not issubclass(kind, DMALayer)]
    stats = dma_hf.stats(model)
    caches = {name: {use.cache for use in layer.uses} for name, layer in stats.layers.items()}
    unpacked += [name for name, found in caches.items() if "int8" in found and len(found) > 1]
    if unpacked or not (stats.fallbacks or {"int8"} in caches.values()):
        raise RuntimeError(f"the packed cache was not used: {unpacked}")


def _generated(model: PreTrainedModel, inputs: Inputs) -> Any:
    settings = model.generation_config
    settings.eos_token_id, settings.pad_token_id = None, 0
    if model.config.is_encoder_decoder and settings.bos_token_id is None and settings.decoder_start_token_id is None:
        settings.decoder_start_token_id = 1
    arguments = dict(inputs.arguments)
    if inputs.is_text:
        arguments["attention_mask"] = inputs.padding_mask(PADDING)
    arguments.pop("decoder_input_ids", None)
    return model.generate(**arguments, max_new_tokens=NEW_TOKENS, do_sample=False, return_dict_in_generate=True)


class _Pair:
    """The reference model, and with the same weights ``dma_mxfp`` and, as a second reference, eager attention."""

    def __init__(self, model_class: type[PreTrainedModel], config: PreTrainedConfig, reference: PreTrainedModel):
        self.model_class, self.config, self.reference = model_class, config, reference
        self.calls = 0
        self._models: dict[str, Any] = {}
        self._expected: dict[Feature, Tensor | Exception] = {}

    def compare(self, feature: Feature, inputs: Inputs) -> Outcome:
        """Run a feature on the reference and on ours."""
        expected = self._reference(SAME_REFERENCE.get(feature, feature), inputs)
        if isinstance(expected, Exception):
            return Outcome(UPSTREAM, _brief(expected))
        status, detail, actual = WORKS, "", self._ours(feature, inputs)
        if isinstance(actual, Exception) and OURS.search(str(actual)):
            status, detail = REFUSED, _brief(actual)
            if "on_unsupported='sdpa'" in str(actual):
                status, actual = FALLBACK, self._ours(feature, inputs, on_unsupported="sdpa")
            if isinstance(actual, Exception) and OURS.search(str(actual)):
                return Outcome(REFUSED, detail)
        if isinstance(actual, Exception):
            return Outcome(FAILS, _brief(actual))
        if difference(actual, expected) <= TOLERANCE:
            return Outcome(status, detail)
        eager = self._model("eager")
        eager = eager if isinstance(eager, Exception) else _run(feature, eager, inputs)
        if isinstance(eager, Tensor) and difference(actual, eager) <= TOLERANCE:
            return Outcome(status, detail or "as eager attention; SDPA differs")
        name, error = self.reference.config._attn_implementation, difference(actual, expected)
        return Outcome(FAILS, f"differs from {name} by {error:.1e}")

    def _reference(self, feature: Feature, inputs: Inputs) -> Tensor | Exception:
        if feature not in self._expected:
            self._expected[feature] = _run(feature, self.reference, inputs)
        return self._expected[feature]

    def _ours(self, feature: Feature, inputs: Inputs, **changes: Any) -> Tensor | Exception:
        model = self._model("dma_mxfp")
        if isinstance(model, Exception):
            return model
        try:
            dma_hf.configure(model, IDENTITY, **changes)
        except ValueError as error:
            return error
        AttentionInterface.register("dma_mxfp", self._attend)
        try:
            return _run(feature, model, inputs)
        finally:
            AttentionInterface.register("dma_mxfp", dma_attention_forward)

    def _attend(self, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
        """Compute and count a call of the attention function."""
        self.calls += 1
        return dma_attention_forward(*args, **kwargs)

    def _model(self, implementation: str) -> Any:
        if implementation not in self._models:
            try:
                model = self.model_class._from_config(deepcopy(self.config), attn_implementation=implementation).eval()
                model.load_state_dict(self.reference.state_dict())
            except Exception as error:
                model = error
            self._models[implementation] = model
        return self._models[implementation]


def _run(feature: Feature, model: PreTrainedModel, inputs: Inputs) -> Tensor | Exception:
    torch.manual_seed(0)
    try:
        with warnings.catch_warnings(action="ignore"):
            return feature(model, inputs)
    except Exception as error:
        return error


def difference(actual: Tensor, expected: Tensor) -> float:
    """Return the largest difference relative to the largest expected number; infinity if not comparable."""
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        return float("inf")
    if not expected.is_floating_point():
        return 0.0 if torch.equal(actual, expected) else float("inf")
    finite = expected.isfinite()
    if not torch.equal(finite, actual.isfinite()) or not finite.any():
        return float("inf")
    error, size = (actual - expected)[finite].abs().max(), expected[finite].abs().max()
    return float(error / size.clamp(min=1e-6))


def _brief(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}"[:200]
