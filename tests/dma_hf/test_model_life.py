"""Models can be copied, saved, switched, adapted, quantized and run in threads."""

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
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, TorchAoConfig

import dma_hf

LENGTH = 300  # over two tiles, so that the presets differ


@pytest.fixture
def ids(token_ids):
    return token_ids(1, LENGTH)


@pytest.fixture
def llama(families):
    model = families["llama"].build("dma_mxfp")
    dma_hf.configure(model, "paper")
    return model


@pytest.mark.parametrize("clone", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))], ids=["deepcopy", "pickle"])
def test_a_copy_computes_the_same(clone, llama, ids):
    twin, paper = clone(llama), llama(ids).logits
    assert torch.equal(twin(ids).logits, paper)
    dma_hf.configure(twin, "balanced")
    assert not torch.equal(twin(ids).logits, paper)
    assert torch.equal(llama(ids).logits, paper)  # the copy has its own settings


def test_a_dropped_model_is_freed_at_once(families, token_ids):
    model = families["llama"].build("dma_mxfp")
    dma_hf.configure(model, cache="int8")
    model.generate(token_ids(1, 20), max_new_tokens=2, do_sample=False)
    weight = weakref.ref(model.lm_head.weight)
    gc.disable()
    try:
        del model
        assert weight() is None
    finally:
        gc.enable()


def test_a_cache_is_refused_if_the_language_model_runs_another_attention(llava):
    """It would never be used."""
    llava.set_attn_implementation({"vision_config": "dma_mxfp"})
    with pytest.raises(ValueError, match=r"cache='int4' is for the language model, which runs attention 'sdpa', not"):
        dma_hf.configure(llava, "balanced", cache="int4")
    assert dma_hf.configure(llava, "balanced", cache=None).cache is None
    llava.set_attn_implementation({"text_config": "dma_mxfp"})
    assert dma_hf.configure(llava, "balanced", cache="int4").cache == "int4"


@pytest.mark.parametrize("part", ["text_config", "vision_config"])
def test_parts_of_a_composite_model_may_differ_in_attention(part, llava):
    """``dma_mxfp`` in one part and SDPA in the other, and back. Settings start from those of the part."""
    ids = torch.randint(3, 90, (1, LENGTH), generator=torch.Generator().manual_seed(0))
    ids[:, 4:20] = 96
    images = {"pixel_values": torch.randn(1, 3, 32, 32, generator=torch.Generator().manual_seed(1))}
    sdpa = llava(input_ids=ids, **images).logits
    llava.set_attn_implementation({part: "dma_mxfp:paper+int4"})
    logits = llava(input_ids=ids, **images).logits
    assert 0 < (logits - sdpa).norm() < 0.5 * sdpa.norm()
    assert dma_hf.configure(llava) == dma_hf.DMAConfig.from_preset("paper", cache="int4")
    assert llava.config._attn_implementation == "sdpa"
    assert torch.equal(llava(input_ids=ids, **images).logits, logits)
    llava.set_attn_implementation("sdpa")
    assert torch.equal(llava(input_ids=ids, **images).logits, sdpa)
    llava.set_attn_implementation({"text_config": "dma_mxfp:paper", "vision_config": "dma_mxfp:fp4"})
    assert dma_hf.configure(llava) == dma_hf.PRESETS["paper"]  # the language model's


def test_models_in_threads_keep_their_settings(families, ids):
    """All first forward passes start at the same time."""
    settings = ["paper", "fp4", "balanced"] * 2
    models = [families["llama"].build("dma_mxfp") for _ in settings]
    for model, setting in zip(models, settings, strict=True):
        dma_hf.configure(model, setting)

    def run(model):
        with torch.no_grad():  # of the thread
            return model(ids).logits

    with ThreadPoolExecutor(len(models)) as pool:
        together = list(pool.map(run, models))
    for model, logits in zip(models, together, strict=True):
        assert torch.equal(logits, run(model))
    assert not torch.equal(together[0], together[1])


def _quantization(kind):
    """Return arguments of ``from_pretrained``."""
    if kind == "gguf":
        return {"gguf_file": "tiny.gguf"}
    if kind == "torchao":
        from torchao.quantization import Int8WeightOnlyConfig

        return {"quantization_config": TorchAoConfig(Int8WeightOnlyConfig())}
    pytest.importorskip("bitsandbytes")
    return {"quantization_config": BitsAndBytesConfig(**{f"load_in_{kind}bit": True}), "device_map": {"": "cpu"}}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["torchao", "gguf", 4, 8])
def test_quantized_weights_work(kind, families, ids, tmp_path):
    source = families["llama"].build("sdpa")
    source.save_pretrained(tmp_path)
    write_gguf(tmp_path / "tiny.gguf", source, quantization=gguf.GGMLQuantizationType.Q8_0)
    results = {}
    for name in ("sdpa", "dma_mxfp"):
        options = {"attn_implementation": name, "dtype": torch.float32} | _quantization(kind)
        model = AutoModelForCausalLM.from_pretrained(tmp_path, **options)
        weight = model.model.layers[0].self_attn.q_proj.weight
        assert (type(weight) is torch.nn.Parameter and weight.is_floating_point()) == (kind == "gguf")  # dequantized
        results[name] = model(ids).logits.float()
    error = (results["sdpa"] - results["dma_mxfp"]).norm() / results["sdpa"].norm()
    assert 0 < error < 0.05
    if kind == "gguf":
        written = source(ids).logits
        assert (results["sdpa"] - written).norm() < 0.05 * written.norm()


def test_peft_adapters_work(llama, ids):
    peft = pytest.importorskip("peft")
    base = llama(ids).logits
    settings = peft.LoraConfig(r=4, target_modules=["q_proj", "k_proj"], init_lora_weights=False)
    model = peft.get_peft_model(llama, settings).eval()
    adapted = model(ids).logits
    assert not torch.allclose(adapted, base, atol=1e-3)
    with model.disable_adapter():
        assert torch.equal(model(ids).logits, base)
    dma_hf.configure(model, "balanced")  # through the wrapper
    assert not torch.equal(model(ids).logits, adapted)
    dma_hf.configure(model, "paper")
    torch.testing.assert_close(model.merge_and_unload()(ids).logits, adapted, rtol=1e-2, atol=1e-2)


def test_prefix_tuning_does_not_warn_of_another_cache(llama, ids):
    """Its prefix is a cache of 16 bits, whatever the cache of decoding steps is."""
    peft = pytest.importorskip("peft")
    dma_hf.configure(llama, cache="int8")
    model = peft.get_peft_model(llama, peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4))
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*another cache")
        model(input_ids=ids)
