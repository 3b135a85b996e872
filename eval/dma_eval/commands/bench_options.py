"""Options of ``dma-hf bench``, a dataclass for each command, and what is measured by default."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from dma_eval import options
from dma_eval.bench.requests import parse_requests
from dma_eval.bench.results import DecodeShape, PrefillShape
from dma_eval.bench.shapes import DOCUMENTS, parse_heads, parse_shape, parse_size
from dma_eval.command import option
from dma_eval.names import check_yarn

if TYPE_CHECKING:
    import torch

SHAPES = [
    *(f"1x{1024 << i}:32/8:128" for i in range(8)),
    *("1x16384:32/8:64", "1x16384:32/32:128", "1x16384:32/8:128:full"),
]
CPU_SHAPES = ["1x256:4/2:64", "1x1024:4/2:64"]
SIZES, CPU_SIZES = ["1x4096", "1x32768", "1x131072", "8x4096", "8x32768", "64x4096"], ["1x4096"]
CONTEXTS, CPU_CONTEXTS = [8192, 32768, 65536, 131072], [256, 512]
MIN_NEW_TOKENS = 8
REQUESTS, CPU_REQUESTS = ["32x2048+64", "8x16384+32"], ["8x64-512+16-32"]
SERVED = ["sdpa", "dma_mxfp", "dma_mxfp+int8", "dma_mxfp+int4"]
DEFAULT_MODEL, CPU_MODEL = "llama-3.1-8b", "tiny"

INPUTS = "Inputs of a model, not random ones"
inputs_option = partial(option, panel=INPUTS)
url_option = partial(option, panel="A server, measured from outside")
seconds_option = partial(option, min=0, help="About how long one shape is measured, without compilation.")


@dataclass(frozen=True, kw_only=True)
class BenchOptions(options.RunOptions):
    """Options of every benchmark."""

    dtype: Literal["bfloat16", "float16", "float32"] = option(
        "bfloat16", help="Data type of what is not quantized; float32 is for generate and serve."
    )
    json: Path | None = options.json_option()


@dataclass(frozen=True, kw_only=True)
class ModelChoice(BenchOptions):
    """A model with random weights, or a real one."""

    shape: Literal["llama-3.1-8b", "llama-3.2-1b", "tiny"] | None = option(
        None, shown=f"{DEFAULT_MODEL}; on a CPU {CPU_MODEL}", help="Model with random weights."
    )
    model: str | None = option(
        None, "-m", metavar=options.MODEL["metavar"], help="Hub name, local folder, or GGUF file; instead of --shape."
    )

    def name_on(self, device: torch.device) -> str:
        """The model's name, or that of the default shape for a device."""
        return self.model or self.shape or (DEFAULT_MODEL if device.type == "cuda" else CPU_MODEL)


