"""Models can be cast, copied, saved, switched, adapted, quantized and run in threads."""

from __future__ import annotations

import copy
import gc
import pickle
import warnings
import weakref
from concurrent.futures import ThreadPoolExecutor

import gguf
import pytest
import torch
from gguf_files import write_gguf
from transformers import (
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    TorchAoConfig,
)

import dma_hf

LENGTH = 300  # over two tiles, so that the presets differ


def _logits(model, ids):
    return model(ids).logits


@pytest.fixture
def llama(families):
    model = families["llama"].build(dma_hf.NAME)
    dma_hf.configure(model, "paper")
    return model


@pytest.mark.parametrize("cast", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_a_cast_model_computes_in_its_dtype(cast, llama, token_ids):
    exact = _logits(llama, token_ids(1, LENGTH))
    logits = _logits(llama.to(cast), token_ids(1, LENGTH))
    assert logits.dtype == cast
    assert (logits.float() - exact).norm() < 0.1 * exact.norm()


@pytest.mark.parametrize("clone", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))], ids=["deepcopy", "pickle"])
def test_a_copy_computes_the_same(clone, llama, token_ids):
    twin = clone(llama)
    ids = token_ids(1, LENGTH)
    paper = _logits(llama, ids)
    assert torch.equal(_logits(twin, ids), paper)
    dma_hf.configure(twin, "balanced")
    assert not torch.equal(_logits(twin, ids), paper)
    assert torch.equal(_logits(llama, ids), paper)  # the copy has its own settings


def test_a_dropped_model_is_freed_at_once(families, token_ids):
    model = families["llama"].build(dma_hf.NAME)
    dma_hf.configure(model, cache="int8")
    model.generate(token_ids(1, 20), max_new_tokens=2, do_sample=False)
    weight = weakref.ref(model.lm_head.weight)
    gc.disable()
    try:
        del model
        assert weight() is None
    finally:
        gc.enable()


def test_attention_can_be_switched_back_and_forth(llama, families, token_ids):
    ids = token_ids(1, LENGTH)
    paper, sdpa = _logits(llama, ids), _logits(families["llama"].build("sdpa"), ids)
    for _ in range(2):
        llama.set_attn_implementation("sdpa")
        assert torch.equal(_logits(llama, ids), sdpa)
        llama.set_attn_implementation(dma_hf.NAME)
        assert torch.equal(_logits(llama, ids), paper)


def test_parts_of_a_composite_model_may_differ_in_attention(llava):
    """``dma_mxfp`` in the language model and SDPA in the vision tower, and vice versa."""
    model = llava
    ids = torch.randint(3, 90, (1, LENGTH), generator=torch.Generator().manual_seed(0))
    ids[:, 4:20] = 96
    pixels = torch.randn(1, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    sdpa = model(input_ids=ids, pixel_values=pixels).logits
    results = {}
    for part in ("text_config", "vision_config"):
        model.set_attn_implementation({part: dma_hf.NAME})
        dma_hf.configure(model, "paper")
        results[part] = model(input_ids=ids, pixel_values=pixels).logits
        model.set_attn_implementation("sdpa")
    assert torch.equal(model(input_ids=ids, pixel_values=pixels).logits, sdpa)
    for logits in results.values():
        assert 0 < (logits - sdpa).norm() < 0.5 * sdpa.norm()


@pytest.mark.parametrize("part", ["text_config", "vision_config"])
def test_configure_starts_from_the_settings_of_the_part_that_runs_dma_mxfp(part, llava):
    llava.set_attn_implementation({part: "dma_mxfp:fp4+int4"})
    assert dma_hf.configure(llava) == dma_hf.DMAConfig.from_preset("fp4", cache="int4")
    assert llava.config._attn_implementation == "sdpa"
    llava.set_attn_implementation({"text_config": "dma_mxfp:paper", "vision_config": "dma_mxfp:fp4"})
    assert dma_hf.configure(llava) == dma_hf.PRESETS["paper"]  # the language model's


def test_models_in_threads_keep_their_settings(families, token_ids):
    """All first forward passes start at the same time."""
    ids = token_ids(1, LENGTH)
    settings = ["paper", "fp4", "balanced"] * 2
    models = [families["llama"].build(dma_hf.NAME) for _ in settings]
    for model, setting in zip(models, settings, strict=True):
        dma_hf.configure(model, setting)

    def run(model):
        with torch.no_grad():  # of the thread
            return _logits(model, ids)

    with ThreadPoolExecutor(len(models)) as pool:
        together = list(pool.map(run, models))
    for model, logits in zip(models, together, strict=True):
        assert torch.equal(logits, run(model))
    assert not torch.equal(together[0], together[1])


@pytest.mark.filterwarnings("ignore")
def test_torchao_weights_work(families, token_ids, tmp_path):
    from torchao.quantization import Int8WeightOnlyConfig

    families["llama"].build("sdpa").save_pretrained(tmp_path)
    results = {}
    for name in ("sdpa", dma_hf.NAME):
        options = {"attn_implementation": name, "quantization_config": TorchAoConfig(Int8WeightOnlyConfig())}
        model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, **options)
        assert type(model.model.layers[0].self_attn.q_proj.weight) is not torch.nn.Parameter
        results[name] = _logits(model, token_ids(1, LENGTH))
    error = (results["sdpa"] - results[dma_hf.NAME]).norm() / results["sdpa"].norm()
    assert 0 < error < 0.05


