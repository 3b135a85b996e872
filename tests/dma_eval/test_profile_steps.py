"""``scripts/profile_steps.py``: how time is counted, and both of its tables, on a tiny model and a CPU."""

from __future__ import annotations

import csv
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from dma_eval.errors import UserError
from script_files import load_script

COMPUTED = {
    "generate": ["sdpa+static", "dma_mxfp:kv4+dma-static", "--context", "40"],
    "serve": ["sdpa", "dma_mxfp+int4", "--requests", "3x20-30+8", "--cache-gib", "0.01"],
}
ATTENTION, PRODUCTS, REST = (
    "attention and what stores keys and values",
    "products with weights and the sums",
    "the rest",
)


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    script = load_script("profile_steps")
    monkeypatch.setattr(script, "GENERATED_STEPS", 4)
    return script


@pytest.mark.parametrize(
    ("spans", "expected"),
    [
        ([], [0, 0]),
        ([(1, 2), (4, 7), (8, 9)], [2, 3]),
        ([(1, 3), (2, 4), (3, 3.5)], [3, 0]),
        ([(6, 7), (-5, 20), (1, 2)], [5, 5]),
        ([(1, 2), (2, 3), (10, 12)], [2, 0]),
    ],
    ids=["nothing", "apart", "overlapping", "within another", "touching"],
)
def test_time_is_counted_once(script: Any, spans: list[tuple[float, float]], expected: list[float]) -> None:
    made = [script.Span(start, end, f"kernel {end}", True) for start, end in spans]
    assert script.covered(made, [(0, 5), (5, 10)]) == expected


@pytest.mark.parametrize(
    ("kernel", "kind"),
    [
        ("decode_kernel", ATTENTION),
        ("decode_end_kernel", ATTENTION),
        ("prefill_hopper_kernel", ATTENTION),
        ("void flash::flash_fwd_splitkv_kernel<Flash_fwd_kernel_traits<128> >", ATTENTION),
        ("fmha_cutlassF_bf16_aligned_64x128_rf_sm80(PyTorchMemEffAttention::AttentionKernel)", ATTENTION),
        ("triton_poi_fused_add_cat_index_copy_mul_5", ATTENTION),
        ("nvjet_sm90_tst_64x8_64x16_4x1_v_bz_splitK_TNT", PRODUCTS),
        ("void cublasLt::splitKreduce_kernel<32, 16, int>", PRODUCTS),
        ("void gemvNSP_kernel<__nv_bfloat16>", PRODUCTS),
        ("triton_red_fused__to_copy_add_mean_mul_pow_rsqrt_2", REST),
        ("Memcpy HtoD (Pinned -> Device)", REST),
    ],
)
def test_kinds_of_kernels(script: Any, kernel: str, kind: str) -> None:
    assert script.kind_of(kernel).startswith(kind)


def test_figures(script: Any) -> None:
    """Steps of 10, 20 and 10 ms; the device works in 8, 19 and 9 of them, 1 or 2 of which two kernels share."""
    spans = [
        *((1e-3 * start, 1e-3 * end, "decode_kernel", True) for start, end in [(1, 5), (11, 20), (31, 35)]),
        *((1e-3 * start, 1e-3 * end, "nvjet", True) for start, end in [(4, 9), (18, 30), (33, 40), (50, 60)]),
        *((1e-3 * start, 1e-3 * end, "cudaGraphLaunch", False) for start, end in [(1, 2), (11, 13), (31, 32)]),
        *(
            (1e-3 * start, 1e-3 * end, "Torch-Compiled Region: 0/0", False)
            for start, end in [(0.5, 3), (11, 15), (30.5, 33)]
        ),
        (0.035, 0.036, "aten::copy_", False),
    ]
    cells = script.figures([0, 0.008, 0.015, 0.024], [0, 0.01, 0.03, 0.04], [script.Span(*span) for span in spans])
    assert list(cells.values()) == ["3", "8.00", "10.00", "9.00", "4.00", "7.00", "", "", "1.50", "1.00", "90.0"]
    assert list(cells)[:3] == ["steps", "a step, without the profiler, ms", "a step, in the profile, ms"]


def test_one_clock(script: Any) -> None:
    recorder = script.Recorder(torch.device("cpu"))
    recorder.start()
    begin = time.perf_counter()
    torch.ones(8, 8) @ torch.ones(8, 8)
    end = time.perf_counter()
    (product,) = (span for span in recorder.stop() if span.name == "aten::mm")
    assert begin - 0.1 < product.start < product.end < end + 0.1  # two clocks are hours apart
    assert not product.on_device


def test_a_device_that_was_not_recorded(script: Any) -> None:
    recorder = script.Recorder(torch.device("cpu"))
    recorder._is_cuda = True
    recorder.start()
    with pytest.raises(RuntimeError, match="the profiler saw nothing on the device"):
        recorder.stop()


def test_steps_in_which_all_decode(script: Any) -> None:
    times = [[0, 10, 20, 30, 40, 50, 60, 70], [15, 20, 30, 40, 50, 60, 70, 80], [12, 20, 30, 40, 61]]
    assert script.steady(times) == [20, 30, 40, 50, 60]
    with pytest.raises(UserError, match="expected 3 steps in which all decode, got fewer; ask for more tokens"):
        script.steady([*times, [30, 55]])


@pytest.mark.parametrize("command", COMPUTED)
def test_table(command: str, script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "profile.csv"
    options = ["--device", "cpu", "--shape", "tiny", "--layers", "1", "--out", str(path)]
    monkeypatch.setattr("sys.argv", ["x", command, *COMPUTED[command], *options])
    script.main()
    with path.open(encoding="utf-8", newline="") as file:
        (_, *labels), *rows = csv.reader(file)
    assert labels == COMPUTED[command][:2]
    cells = {what: values for what, *values in rows}
    assert cells["device"] == ["cpu", "cpu"]
    assert cells["model"] == ["tiny, 1 layers, bfloat16"] * 2
    assert {"torch", "triton", "transformers"} < set(cells)
    for what in ("steps", "a step, without the profiler, ms", "a step, in the profile, ms"):
        assert all(float(value) > 0 for value in cells[what])
    assert cells["the device works, ms"] == cells["the device works, % of a step"] == ["", ""]
    if command == "generate":
        assert cells["steps"] == ["4", "4"]


def test_wrong_requests(script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    options = ["--device", "cpu", "--shape", "tiny", "--out", str(tmp_path / "x.csv"), "--requests", "2x20000+4"]
    monkeypatch.setattr("sys.argv", ["x", "serve", "sdpa", *options])
    with pytest.raises(SystemExit) as stopped:
        script.main()
    assert stopped.value.code == 2
    assert "2x20000+4 has 20004 tokens, and the model 16384 positions" in capsys.readouterr().err