@dataclass(frozen=True, kw_only=True)
class PrefillOptions(BenchOptions):
    """The shapes and the implementations to time."""

    attn: list[str] = option(
        [],
        "-a",
        metavar="IMPLEMENTATION...",
        shown="all that the device runs without other packages, with every preset",
        help="What to compare; the first is the reference. PyTorch: sdpa (its own choice), sdpa:flash, sdpa:cudnn, "
        "flex (FlexAttention). This package: dma_mxfp:PRESET, dma_mxfp:FILE.toml. Other packages: fa3, fa3:fp8 "
        "(fa3-fwd); fa4 (flash-attn-4); cudnn:fp8 (nvidia-cudnn-frontend); flashinfer, flashinfer:t5 to t8, "
        "which skip tiles (flashinfer-python); sage (sageattention). Quantization is counted, except in "
        "fa3:fp8:prequantized and cudnn:fp8:prequantized.",
    )
    shape: list[str] = option(
        [],
        metavar="SHAPE...",
        shown="1024 to 131072 tokens, and three others at 16384; on a CPU two small ones",
        help="Shapes of random inputs: BATCHxTOKENS:QUERY/KV:HEAD_DIM, for instance 8x4096:32/8:128. They are causal; "
        f":full at the end is bidirectional, and :documents packs {DOCUMENTS} causal documents in each sequence.",
    )
    inputs: str | None = inputs_option(
        None,
        metavar=options.MODEL["metavar"],
        help="Time the queries, keys and values that this model computes from --data.",
    )
    data: str | None = options.data_option(
        None, "Text file or Hub dataset. Each sequence is another window of it.", panel=INPUTS
    )
    length: list[int] = inputs_option([], metavar="TOKENS...", min=1, help="Tokens of a window.")
    batch: int = inputs_option(1, min=1, help="Windows of the text.")
    head_dim: list[int] = inputs_option(
        [], metavar="DIM...", min=1, shown="the model's own", help="Head dimensions; wider heads embed the model's."
    )
    layers: int | None = inputs_option(
        None, min=1, shown="all with full attention", help="Time this many of the model's layers, evenly spaced."
    )
    yarn: float | None = options.yarn_option(panel=INPUTS)
    seconds: float = seconds_option(1.5)
    markdown: Path | None = options.markdown_option()
    plot: Path | None = options.plot_option()

    def __post_init__(self) -> None:
        """Check what needs no imports."""
        super().__post_init__()
        check_yarn(self.yarn)
        for value in self.shape:
            parse_shape(value)

    def shapes_on(self, device: torch.device) -> list[PrefillShape]:
        """The shapes to measure, with the defaults for a device."""
        return [parse_shape(value) for value in self.shape or (SHAPES if device.type == "cuda" else CPU_SHAPES)]


@dataclass(frozen=True, kw_only=True)
class DecodeOptions(BenchOptions):
    """The steps and the caches to time."""

    cache: list[str] = option(
        [],
        "-c",
        metavar="CACHE...",
        shown="sdpa sdpa:flash sdpa:dynamic, sdpa+quanto4 if optimum-quanto is installed, dma_mxfp:balanced+int8 "
        "dma_mxfp:balanced+int4",
        help="What to compare; the first is the reference. PyTorch on preallocated keys and values: sdpa (its own "
        "choice), sdpa:flash. After the concatenation of a DynamicCache: sdpa:dynamic. After a QuantizedCache: "
        "sdpa+quanto4, sdpa+hqq8 and others. FlashAttention-3 (the package fa3-fwd): fa3, fa3:fp8. This "
        "package: dma_mxfp:PRESET+CACHE, dma_mxfp:FILE.toml+CACHE.",
    )
    size: list[str] = option(
        [],
        metavar="BATCHxKEYS...",
        shown=f"{' '.join(SIZES)}; on a CPU {' '.join(CPU_SIZES)}",
        help="Sequences and keys of each.",
    )
    heads: list[str] = option(["32/8"], metavar="QUERY/KV...", help="Query and kv heads.")
    head_dim: list[int] = option([128], metavar="DIM...", min=1, help="Head dimensions.")
    seconds: float = seconds_option(0.5)

    def __post_init__(self) -> None:
        """Check what needs no imports."""
        super().__post_init__()
        for heads in self.heads:
            parse_heads(heads)
        for size in self.size:
            parse_size(size)

    def shapes_on(self, device: torch.device) -> list[DecodeShape]:
        """The shapes to measure, with the defaults for a device."""
        sizes = self.size or (SIZES if device.type == "cuda" else CPU_SIZES)
        return [
            DecodeShape(length=length, batch=batch, head_dim=head_dim, query_heads=heads[0], kv_heads=heads[1])
            for heads, head_dim in product(map(parse_heads, self.heads), self.head_dim)
            for batch, length in map(parse_size, sizes)
        ]


