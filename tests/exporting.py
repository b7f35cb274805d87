"""What tests of exports need: every method of text on tiny bases, trained a little, and how two networks are compared."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

from comingle.models.personal import PersonalModel
from comingle.recipes import parse_recipe
from comingle.runs.results import Run
from federations import everyone, play_round

RATE = {"training.experts.learning_rate": 0.05, "training.router.learning_rate": 0.5}
IDS = torch.arange(3, 27).unsqueeze(0) * 11 % 256


def trained(federate: Callable[..., Any], method: Any, changes: Mapping[str, Any] | None = None, **options: Any) -> Run:
    """After two rounds at a high rate, so that no two users are alike; in float32."""
    sim = federate(method, dtype="float32", changes={**RATE, **(changes or {})}, **options)
    for number in range(2):
        play_round(sim, number)
    sim.download(everyone(sim))
    for slot in (s for s in sim.clients.model.layout.slots if s.name.endswith(".router")):
        views = sim.clients.model.layout.views(sim.clients.state.rows)  # gates that differ from token to token
        views[slot.name].mul_(20)
    name = sim.clients.method.name
    recipe = parse_recipe({"method": name, "data": {"users": {"somebody": "unused"}}})
    return Run(folder=None, recipe=recipe, metrics={"method": name}, federation=sim)


def own_logits(person: PersonalModel, ids: torch.Tensor = IDS) -> torch.Tensor:
    with person.generating() as network, torch.no_grad():
        return network(input_ids=ids).logits.clone()


def greedy(network: Any, prompt: torch.Tensor = IDS[:, :8]) -> list[int]:
    said = network.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=12, do_sample=False)
    return said[0].tolist()


def perplexity(logits: torch.Tensor, ids: torch.Tensor = IDS) -> float:
    lost = torch.nn.functional.cross_entropy(logits[0, :-1].double(), ids[0, 1:])
    return float(lost.exp())


def same(person: PersonalModel, network: Any) -> None:
    """Logits within 1e-4, perplexity to four digits, and the same greedy continuation."""
    ours, theirs = own_logits(person), network(input_ids=IDS).logits.detach()
    torch.testing.assert_close(theirs, ours, rtol=0, atol=1e-4)
    assert f"{perplexity(theirs):.4g}" == f"{perplexity(ours):.4g}"
    with person.generating() as own:
        assert greedy(network) == greedy(own)


def renamed(person: PersonalModel, name: str) -> PersonalModel:
    return replace(person, name=name)
