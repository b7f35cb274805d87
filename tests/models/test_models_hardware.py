from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from comingle.data.samples.samples import Samples, bank_of
from comingle.models import hardware
from comingle.models.hardware import fast_bf16, resolve_attention, resolve_device, resolve_dtype, reused_empty
from comingle.models.loading import load_base
from comingle.models.side_by_side import _Products
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


LARGE = hardware._REUSED_BYTES // 4


@pytest.fixture
def reuse(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reuse the memory of large tensors, as after ``keep_buffers``, which would change the test's whole process."""
    if not sys.platform.startswith("linux"):
        pytest.skip("mappings are reused on Linux alone")
    monkeypatch.setattr(hardware, "_reuses_mappings", True)
    monkeypatch.setattr(hardware, "_mappings", [])


@pytest.mark.usefixtures("reuse")
def test_memory_is_reused_once_no_tensor_has_it() -> None:
    first = reused_empty((2, LARGE), torch.zeros(1))
    view, address = first[1], first.data_ptr()
    del first
    other = reused_empty((2, LARGE), torch.zeros(1))
    assert other.data_ptr() != address  # the view still needs it
    del view
    assert reused_empty((LARGE,), torch.zeros(1)).data_ptr() == address  # and it may be larger than needed
    assert len(hardware._mappings) == 2


@pytest.mark.usefixtures("reuse")
def test_mappings_that_are_too_small_are_freed() -> None:
    reused_empty((LARGE,), torch.zeros(1))
    larger = reused_empty((3, LARGE), torch.zeros(1, dtype=torch.bfloat16))
    assert larger.shape == (3, LARGE)
    assert larger.dtype == torch.bfloat16
    assert [len(mapping) for mapping in hardware._mappings] == [larger.nbytes]


@pytest.mark.usefixtures("reuse")
def test_small_and_pretended_tensors_have_no_mappings() -> None:
    reused_empty((LARGE - 1,), torch.zeros(1))
    with FakeTensorMode():
        assert isinstance(reused_empty((LARGE,), torch.zeros(1)), FakeTensor)
    assert not hardware._mappings


@pytest.mark.usefixtures("reuse")
def test_large_gradients_and_batches_take_the_same_memory_in_each_step() -> None:
    generator = torch.Generator().manual_seed(0)
    bank = bank_of([Samples(inputs=torch.randn(64, 32 * LARGE // 1024, generator=generator), targets=torch.arange(64))])
    batch = torch.arange(32).expand(1, 32)
    for _ in range(3):
        inputs, _targets, _present = bank.take([0], batch)
        assert torch.equal(inputs[0], bank.inputs[:32])
        weight = torch.randn(1, 32, inputs.shape[-1], generator=generator, requires_grad=True)
        _Products.apply(inputs, weight).sum().backward()
        assert len(hardware._mappings) == 2
        del inputs, weight
