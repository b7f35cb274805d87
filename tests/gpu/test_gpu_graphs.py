"""Passes that are recorded and replayed: on a CPU by plain calls, which shows all but the capture itself."""

from __future__ import annotations

import gc
import logging
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import METHODS, ON_TEXT, method, text_recipe
from on_device import Played, play, recipe_of
from torch import Tensor

from comingle.config.settings import AdaptersSection
from comingle.models import gpu
from comingle.models.adapted import AdaptedModel, adapt
from comingle.models.injection import ExpertCounts
from comingle.models.loading import load_base

GRAPHS = {"runtime.gpu": ["graphs"]}
MIXED = {name: mixture for name in ON_TEXT if (mixture := METHODS[name].placement.mixture) is not None}
REFUSED = [name for name, mixture in MIXED.items() if not mixture.trains_independently]
"""They wrap every linear by themselves on text."""
SHORT = {"training.rounds": 1, "evaluation.first": False}

# Client-level mixtures run a base's attention (sdpa, as nothing else is said on a GPU) under torch.vmap.
pytestmark = pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")


def recordings_of(played: Played) -> dict[Any, gpu.Recording | None]:
    model = played.federation.clients.model
    return getattr(getattr(model, "inner", model), "recordings", {})


@pytest.mark.parametrize("name", [name for name in ON_TEXT if name not in REFUSED])
def test_every_method_does_what_it_does_without(tmp_path: Path, device: str, rounding: float, name: str) -> None:
    """To the last bit where a replay is a plain call: a copy that was forgotten shows."""
    content = text_recipe(tmp_path, method(name))
    plain, replayed = play(recipe_of(content, device, **SHORT)), play(recipe_of(content, device, **SHORT, **GRAPHS))
    if torch.cuda.is_available():
        assert float((plain.rows - replayed.rows).norm()) <= rounding * float((plain.rows - plain.start).norm())
        assert None not in recordings_of(replayed).values()
    else:
        assert torch.equal(plain.rows, replayed.rows)
        assert plain.losses == replayed.losses


@pytest.mark.parametrize("changes", [{"runtime.micro_batch": 1}, {"adapters.balance": "uniform", "adapters.top_k": 1}])
def test_micro_batches_and_penalties(tmp_path: Path, device: str, rounding: float, changes: dict[str, Any]) -> None:
    content = text_recipe(tmp_path, method("comigs-2s"))
    plain, replayed = (play(recipe_of(content, device, **SHORT, **changes, **more)) for more in ({}, GRAPHS))
    assert recordings_of(replayed)
    if torch.cuda.is_available():
        assert torch.allclose(plain.rows, replayed.rows, atol=rounding)
    else:
        assert torch.equal(plain.rows, replayed.rows)


def model_on(device: str, attention: str = "auto") -> AdaptedModel:
    base = load_base("random:llama?layers=2&dim=16&heads=2", dtype="float32", device=device, attention=attention)
    counts = ExpertCounts(generalists=1, specialists=(1, 1, 1))
    return gpu.recorded(adapt(base, AdaptersSection(rank=2), counts, routed=True, compiled=False))


@pytest.fixture(params=[pytest.param("cuda", marks=pytest.mark.gpu), "cpu"])
def model(request: pytest.FixtureRequest) -> AdaptedModel:
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA GPU here")
    return model_on(request.param)


def tensors_of(model: AdaptedModel, users: int, seed: int = 0) -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(seed)
    rows = (torch.randn(users, model.layout.columns, generator=random) * 0.1).to(model.device)
    return {name: t.contiguous().requires_grad_() for name, t in model.layout.views(rows).items()}


def windows_of(model: AdaptedModel, users: int, width: int, seed: int = 0) -> Tensor:
    return torch.randint(0, 256, (users, 2, width), generator=torch.Generator().manual_seed(seed)).to(model.device)


def solved(model: AdaptedModel, tensors: dict[str, Tensor], windows: Tensor) -> list[Tensor]:
    losses, _ = model.losses(tensors, range(len(windows)), windows, train=True)
    return [losses.detach(), *torch.autograd.grad(losses.sum(), list(tensors.values()))]


def plainly(model: AdaptedModel, tensors: dict[str, Tensor], windows: Tensor) -> list[Tensor]:
    plain = AdaptedModel(**{name: value for name, value in vars(model).items() if name != "recordings"})
    return solved(plain, tensors, windows)


def test_shapes_have_a_recording_each(model: AdaptedModel) -> None:
    recordings: Any = getattr(model, "recordings")  # noqa: B009
    for seed, (users, width, found) in enumerate([(2, 5, 1), (2, 5, 1), (2, 7, 2), (3, 5, 3), (2, 5, 3)]):
        given = tensors_of(model, users, seed), windows_of(model, users, width, seed)
        replayed = solved(model, *given)
        assert len(recordings) == found
        torch.testing.assert_close(replayed, plainly(model, *given), rtol=1e-4, atol=1e-6)
    frozen = tensors_of(model, 2)
    frozen["layers.0.mlp.router" if "layers.0.mlp.router" in frozen else next(iter(frozen))].requires_grad_(False)
    losses, _ = model.losses(frozen, [0, 1], windows_of(model, 2, 5), train=True)
    losses.sum().backward()
    assert len(recordings) == 4