@dataclass(frozen=True, kw_only=True)
class GenerateOptions(ModelChoice):
    """The model, the contexts and the caches."""

    data: str | None = options.data_option(None, "Text file or Hub dataset for the prompts of --model.", panel=None)
    yarn: float | None = options.yarn_option()
    context: list[int] = option(
        [], metavar="TOKENS...", min=1, shown="8192 to 131072; on a CPU 256 and 512", help="Tokens of the prompt."
    )
    runs: list[str] = option(
        [],
        "--run",
        "-r",
        metavar="ATTENTION+CACHE...",
        shown="sdpa with dynamic and static, flash_attention_3+dynamic if installed, dma_mxfp:balanced with dynamic, "
        "int8 and int4",
        help="What to compare; the first is the reference. Caches: dynamic (Transformers' default); static "
        "(Transformers' static cache, whose steps it compiles on a GPU); int8, int4 (DMACache).",
    )
    batch: int = option(1, min=1, help="Sequences.")
    new_tokens: int = option(48, min=MIN_NEW_TOKENS, help="Tokens to generate in each sequence.")
    weights: Literal["fp8"] | None = option(
        None,
        shown="as --dtype says",
        help="Quantize the weights of linear layers after loading: fp8 (torchao, a scale per row and per token).",
    )
    longest: bool = option(False, help="Also find the longest context that fits; needs a GPU.")

    def __post_init__(self) -> None:
        """Check what needs no imports."""
        super().__post_init__()
        check_yarn(self.yarn)

    def contexts_on(self, device: torch.device) -> list[int]:
        """The contexts to measure, with the defaults for a device.

        They ascend: a static cache of ``generate`` is at least as large as the largest before.
        """
        return sorted(set(self.context or (CONTEXTS if device.type == "cuda" else CPU_CONTEXTS)))


@dataclass(frozen=True, kw_only=True)
class ServeOptions(ModelChoice):
    """The model, the requests and the backends."""

    layers: int | None = option(None, min=1, shown="as many as the model of its name has", help="Layers of --shape.")
    requests: list[str] = option(
        [],
        metavar="COUNTxPROMPT+NEW...",
        shown=f"{' '.join(REQUESTS)}; on a CPU {' '.join(CPU_REQUESTS)}",
        help="Requests that arrive at the same time: number, tokens of a prompt, tokens to generate. A length may be a "
        "range such as 64-512, from which each request draws its own.",
    )
    attn: list[str] = option(
        SERVED,
        "-a",
        metavar="BACKEND...",
        help="Backends to compare; the first is the reference. sdpa, eager, dma_mxfp, dma_mxfp:PRESET and "
        "dma_mxfp:FILE.toml use 16-bit pages; add +int8 or +int4 for packed pages. vllm and vllm:fp8 (FP8 cache) need "
        "the package vllm, and run the same shape with random weights.",
    )
    cache_gib: float | None = option(
        None,
        min=0,
        shown="most of the free memory; on a CPU what all requests need",
        help="Memory for the paged cache, in GiB, the same for all.",
    )
    plot: Path | None = options.plot_option()
    compile: bool = option(False, help="Compile the batches of the model; vLLM always does.")
    url: str | None = url_option(
        None,
        help="Address of a server with OpenAI's interface, with /v1. It is measured instead of --attn. --model is the "
        "model's name there, by default its only one; OPENAI_API_KEY is the key.",
    )
    rate: list[float] = url_option(
        [], metavar="RATE...", min=0.001, shown="all at once", help="Requests per second, on average, at random times."
    )
    tokenizer: str | None = url_option(
        None,
        metavar="NAME|FOLDER",
        shown="the model's name",
        help="Tokenizer to make prompts with: Hub name or local folder.",
    )
    extra_body: str = url_option(
        '{"ignore_eos": true}',
        metavar="JSON",
        help="Further fields of every request; {} for servers without ignore_eos, where answers may end early.",
    )

    def __post_init__(self) -> None:
        """Check what needs no imports."""
        super().__post_init__()
        if self.requests:
            parse_requests(self.requests)
