"""Model classes of the installed Transformers that may need an entry in ``dma_hf/support.py``.

The sources of all models are searched for the patterns of each entry. A class that is neither in the table nor in
``KNOWN`` fails: compare its outputs with eager attention (``tests/hf/test_architectures.py``), then add it to the table
if they differ, or to ``KNOWN`` if they agree.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import transformers

from dma_hf import support

CLASS = re.compile(r"^class (\w+)[^\n]*:\n(?:(?:[ \t][^\n]*)?\n)*", re.MULTILINE)
DISPATCH = "ALL_ATTENTION_FUNCTIONS"
CAUSAL_MASK = re.compile(r"create_\w*causal_mask|create_chunked|create_masks_for_generate")
OTHER_SEQUENCE = re.compile(r"def forward\([^)]*(?:encoder_hidden_states|key_value_states|cross_attention_states)")
CAST_OR_JOINED = re.compile(
    r"attention_mask\.to\((?![^)]*(?:bool|int|long))[^)]*dtype[^)]*\)"
    r"|torch\.cat\(\s*[\[(]attention_mask, (?!\w*attention_mask)"
)

KNOWN = {
    # The mask is None or custom, and nothing marks the layer as non-causal.
    "no causal mask": {
        *("AlignTextSelfAttention", "AudioFlamingo3Attention", "ClapTextSelfAttention", "Data2VecAudioAttention"),
        *("EsmFold2MSAPairWeightedAveraging", "Exaone4_5_Attention", "HubertAttention", "KosmosTextAttention"),
        *(
            "LayoutLMSelfAttention",
            "LightGlueAttention",
            "MarkupLMSelfAttention",
            "MossTranscribeDiarizeAudioAttention",
        ),
        *("OmniASRAttention", "PatchTSMixerAttention", "PatchTSTAttention", "Qwen2AudioAttention", "SEWAttention"),
        *("SplinterSelfAttention", "TimesFmAttention", "UniSpeechAttention", "UniSpeechSatAttention"),
        *("VoxtralAttention", "Wav2Vec2Attention"),
    },
    # Built-in attention that masks its scores, in a file with other, selectable attention.
    "built in": {
        *("BigBirdPegasusSelfAttention", "ClapAudioSelfAttention", "ConditionalDetrMHAttentionMap"),
        *("DFineMultiscaleDeformableAttention", "DeformableDetrMultiscaleDeformableAttention"),
        *("Deimv2MultiscaleDeformableAttention", "DetrMHAttentionMap", "EsmFold2RowAttentionPooling"),
        *("EvollaSequenceAlignerCrossAttention", "EvollaSequenceCompressorAttention", "GitSelfAttention"),
        *("IdeficsGatedCrossAttentionLayer", "InformerProbSparseAttention", "LongT5LocalAttention"),
        *("LongT5TransientGlobalAttention", "LwDetrMultiscaleDeformableAttention", "MaskFormerDetrMHAttentionMap"),
        *("PPDocLayoutV2MultiscaleDeformableAttention", "PPDocLayoutV3MultiscaleDeformableAttention"),
        *("PPDocLayoutV4MultiscaleDeformableAttention", "PPDocLayoutV2ReadingOrderSelfAttention"),
        "PegasusXGlobalLocalAttention",
        *("Phi4MultimodalAudioRelativeAttentionBias", "RTDetrMultiscaleDeformableAttention"),
        *("RTDetrV2MultiscaleDeformableAttention", "RfDetrMultiscaleDeformableAttention"),
    },
    # The mask is cast to floating point, or concatenated with another tensor.
    "mask changed": {
        *("EomtDinov3ForUniversalSegmentation", "EsmFold2OuterProductMean", "Glm5NextTextIndexer", "LayoutLMModel"),
        *("MarkupLMModel", "PegasusXEncoder", "VideoPrismTextModel"),
    },
    # Keys may come from another sequence, without a name or attribute that says so.
    "other sequence": {"EfficientLoFTRAttention", "Molmo2VisionAttention"},
}


@cache
def _found() -> dict[str, dict[str, str]]:
    """Return the classes that match each pattern, with their model types."""
    found: dict[str, dict[str, str]] = {kind: {} for kind in KNOWN}
    for model_type, source in _sources():
        has_causal_mask = CAUSAL_MASK.search(source) is not None
        for match in CLASS.finditer(source):
            name, text = match[1], match[0]
            kinds = []
            if CAST_OR_JOINED.search(text):
                kinds.append("mask changed")
            if DISPATCH in text:
                if not has_causal_mask and not re.search(r"is_causal ?= ?False", text):
                    kinds.append("no causal mask")
                is_marked = re.search(r"is_cross_attention|is_decoder", text) or _is_named_cross_attention(name)
                if OTHER_SEQUENCE.search(text) and not is_marked:
                    kinds.append("other sequence")
            elif "Attention" in name and re.search(r"\+ \w*mask\b|masked_fill\(", text):
                kinds.append("built in")
            for kind in kinds:
                found[kind][name] = model_type
    return found


def _sources() -> Iterator[tuple[str, str]]:
    for path in sorted((Path(transformers.__file__).parent / "models").glob("*/modeling_*.py")):
        source = path.read_text(encoding="utf-8")
        if DISPATCH in source:
            yield path.stem.removeprefix("modeling_"), source


def _is_named_cross_attention(name: str) -> bool:
    return any(part in name for part in support.CROSS_ATTENTION_NAMES)


def _has_entry(name: str, model_type: str) -> bool:
    is_refused = model_type in support.NEEDS_ADDITIVE_MASK
    adds_the_mask = any(entry.startswith(model_type) for entry in support.ADDS_THE_MASK) and "Audio" in name
    return is_refused or adds_the_mask or name in support.NEVER_CAUSAL


@pytest.mark.parametrize("kind", KNOWN)
def test_every_class_that_matches_a_pattern_is_in_the_table_or_known(kind: str) -> None:
    found = _found()[kind]
    new = {name: model for name, model in found.items() if name not in KNOWN[kind] and not _has_entry(name, model)}
    assert not new, f"{kind}: {new} may need an entry in dma_hf/support.py"


def test_the_patterns_match_the_classes_in_the_table() -> None:
    """Otherwise they would not find new classes either."""
    found = _found()
    assert "DeepseekV4Attention" in found["mask changed"]
    assert "Gemma4AudioAttention" in found["built in"]


def test_every_class_in_the_table_exists() -> None:
    sources = dict(_sources())
    assert set(support.NEEDS_ADDITIVE_MASK) <= sources.keys()
    model_types = {"t5gemma2_decoder": "t5gemma2"}  # of a part
    assert {model_types.get(name, name) for name in support.NO_PACKED_CACHE} <= sources.keys()
    for name in support.NEVER_CAUSAL:
        assert any(f"class {name}(" in source for source in sources.values())
    for part in support.CROSS_ATTENTION_NAMES:
        assert any(re.search(rf"class \w*{part}\(", source) for source in sources.values())
