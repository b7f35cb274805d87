"""Token by token: the gates that the models really used, and tokens that put together are the text."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from comingle.models.personal import PersonalModel
from comingle.models.random_bases import byte_tokenizer
from comingle.models.routing import pieces, route
from comingle.runs.results import Run
from comingle.training.client import Clients
from comingle.utils.errors import DataError


def person(clients: Clients, row: int) -> PersonalModel:
    tensors = {name: tensor[row : row + 1] for name, tensor in clients.model.layout.views(clients.state.rows).items()}
    return PersonalModel(name=clients.users[row].name, model=clients.model, tensors=tensors, row=row)


@pytest.fixture(scope="module")
def clients(federate: Any) -> Any:
    made = federate({"name": "comigs-1gxs", "specialists": [1, 2, 0]}).clients
    made.state.rows += torch.randn(made.state.rows.shape, generator=torch.Generator().manual_seed(0)) * 0.3 * made.mask
    return made


def test_gates_are_those_of_the_blocks_own_input(clients: Any) -> None:
    """The router's product with what really went into each MLP, and softmax over its two largest."""
    tokens, ann = clients.users[0].test[:20], person(clients, 0)
    seen: list[torch.Tensor] = []
    mlps = clients.model.adapters.experts
    hooks = [mlp.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0][0])) for mlp in mlps.values()]
    found = ann.route(tokens, context=128)
    for hook in hooks:
        hook.remove()
    assert found.experts == ("generalist", "specialist")
    assert found.gates.shape == (2, 20, 2)
    for layer, (name, x) in enumerate(zip(mlps, seen, strict=True)):
        expected = (x @ ann.tensors[f"{name}.router"][0, :2].mT).softmax(-1)
        assert torch.allclose(found.gates[layer].double(), expected, atol=1e-3)
    assert (found.gates[..., 0] > 0.5).any()
    assert (found.gates[..., 0] < 0.5).any()


def test_the_mean_of_the_gates_is_the_score_of_the_evaluation(clients: Any) -> None:
    """The same numbers by two ways, but for the last token of the test text, which is only a target there."""
    for row, score in enumerate(clients.evaluate()):
        tokens, one = clients.users[row].test, person(clients, row)
        gates = one.route(tokens[:-1], context=clients.plan.training.context).gates.double()
        for layer, expected in zip(gates.mean(1).tolist(), score.expert_scores, strict=True):
            assert layer == pytest.approx(expected[: len(layer)], abs=1e-3)


def test_a_long_text_goes_through_in_passes() -> None:
    sizes = []

    def forward(part: torch.Tensor) -> torch.Tensor:
        sizes.append(len(part))
        return torch.stack([part / 100, 1 - part / 100], -1).unsqueeze(0).double()

    gates = route(forward, torch.arange(70, dtype=torch.int32), context=32)
    assert sizes == [32, 32, 6]
    assert gates[0, :, 0].tolist() == pytest.approx([i / 100 for i in range(70)], abs=5e-4)


def test_a_text_can_be_routed_and_nothing_cannot(federate: Any, clients: Any) -> None:
    bob = person(clients, 1)
    assert bob.route("grüß").tokens == ("g", "r", "", "ü", "", "ß")
    assert bob.route("a").experts == ("generalist", "specialist 1", "specialist 2")
    assert person(clients, 2).route("abc").gates.unique().tolist() == [1.0]
    with pytest.raises(DataError, match=r"user 'bob': .*tokens"):
        bob.route("")
    with pytest.raises(DataError, match=r"user 'ann': .*no routers"):
        person(federate("local").clients, 0).route("a")


@pytest.mark.parametrize("text", ["plain words", " grüße, 世界 🙂\n\ttab", "", "🙂🙂"])
def test_pieces_put_together_are_the_text(text: str) -> None:
    tokenizer = byte_tokenizer()
    assert "".join(pieces(tokenizer, tokenizer(text)["input_ids"])) == text


def test_bytes_that_are_no_text_are_shown_as_such() -> None:
    tokenizer = byte_tokenizer()
    found = pieces(tokenizer, [ord("a"), 0xFF, 0xFE, 0xFD, 0xFC, ord("b"), 256])
    assert found[0] == "a"
    assert found[-2:] == ["b", "<|eos|>"]
    assert set("".join(found[1:-2])) == {"\N{REPLACEMENT CHARACTER}"}


def test_pieces_of_a_sentencepiece_vocabulary_keep_their_spaces(shared_data: Any) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(shared_data / "models" / "stories260K")
    text = "Once upon a time, there was a ü and a 世."
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert "".join(pieces(tokenizer, ids)).strip() == text


def test_a_run_routes_by_name(recipe_file: Any) -> None:
    from comingle.runs import api

    done: Run = api.run(recipe_file)
    gates = done.user("cem").route("some words", context=4).gates
    assert gates.sum(-1).unique().tolist() == pytest.approx([1.0], abs=2e-3)
