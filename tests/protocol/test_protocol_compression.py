"""Uploads in fewer bytes: what is lost, what is kept for the next time, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from comingle.protocol.messages import Upload, compress, decompress
from comingle.protocol.wire import pack, packed_bytes, unpack
from comingle.runs import api
from comingle.utils.errors import ComingleError, MessageError
from comingle.utils.files import list_checkpoints


def rows(seed: int = 0) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return {"x.a": torch.randn(2, 3, 8, generator=draw), "x.b": torch.zeros(2, 3, 5)}


def nothing(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: torch.zeros_like(t) for name, t in tensors.items()}


def test_float32_is_sent_as_it_is() -> None:
    sent, left = compress(rows(), "float32", {})
    assert left == {}
    assert all(torch.equal(sent[name], t) for name, t in decompress(rows(), "float32").items())


def test_each_row_is_rounded_to_127_levels_and_what_is_left_is_the_rest() -> None:
    tensors = rows()
    sent, left = compress(tensors, "int8", nothing(tensors))
    got = decompress(sent, "int8")
    for name, t in tensors.items():
        for user in range(2):
            for row in range(3):
                step = float(t[user, row].abs().max()) / 127
                for x, y, rest in zip(t[user, row], got[name][user, row], left[name][user, row], strict=True):
                    assert abs(float(x - y)) <= step / 2 * 1.001
                    assert float(rest) == pytest.approx(float(x - y), abs=1e-7)
    assert sent["x.a"].abs().amax(-1).eq(127).all()
    assert torch.equal(got["x.b"], tensors["x.b"])


def test_what_rounding_takes_away_is_sent_later() -> None:
    """Over n uploads of the same the error of their sum stays that of one: without feedback it would grow with n."""
    tensors = rows(1)
    left, total = nothing(tensors), nothing(tensors)
    for _ in range(50):
        sent, left = compress(tensors, "int8", left)
        total = {name: total[name] + t for name, t in decompress(sent, "int8").items()}
    step = tensors["x.a"].abs().amax(-1, keepdim=True) / 127
    assert bool(((total["x.a"] - 50 * tensors["x.a"]).abs() <= step).all())
    once = decompress(compress(tensors, "int8", nothing(tensors))[0], "int8")
    assert bool(((50 * (once["x.a"] - tensors["x.a"])).abs() > step).any())


@pytest.mark.parametrize("form", ["bfloat16", "int8"])
@pytest.mark.parametrize("rank", [0, 2])
def test_bytes_counted_are_bytes_packed_and_come_back(form: Any, rank: int) -> None:
    tensors = {name: t[:1] for name, t in rows().items()}
    if rank:
        tensors = {name: torch.cat([t[..., :rank, :], 0 * t[..., rank:, :]], -2) for name, t in tensors.items()}
    sent, _ = compress(tensors, form, nothing(tensors))
    message = Upload(round=1, users=("ada",), tensors=sent, ranks=torch.tensor([rank]))
    data = pack(message)
    assert packed_bytes(message) == [len(data)]
    back = unpack(data)
    for name, t in decompress(back.tensors, form).items():
        whole = decompress(sent, form)[name]
        assert torch.equal(t, whole[..., :rank, :] if rank else whole)


@pytest.mark.parametrize("form", ["bfloat16", "int8"])
def test_another_format_is_refused(form: Any) -> None:
    with pytest.raises(MessageError, match=r"^upload: .*'x\.[ab]'.* torch\.float32; allowed: torch"):
        decompress(rows(), form)


def test_levels_without_scales_are_refused() -> None:
    sent, _ = compress(rows(), "int8", nothing(rows()))
    del sent["x.a.scale"]
    with pytest.raises(MessageError, match=r"^upload: .*'x\.a' .*scales"):
        decompress(sent, "int8")


def test_peers_mix_what_others_have_sent(recipe_file: Path) -> None:
    with pytest.raises(ComingleError, match=r"training.uploads: got 'int8' for pcl"):
        api.run(recipe_file, method="pcl", **{"training.uploads": "int8"})


@pytest.mark.slow
def test_a_run_sends_less_scores_nearly_the_same_and_goes_on_exactly(recipe_file: Path, tmp_path: Path) -> None:
    changes = {"training.rounds": 3, "evaluation.model": "exchanged", "checkpoints.every": 1}
    full = api.run(recipe_file, method="fedavg", **changes)
    short = {**changes, "training.uploads": "int8"}
    small = api.run(recipe_file, method="fedavg", out=tmp_path / "a", **short)
    name = "upload_bytes_per_user_round"
    assert small.metrics[name] < 0.7 * full.metrics[name]
    assert small.metrics["mean_test_perplexity"] == pytest.approx(full.metrics["mean_test_perplexity"], rel=1e-2)
    assert small.metrics["mean_test_perplexity"] != full.metrics["mean_test_perplexity"]

    def stop(event: dict[str, Any]) -> None:
        if event["event"] == "step" and event["round"] == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        api.run(recipe_file, method="fedavg", out=tmp_path / "b", observers=[stop], **short)
    api.run(recipe_file, method="fedavg", out=tmp_path / "b", resume=True, **short)
    one, other = (load_file(list_checkpoints(tmp_path / folder)[-1] / "state.safetensors") for folder in ("a", "b"))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert any(name.startswith("kept/residual/") and bool(t.any()) for name, t in one.items())
