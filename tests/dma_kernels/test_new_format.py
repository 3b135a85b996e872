"""An 8-bit format added as in ``docs/extending.md``, in five files, runs on the reference and a kernel."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import dma_kernels
import pytest
import torch

PACKAGE = Path(dma_kernels.__file__).parent
EDITS = {
    "numerics/formats.py": [
        (
            "BLOCK_FORMATS = {f.name: f for f in (MXFP4, ",
            'E5M2 = ElementFormat("E5M2", emax=15, max_value=57344.0, bits=8)\n'
            'TOY8 = BlockFormat("toy8", E5M2, 32, ScaleFormat.E8M0)\n'
            "BLOCK_FORMATS = {f.name: f for f in (TOY8, MXFP4, ",
        )
    ],
    "numerics/quantize.py": [
        (
            "    formats.E4M3: (to_e4m3, Tensor.float),\n",
            "    formats.E4M3: (to_e4m3, Tensor.float),\n"
            "    block_format('toy8').element: (\n"
            "        lambda x: x.clamp(-57344.0, 57344.0).to(torch.float8_e5m2), Tensor.float\n"
            "    ),\n",
        )
    ],
    "runtime/operand_formats.py": [
        (
            "TILE_SCALED = (INT8, E4M3)",
            'TOY8 = OperandFormat("toy8", torch.float8_e5m2, Scale.TILE, padding=32, holds="toy8", min_arch=89)\n'
            "TILE_SCALED = (INT8, E4M3, TOY8)",
        )
    ],
    "device/blocks.py": [
        ("e8m0_reciprocal, round_to_e4m3, with_sign", "e8m0_reciprocal, round_to_e4m3, round_to_toy8, with_sign"),
        (
            '    elif FORMAT == "mxfp8":\n        rounded = _to_e4m3_and_back(x)\n',
            '    elif FORMAT == "mxfp8":\n        rounded = _to_e4m3_and_back(x)\n'
            '    elif FORMAT == "toy8":\n        rounded = round_to_toy8(x)\n',
        ),
        (
            '    elif FORMAT == "mxfp8":\n        code = e8m0_encode(',
            '    elif FORMAT == "toy8":\n        code = e8m0_encode(amax, 15, 0x600000, IS_CEIL)\n'
            '    elif FORMAT == "mxfp8":\n        code = e8m0_encode(',
        ),
    ],
    "device/arithmetic.py": [
        (
            "@triton.jit\ndef to_elements(",
            "@triton.jit\ndef round_to_toy8(x):\n"
            "    binade = (tl.maximum(x, 0.00006103515625).to(tl.int32, bitcast=True) & 0x7F800000)\n"
            "    large = binade.to(tl.float32, bitcast=True) * 2097152.0\n"
            "    return tl.minimum((x + large) - large, 57344.0)\n\n\n"
            "@triton.jit\ndef to_elements(",
        ),
        (
            '    else:\n        tl.static_assert(FORM == "e4m3"',
            '    elif FORM == "toy8":\n        elements = to_e5m2(with_sign(round_to_toy8(tl.abs(x)), x))\n'
            '    else:\n        tl.static_assert(FORM == "e4m3"',
        ),
    ],
}
"""Replacements by file: old text and new text."""

PROGRAM = """
import torch
from dma_kernels import Recipe, attention, quantize
from dma_kernels.prefill.quantizer import quantize_keys_values
from dma_kernels.runtime import chip
from dma_kernels.prefill.config import select_compute_path
from dma_kernels.testing import assert_bits_equal, random_qkv, relative_error

query, key, value = random_qkv(q_len=300, kv_len=300, head_dim=32, dtype=torch.float16)
tile, block = Recipe(low="toy8", shared_scale="tile", sink_tiles=0), Recipe(low="toy8", sink_tiles=0)
exact = attention(query.double(), key.double(), value.double(), Recipe(low="bf16"))
for recipe, paths in ((tile, {90: "8bit", 80: "portable"}), (block, {90: "portable"})):
    reference = attention(query.float(), key.float(), value.float(), recipe)
    assert 1e-3 < relative_error(reference, exact) < 0.2
    for chip.INTERPRETED_ARCH, name in paths.items():
        path = select_compute_path(recipe, chip.INTERPRETED_ARCH)
        assert path.name == name
        assert relative_error(attention(query, key, value, recipe, backend="triton"), reference) < 2e-3
        made = quantize_keys_values(key, value, recipe, path, kv_offset=0, seq_info=None)
        expected = quantize(key, "toy8", shared_scale=recipe.shared_scale)
        if name == "8bit":
            assert_bits_equal(made.low.key[:, :, :300], expected.data)
        else:
            assert_bits_equal(made.low.key[:, :, :300], expected.dequantize().bfloat16())
"""


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter runs it")
def test_an_8_bit_format_takes_five_files(tmp_path: Path) -> None:
    copy = tmp_path / "dma_kernels"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    for name, edits in EDITS.items():
        text = (copy / name).read_text(encoding="utf-8")
        for old, new in edits:
            assert text.count(old) == 1, f"{name}: {old}"
            text = text.replace(old, new)
        (copy / name).write_text(text, encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "TRITON_INTERPRET": "1"}
    result = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, env=environment)
    assert result.returncode == 0, result.stderr[-3000:]


def test_the_documentation_names_these_files() -> None:
    page = (Path(__file__).parents[2] / "docs" / "extending.md").read_text(encoding="utf-8")
    section = page.split("\n## A format\n")[1].split("\n## ")[0]
    named = re.findall(r"`kernels/dma_kernels/([\w/]+\.py)`", section)
    assert len(EDITS) <= 5
    assert set(EDITS) <= set(named)
