from __future__ import annotations

from pathlib import Path

import pytest
import torch

from comingle.models import hardware
from comingle.models.hardware import fast_bf16, resolve_attention, resolve_device, resolve_dtype
from comingle.models.loading import load_base
from comingle.utils.errors import BaseModelError

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("features", "expected"),
    [
        ({"avx512_bf16"}, torch.bfloat16),
        ({"amx_bf16"}, torch.bfloat16),
        ({"amx_bf16", "avx512_bf16", "avx512_fp16"}, torch.bfloat16),
        ({"avx512_bf16", "avx512_fp16"}, torch.float32),
        ({"avx2", "avx512_f"}, torch.float32),
        (set(), torch.float32),
    ],
)
def test_auto_dtype_follows_the_processor(
    monkeypatch: pytest.MonkeyPatch, features: set[str], expected: torch.dtype
) -> None:
    monkeypatch.setattr(hardware, "cpu_features", lambda: features)
    assert fast_bf16(CPU) is (expected is torch.bfloat16)
    assert resolve_dtype("auto", CPU) is expected


def test_older_torch_reads_proc_cpuinfo(monkeypatch: pytest.MonkeyPatch) -> None:
    if not Path("/proc/cpuinfo").is_file():
        pytest.skip("no /proc/cpuinfo on this platform")
    now = fast_bf16(CPU)
    monkeypatch.delattr(torch.cpu, "get_capabilities", raising=False)
    assert fast_bf16(CPU) is now


def test_no_fast_bf16_where_unknown() -> None:
    assert not fast_bf16(torch.device("mps"))


@pytest.mark.parametrize("name", ["bfloat16", "float16", "float32", "float64"])
def test_named_dtypes(name: str) -> None:
    assert resolve_dtype(name, CPU) is getattr(torch, name)


@pytest.mark.parametrize("got", ["fp16", "int8", ""])
def test_other_dtypes_are_refused(got: str) -> None:
    with pytest.raises(BaseModelError, match=f"dtype: got '{got}'; .*auto, bfloat16, float16, float32, float64"):
        load_base("random:gpt2", dtype=got)


def test_auto_device_takes_cuda_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert resolve_device("auto") == torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert resolve_device("auto") == resolve_device("cpu") == CPU


def test_absent_devices_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(BaseModelError, match=r"device: got 'cuda', .*auto or cpu"):
        load_base("random:gpt2", device="cuda")
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    with pytest.raises(BaseModelError, match=r"device: got 'mps', .*auto or cpu"):
        resolve_device("mps")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert resolve_device("cuda:1") == torch.device("cuda:1")
    with pytest.raises(BaseModelError, match=r"device: got 'cuda:2', .* 2 "):
        resolve_device("cuda:2")


@pytest.mark.parametrize("got", ["gpu", "", "meta", "xpu"])
def test_unknown_devices_are_refused(got: str) -> None:
    with pytest.raises(BaseModelError, match=f"device: got '{got}'; .*auto, cpu, cuda, cuda:N, mps"):
        resolve_device(got)


def test_attention() -> None:
    assert resolve_attention("auto", CPU) == "eager"
    assert resolve_attention("auto", torch.device("cuda")) is None
    assert resolve_attention("sdpa", CPU) == "sdpa"
    assert load_base("random:llama", device="cpu").model.config._attn_implementation == "eager"
    with pytest.raises(BaseModelError, match=r"attention: got 'flash'; .*auto, eager, sdpa"):
        load_base("random:llama", attention="flash")