def test_results_outlive_the_next_replay(model: AdaptedModel) -> None:
    windows = windows_of(model, 2, 5)
    first = solved(model, tensors_of(model, 2), windows)
    copies = [t.clone() for t in first]
    solved(model, tensors_of(model, 2, 1), windows)
    assert all(torch.equal(t, copy) for t, copy in zip(first, copies, strict=True))


def test_two_passes_before_their_gradients(model: AdaptedModel) -> None:
    """The second one may not write over what the first one's gradients are made of."""
    one, other, windows = tensors_of(model, 2), tensors_of(model, 2, 1), windows_of(model, 2, 5)
    both = [model.losses(tensors, [0, 1], windows, train=True)[0].sum() for tensors in (one, other)]
    found = [torch.autograd.grad(loss, list(t.values())) for loss, t in zip(both, (one, other), strict=True)]
    for tensors, gradients in zip((one, other), found, strict=True):
        torch.testing.assert_close(list(gradients), plainly(model, tensors, windows)[1:], rtol=1e-4, atol=1e-6)


def test_one_is_replayed_as_a_whole_before_the_next(model: AdaptedModel) -> None:
    """They use the same memory, so another one is not begun while gradients of the first may still be wanted."""
    tensors, recordings = tensors_of(model, 2), getattr(model, "recordings")  # noqa: B009
    widths = [windows_of(model, 2, width) for width in (5, 7)]
    for windows in widths:
        solved(model, tensors, windows)
    assert len({id(recording.pool) for recording in recordings.values()}) == 1
    both = [model.losses(tensors, [0, 1], windows, train=True)[0].sum() for windows in widths]
    assert [recording.busy for recording in recordings.values()] == [True, False]
    for loss, windows in zip(both, widths, strict=True):
        found = torch.autograd.grad(loss, list(tensors.values()))
        torch.testing.assert_close(list(found), plainly(model, tensors, windows)[1:], rtol=1e-4, atol=1e-6)


def test_a_replay_has_its_gradients_once(model: AdaptedModel) -> None:
    tensors, windows = tensors_of(model, 2), windows_of(model, 2, 5)
    loss = model.losses(tensors, [0, 1], windows, train=True)[0].sum()
    torch.autograd.grad(loss, list(tensors.values()), retain_graph=True)
    with pytest.raises(AssertionError):
        torch.autograd.grad(loss, list(tensors.values()))


def test_a_model_does_not_wait_for_the_garbage_collector() -> None:
    """Which a GPU that is full does not call."""
    model = model_on("cpu")
    solved(model, tensors_of(model, 2), windows_of(model, 2, 5))
    there = weakref.ref(model)
    gc.disable()
    try:
        del model
        assert there() is None
    finally:
        gc.enable()


def test_what_is_captured_is_what_is_done_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """While a stream is captured transformers looks at nothing, and would hand layers a mask in the place of none."""
    model, masks = model_on("cpu", "sdpa"), []
    layer = model.network.get_submodule("model.layers.0")
    layer.register_forward_pre_hook(
        lambda _, __, given: masks.append(given.get("attention_mask")),  # type: ignore[arg-type]
        with_kwargs=True,
    )
    given = tensors_of(model, 2), windows_of(model, 2, 5)
    plainly(model, *given)
    monkeypatch.setattr("transformers.utils.import_utils.is_cuda_stream_capturing", lambda: True)
    solved(model, *given)
    assert len(masks) > 1
    assert masks == [None] * len(masks)


def test_a_pass_that_nobody_wants_gradients_of_is_not_waited_for(model: AdaptedModel) -> None:
    tensors, windows = tensors_of(model, 2), windows_of(model, 2, 5)
    model.losses(tensors, [0, 1], windows, train=True)
    (recording,) = getattr(model, "recordings").values()  # noqa: B009
    assert not recording.busy


def test_scores_are_not_recorded(model: AdaptedModel) -> None:
    with torch.no_grad():
        model.predict(tensors_of(model, 2), [0, 1], windows_of(model, 2, 5))
    assert not getattr(model, "recordings")  # noqa: B009


def test_no_more_than_so_many(model: AdaptedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "MAX_RECORDINGS", 1)
    for width in (5, 6):
        given = tensors_of(model, 2), windows_of(model, 2, width)
        torch.testing.assert_close(solved(model, *given), plainly(model, *given), rtol=1e-4, atol=1e-6)
    assert len(getattr(model, "recordings")) == 1  # noqa: B009


def test_what_cannot_be_recorded_is_told_and_runs(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: Any) -> None:
        raise RuntimeError("operation not permitted when stream is capturing")

    model = model_on("cpu")
    monkeypatch.setattr(gpu, "capture", refuse)
    given = tensors_of(model, 2), windows_of(model, 2, 5)
    with caplog.at_level(logging.WARNING, "comingle"):
        for _ in range(2):
            assert all(map(torch.equal, solved(model, *given), plainly(model, *given)))
    (record,) = caplog.records
    assert record.message.startswith("runtime.gpu: ")
    assert "operation not permitted when stream is capturing" in record.message