def test_peft_adapters_work(llama, token_ids, tmp_path):
    peft = pytest.importorskip("peft")
    ids = token_ids(1, LENGTH)
    base = _logits(llama, ids)
    settings = peft.LoraConfig(r=4, target_modules=["q_proj", "k_proj"], init_lora_weights=False)
    model = peft.get_peft_model(llama, settings).eval()
    adapted = _logits(model, ids)
    assert not torch.allclose(adapted, base, atol=1e-3)
    with model.disable_adapter():
        assert torch.equal(_logits(model, ids), base)
    dma_hf.configure(model, "balanced")  # through the wrapper
    assert not torch.equal(_logits(model, ids), adapted)
    dma_hf.configure(model, "paper")
    torch.testing.assert_close(_logits(model.merge_and_unload(), ids), adapted, rtol=1e-2, atol=1e-2)


def test_prefix_tuning_does_not_warn_of_another_cache(llama, token_ids):
    """Its prefix is a cache of 16 bits, whatever the cache of decoding steps is."""
    peft = pytest.importorskip("peft")
    dma_hf.configure(llama, cache="int8")
    model = peft.get_peft_model(llama, peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4))
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*another cache")
        model(input_ids=token_ids(1, LENGTH))


def test_gguf_weights_work(families, token_ids, tmp_path):
    """Transformers dequantizes them; attention is unaffected."""
    source = families["llama"].build("sdpa")
    write_gguf(tmp_path / "tiny.gguf", source, quantization=gguf.GGMLQuantizationType.Q8_0)
    results = {}
    for name in ("sdpa", dma_hf.NAME):
        options = {"attn_implementation": name, "dtype": torch.float32}
        model = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="tiny.gguf", **options)
        results[name] = _logits(model, token_ids(1, LENGTH))
    error = (results["sdpa"] - results[dma_hf.NAME]).norm() / results["sdpa"].norm()
    assert 0 < error < 0.05
    written = _logits(source, token_ids(1, LENGTH))
    assert (results["sdpa"] - written).norm() < 0.05 * written.norm()


@pytest.mark.parametrize("bits", [4, 8])
def test_bitsandbytes_weights_work(bits, families, token_ids, tmp_path):
    pytest.importorskip("bitsandbytes")
    families["llama"].build("sdpa").save_pretrained(tmp_path)
    results = {}
    for name in ("sdpa", dma_hf.NAME):
        quantized = BitsAndBytesConfig(**{f"load_in_{bits}bit": True})
        options = {"attn_implementation": name, "quantization_config": quantized, "device_map": {"": "cpu"}}
        model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, **options)
        assert model.model.layers[0].self_attn.q_proj.weight.dtype in (torch.int8, torch.uint8)
        results[name] = _logits(model, token_ids(1, LENGTH)).float()
    error = (results["sdpa"] - results[dma_hf.NAME]).norm() / results["sdpa"].norm()
    assert 0 < error < 0.05
