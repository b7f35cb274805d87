"""What tests of exports need: users' models trained a little, and how a network is compared with one of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from comingle.config import parse_recipe
from comingle.methods import REGISTRY, make
from comingle.models.personal import PersonalModel
from comingle.runs.results import Run
from federations import everyone, play_round

FAMILIES = ("llama", "mistral", "qwen3", "gpt2")
IDS = torch.arange(3, 27).unsqueeze(0) * 11 % 256
RANKS = {"adapters.rank": [1, 3, 2]}
_RATE = {"training.experts.learning_rate": 0.05}


def of_text() -> list[str]:
    """Methods whose users may have a language model."""
    mixtures = {name: make(name).placement.mixture for name in REGISTRY}
    return [name for name, m in mixtures.items() if m is None or (m.of == "adaptors" and not m.optimal)]


def trained(federate: Callable[..., Any], method: Any, changes: Mapping[str, Any] | None = None, **options: Any) -> Run:
    """After two rounds at a high rate, so that no two users are alike, with gates that differ between tokens."""
    sim = federate(method, changes={**_RATE, **(changes or {})}, **{"dtype": "float32", **options})
    for number in range(2):
        play_round(sim, number)
    sim.download(everyone(sim))
    for name, view in sim.clients.model.layout.views(sim.clients.state.rows).items():
        if name.endswith(".router"):
            view.mul_(20)
    method = sim.clients.method.name
    recipe = parse_recipe({"method": method, "data": {"users": {"somebody": "unused"}}})
    return Run(folder=None, recipe=recipe, metrics={"method": method}, federation=sim)


def own_logits(person: PersonalModel, ids: Tensor = IDS) -> Tensor:
    with person.generating() as network, torch.no_grad():
        return network(input_ids=ids).logits.clone()


def perplexity(logits: Tensor, ids: Tensor = IDS) -> float:
    return float(torch.nn.functional.cross_entropy(logits[0, :-1].double(), ids[0, 1:]).exp())


def greedy(network: Any, prompt: Tensor = IDS[:, :8]) -> list[int]:
    said = network.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=12, do_sample=False)
    return said[0].tolist()


def check_same(person: PersonalModel, network: Any, ids: Tensor = IDS) -> None:
    """Logits within 1e-4, the same perplexity to four digits, the same greedy continuation."""
    with torch.no_grad():
        ours, theirs = own_logits(person, ids), network(input_ids=ids).logits
    torch.testing.assert_close(theirs, ours, rtol=0, atol=1e-4)
    assert f"{perplexity(theirs, ids):.4g}" == f"{perplexity(ours, ids):.4g}"
    with person.generating() as own:
        assert greedy(network) == greedy(own)
