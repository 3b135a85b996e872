"""The kernels on every supported version of Triton: in its interpreter, and calls compiled for an H100.

Without a GPU, so that it shows whether a version can run and compile the kernels, not how fast they are.
"""

from __future__ import annotations

from pathlib import Path

import decode_cases
import prefill_cases
import pytest
import torch
from compiled_calls import CompiledCalls

SUPPORT = Path(__file__).parents[1] / "support"


@pytest.mark.parametrize("case", ["causal", "left-padded"])
@pytest.mark.parametrize("recipe", ["balanced", "fp4", "paper"])
def test_prompts_match_the_reference(recipe: str, case: str) -> None:
    recipes, cases = prefill_cases.RECIPES, prefill_cases.CASES
    prefill_cases.assert_matches_reference(cases[case], recipes[recipe], torch.float16, "cpu")


@pytest.mark.parametrize("format", ["int8", "int4"])
def test_decoding_steps_match_the_reference(format: str) -> None:
    decode_cases.assert_steps_match(decode_cases.CASES["ragged-across-boundaries"], format, torch.float16, "cpu")


@pytest.mark.parametrize(
    ("program", "call"),
    [
        *(("aot.py", f"{recipe}:90:128{length}") for recipe in ("balanced", "int8-pv16") for length in ("", ":long")),
        ("aot_decode.py", "int4:90:128:128:1"),
    ],
)
def test_kernels_compile_and_spill_no_tile(program: str, call: str, tmp_path: Path) -> None:
    compiled = CompiledCalls(SUPPORT / program, tmp_path)
    for kernel in compiled[call]:
        assert kernel["loop_spills"] <= 2, kernel["name"]  # of scalars: a tile would take more
    compiled.close()
