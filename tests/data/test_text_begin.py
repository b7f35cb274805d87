"""Texts of bases whose tokenizer begins every text with a token: windows, scores, prompts, and runs of before."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from tests.quick import TINY_TRAINING
from tokenizers import processors

import comingle
from comingle.config import load_recipe, parse_recipe
from comingle.federation.public import public_part
from comingle.methods.base import Phase
from comingle.models.generation import encode_prompt
from comingle.models.loading import load_base
from comingle.models.pretrained import PreTrainedModel, PreTrainedTokenizerBase
from comingle.models.random_bases import BOS, EOS, byte_tokenizer
from comingle.models.scoring import PAD, evaluation_windows, fixed_windows, hide, inputs_of, prompt_ends, random_windows
from comingle.serving.answers import Prompts
from comingle.utils.errors import DataError, RunError
from comingle.utils.seeds import generator

TEXT = ["The dog ran to the park and it met a cat there. " * 4] * 6
Loaded = tuple[PreTrainedModel, PreTrainedTokenizerBase]


@pytest.fixture(scope="module")
def loaded() -> Loaded:
    tokenizer: Any = byte_tokenizer()
    processor = processors.TemplateProcessing(single="<|bos|> $A", special_tokens=[("<|bos|>", BOS)])
    tokenizer.backend_tokenizer.post_processor = processor
    assert tokenizer("ab")["input_ids"] == [BOS, 97, 98]
    return load_base("random:llama?layers=1&dim=16&heads=2&mlp=32", dtype="float32", device="cpu").model, tokenizer


def trained(loaded: Loaded, method: str = "pretrained", **options: Any) -> comingle.Run:
    users, base = {"ada": TEXT, "ben": TEXT}, {"base": loaded, "method": method}
    return comingle.run({"training": TINY_TRAINING}, users=users, **base, **options)


# ---------------------------------------------------------------- windows


def shown(windows: torch.Tensor) -> torch.Tensor:
    """Windows as a model reads them, hidden tokens shown."""
    return torch.where(windows < PAD, hide(windows), windows)


def test_every_window_begins_with_the_token_and_every_token_is_a_target_once() -> None:
    stream, context = torch.arange(1, 12, dtype=torch.int32), 4
    windows = evaluation_windows(stream, context=context, begin=99)
    assert shown(windows).tolist() == [[99, 1, 2, 3, 4], [99, 4, 5, 6, 7], [99, 7, 8, 9, 10], [99, 10, 11, PAD, PAD]]
    targets = windows[:, 1:]
    assert targets[targets >= 0].tolist() == stream.tolist()
    assert inputs_of(windows).tolist() == [[99, 1, 2, 3], [99, 4, 5, 6], [99, 7, 8, 9], [99, 10, 11, 0]]
    for length in range(6):
        for few in (1, 2, 3):
            targets = evaluation_windows(stream[:length], context=few, begin=99)[:, 1:]
            assert targets.shape[1] == few
            assert targets[targets >= 0].tolist() == stream[:length].tolist()


def test_fixed_windows_have_no_token_in_common() -> None:
    stream = torch.arange(1, 10, dtype=torch.int32)
    windows = fixed_windows(stream, context=4, begin=99)
    assert shown(windows).tolist() == [[99, 1, 2, 3, 4], [99, 5, 6, 7, 8]]
    assert (windows[:, 1:] >= 0).sum(1).tolist() == [4, 3]


def test_random_windows_begin_with_the_token_and_reach_both_ends() -> None:
    stream = torch.arange(1, 12, dtype=torch.int32)
    windows = random_windows(stream, count=200, context=4, generator=generator("w"), begin=99)
    read = shown(windows)
    assert set(windows[:, 0].tolist()) == {99}
    assert set(read[:, 1].tolist()) == set(range(1, 9))
    assert torch.equal(read[:, 2:], read[:, 1:2] + torch.arange(1, 4))
    assert torch.equal(windows[:, 1] >= 0, read[:, 1] == 1)  # predicted where the text begins
    assert (windows[:, 2:] > 0).all()
    exact = random_windows(stream[:4], count=2, context=4, generator=generator("w"), begin=99)
    assert exact.tolist() == [[99, 1, 2, 3, 4]] * 2


def test_windows_of_text_have_no_prompt() -> None:
    windows = evaluation_windows(torch.arange(1, 9), context=4, begin=99)
    assert prompt_ends(windows).tolist() == [3, 3, 1]


def test_training_and_scores_use_such_windows(loaded: Loaded) -> None:
    clients = trained(loaded, "comigs-1g1s").federation.clients
    batch_source = clients.batch_source
    for stream in ("train", "valid"):
        drawn = batch_source.draw([0, 1], Phase(roles=frozenset(), stream=stream), 1, 0, 0)
        assert (drawn[..., 0] == BOS).all()
        assert (drawn[..., 2:] >= 0).all()
        assert (drawn[..., 1:] != BOS).all()
    assert all((windows[..., 0] == BOS).any() for windows in batch_source.held_out([0, 1]))
    assert (batch_source.examples_at([0], torch.tensor([[0, 1]]), 1)[..., 0] == BOS).all()


def test_a_context_of_tokens_is_enough(loaded: Loaded) -> None:
    limits: dict[str, Any] = {"max_train_tokens": 16, "max_valid_tokens": 16, "max_test_tokens": 1}
    changes: dict[str, Any] = {"data": limits, "training.context": 16}
    run = trained(loaded, "comigs-1g1s", **changes)
    assert run.metrics["users"]["ada"]["test_perplexity"] > 1
    with pytest.raises(DataError, match=r"'ada' .*train .*16 tokens.* 17.*context 16"):
        trained(loaded, **{**changes, "data": {**limits, "add_bos_token": False}})


# ---------------------------------------------------------------- scores


def naive_loss(model: PreTrainedModel, stream: list[int], context: int) -> float:
    """Mean loss in nats of each token, given the token and so many before it as there is room for, in windows."""
    total, done = 0.0, 0
    while done < len(stream):
        start = max(0, done - 1) if context > 1 else done
        part = stream[start : start + context]
        ids = torch.tensor([[BOS, *part]])
        losses = -model(input_ids=ids).logits[0, :-1].log_softmax(-1)[range(len(part)), part]
        total += float(losses[done - start :].sum())
        done = start + len(part)
    return total / len(stream)


def test_scores_are_those_of_transformers_with_the_token(loaded: Loaded) -> None:
    run, (model, tokenizer) = trained(loaded), loaded
    test = run.federation.clients.users[0].test.tolist()
    assert test[-1] == EOS
    assert math.log(run.metrics["users"]["ada"]["test_perplexity"]) == pytest.approx(
        naive_loss(model, test, 16), rel=1e-5
    )
    person, text = run.user("ada"), "The cat ran to a park"
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    for context in (len(ids), 128, 5, 2, 1):
        loss = torch.tensor(person.perplexity(text, context=context)).log()
        assert float(loss) == pytest.approx(naive_loss(model, ids, context), rel=1e-5)
    assert person.perplexity("a") > 1
    ids = tokenizer(text, return_tensors="pt")["input_ids"]
    loss = float(model(input_ids=ids, labels=ids).loss)  # as transformers has it
    assert math.log(person.perplexity(text)) == pytest.approx(loss, rel=1e-5)


def test_without_the_key_scores_are_as_before(loaded: Loaded) -> None:
    run, plain = trained(loaded, data={"add_bos_token": False}), trained((loaded[0], byte_tokenizer()))
    assert run.metrics["users"] == plain.metrics["users"]
    assert run.user("ada").generate("The cat", max_new_tokens=5) == plain.user("ada").generate(
        "The cat", max_new_tokens=5
    )
    assert run.user("ada").perplexity("The cat") == plain.user("ada").perplexity("The cat")


# ---------------------------------------------------------------- prompts


def test_prompts_begin_with_the_token_once(loaded: Loaded) -> None:
    run, tokenizer = trained(loaded), loaded[1]
    model: Any = loaded[0]
    prompt = tokenizer("The dog", return_tensors="pt")
    stock = model.generate(**prompt, max_new_tokens=8, do_sample=False, pad_token_id=EOS)[0, len("The dog") + 1 :]
    said = run.user("ada").generate(["The dog", "A"], max_new_tokens=8)[0]
    assert said == tokenizer.decode(stock, skip_special_tokens=True)
    assert encode_prompt(tokenizer, "ab", BOS) == [BOS, 97, 98]
    assert encode_prompt(tokenizer, "<|bos|>ab", BOS) == [BOS, 97, 98]
    assert encode_prompt(tokenizer, "", BOS) == [BOS]
    assert encode_prompt(tokenizer, [97, 98], BOS) == [97, 98]


def test_the_servers_completions_begin_with_the_token(loaded: Loaded) -> None:
    model: Any = trained(loaded).federation.clients.model
    prompts = Prompts(model.base)
    assert prompts.of_texts("ab") == [[BOS, 97, 98]]
    assert prompts.of_texts(["a", [98]]) == [[BOS, 97], [98]]


def test_routes_are_those_of_windows(loaded: Loaded) -> None:
    person = trained(loaded, "comigs-1g1s").user("ada")
    text = "The dog ran to the park"
    whole = person.route(text, context=len(text) + 1)
    assert len(whole.tokens) == whole.gates.shape[1] == len(text)
    exact = person.route(torch.tensor([BOS, *text.encode()]), context=len(text) + 1, begins=False)
    assert torch.equal(exact.gates[:, 1:], whole.gates)
    assert person.route(text, context=5).gates.shape == whole.gates.shape


# ---------------------------------------------------------------- runs of before


def recipe_in(folder: Path, **data: Any) -> dict[str, Any]:
    texts = {}
    for name in ("ada", "ben"):
        texts[name] = str(folder / f"{name}.txt")
        Path(texts[name]).write_text("\n\n".join(TEXT))
    runtime = {"dtype": "float32", "device": "cpu"}
    return {
        "base": str(folder / "base"),
        "method": "fedavg",
        "data": {"users": texts, **data},
        "training": TINY_TRAINING,
        "checkpoints": {"every": 1},
        "runtime": runtime,
    }


def save(loaded: Loaded, folder: Path) -> None:
    for part in loaded:
        part.save_pretrained(folder / "base")


def as_older(run: Path) -> None:
    """Leave out of a run folder what versions before the key did not write."""
    content = yaml.safe_load((run / "recipe.yaml").read_text())
    del content["data"]["add_bos_token"]
    (run / "recipe.yaml").write_text(yaml.safe_dump(content))


class StoppedError(Exception):
    pass


def stop(event: dict[str, Any]) -> None:
    if event["event"] == "step" and event["round"] == 2:
        raise StoppedError


def test_a_run_that_an_older_version_began_goes_on_as_it_was(loaded: Loaded, tmp_path: Path) -> None:
    save(loaded, tmp_path)
    whole = comingle.run(recipe_in(tmp_path, add_bos_token=False), out=tmp_path / "whole")
    today = comingle.run(recipe_in(tmp_path))
    assert today.metrics["users"] != whole.metrics["users"]
    with pytest.raises(StoppedError):
        comingle.run(recipe_in(tmp_path, add_bos_token=False), out=tmp_path / "older", observers=[stop])
    as_older(tmp_path / "older")
    assert "add_bos_token" not in load_recipe(tmp_path / "older").result_content["data"]  # so the fingerprint stays
    with pytest.raises(RunError, match=r"data\.add_bos_token .*None .*True"):
        comingle.run(recipe_in(tmp_path, add_bos_token=True), out=tmp_path / "older", resume=True)
    resumed = comingle.run(recipe_in(tmp_path), out=tmp_path / "older", resume=True)
    assert resumed.metrics["users"] == whole.metrics["users"]
    opened: Any = comingle.load(tmp_path / "older")
    assert opened.federation.clients.model.base.begin is None
    assert opened.user("ada").perplexity("The cat") == whole.user("ada").perplexity("The cat")
    assert comingle.run(tmp_path / "older").metrics["users"] == whole.metrics["users"]


def test_a_comparison_that_an_older_version_began_stays_comparable(loaded: Loaded, tmp_path: Path) -> None:
    save(loaded, tmp_path)
    older, out = recipe_in(tmp_path, add_bos_token=False), tmp_path / "compared"
    whole = comingle.compare(older, ["fedavg", "local"], seeds=[0])
    comingle.run(older, method="fedavg", out=out / "fedavg-seed0")
    as_older(out / "fedavg-seed0")
    again = comingle.compare(recipe_in(tmp_path), ["fedavg", "local"], seeds=[0], out=out, resume=True)
    for key, metrics in again.metrics.items():
        assert metrics["users"] == whole.metrics[key]["users"]


def test_a_federation_tells_its_participants_and_older_ones_keep_their_digest(tmp_path: Path) -> None:
    def public(**data: Any) -> Any:
        recipe = parse_recipe(
            {"base": "random:llama", "method": "fedavg", "data": {"given": True, "kind": "text", **data}}
        )
        return public_part(recipe, ("ada", "ben"), {}, None)

    today, off = public(), public(add_bos_token=False)
    assert today.recipe["data"] == {"kind": "text", "add_bos_token": True, "given": True}
    assert off.recipe["data"] == {"kind": "text", "given": True}
    assert today.digest != off.digest
    assert today.whole_recipe().data.add_bos_token  # type: ignore[attr-defined]
    assert not off.whole_recipe().data.add_bos_token  # type: ignore[attr-defined]
