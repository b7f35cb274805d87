"""A user's adapters merged into plain weights: exact where each linear has one LoRA, refused elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from comingle.config import parse_recipe
from comingle.models.personal import PersonalModel
from comingle.runs.results import Run
from comingle.utils.errors import DataError
from federations import everyone, play_round

Person = Callable[..., PersonalModel]
RANKS = {"adapters.rank": [1, 3, 2]}
IDS = torch.arange(3, 19).unsqueeze(0)


@pytest.fixture(scope="module")
def person(federate: Any) -> Person:
    """A user after two rounds of training at a high rate, so that no two users are alike."""

    def make(method: Any, changes: Mapping[str, Any] | None = None, *, name: str = "bob", **options: Any) -> Any:
        rate = {"training.experts.learning_rate": 0.05}
        sim = federate(method, changes={**rate, **(changes or {})}, **options)
        for number in range(2):
            play_round(sim, number)
        sim.download(everyone(sim))
        recipe = parse_recipe({"method": sim.clients.method.name, "data": {"users": {"somebody": "unused"}}})
        return Run(folder=None, recipe=recipe, metrics={}, federation=sim).user(name)

    return make


def logits(person: PersonalModel) -> torch.Tensor:
    with person.generating() as network, torch.no_grad():
        return network(input_ids=IDS).logits.clone()


@pytest.mark.parametrize(
    ("method", "changes"),
    [
        ("fedit", {}),
        ({"name": "fedmerge", "models": 2}, {}),
        ({"name": "fedmerge-fixed", "models": 3, "chosen": 2}, {}),
        ({"name": "ifca", "models": 2}, {}),
        ("hetlora", RANKS),
        ("flexlora", RANKS),
        ({"name": "comigs", "specialists": [1, 0, 2]}, {}),
        ("fedavg", {"adapters.mix": "linear"}),
    ],
)
def test_the_merged_model_says_what_the_personal_one_does(person: Person, method: Any, changes: Any) -> None:
    bob = person(method, changes)
    base = bob.model.base.model
    before, own = base(input_ids=IDS).logits, logits(bob)
    merged = bob.merge()
    assert type(merged) is type(base)
    assert merged.state_dict().keys() == base.state_dict().keys()
    assert (own - before).abs().max() > 1e-3
    torch.testing.assert_close(merged(input_ids=IDS).logits, own, rtol=1e-9, atol=1e-9)
    assert torch.equal(base(input_ids=IDS).logits, before)  # the base is nobody's to change


@pytest.mark.parametrize("base", ["random:gpt2", "random:opt", "random:phi", "random:gemma3"])
def test_every_layout_is_merged(person: Person, base: str) -> None:
    bob = person("fedit", base=base)
    torch.testing.assert_close(bob.merge()(input_ids=IDS).logits, logits(bob), rtol=1e-9, atol=1e-9)


def test_users_of_different_ranks_have_models_of_their_own(person: Person) -> None:
    ann, bob = (person("flexlora", RANKS, name=name) for name in ("ann", "bob"))
    assert not torch.allclose(ann.merge()(input_ids=IDS).logits, bob.merge()(input_ids=IDS).logits)


def test_a_merged_model_is_saved_and_opened_by_transformers(person: Person, tmp_path: Path) -> None:
    bob = person("fedit", dtype="float32")
    bob.merge().save_pretrained(tmp_path / "bob")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "bob", dtype=torch.float32)
    torch.testing.assert_close(again(input_ids=IDS).logits, logits(bob), rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("method", "why"),
    [
        ("comigs-1g1s", "2 experts .*token"),
        ({"name": "comigs", "specialists": [0, 2, 1]}, "3 experts .*token"),
        ("ffa-lora", "2 experts .*nonlinearity"),
        ("fedlora", "2 experts .*nonlinearity"),
    ],
)
def test_experts_behind_a_nonlinearity_are_refused_with_the_reason(person: Person, method: Any, why: str) -> None:
    with pytest.raises(DataError, match=f"user 'bob': .*{why}; "):
        person(method).merge()
