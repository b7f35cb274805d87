"""Keys and values of a mixture's components, whatever the installed transformers calls them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel

from comingle.models.ensembles import Mixing, cache_name, mix_forward
from comingle.models.loading import load_base


class Old(PreTrainedModel):
    def forward(self, input_ids: Any = None, past_key_values: Any = None) -> None: ...


class New(PreTrainedModel):
    def forward(self, input_ids: Any = None, cache: Any = None) -> None: ...


@pytest.mark.parametrize(("network", "name"), [(Old, "past_key_values"), (New, "cache")])
def test_a_cache_is_called_as_the_networks_forward_calls_it(network: type[PreTrainedModel], name: str) -> None:
    assert cache_name(network) == name


def test_a_mixture_that_goes_on_from_its_cache_says_what_it_says_of_the_whole_text() -> None:
    network: Any = load_base("random:llama?layers=2&dim=16&heads=2&mlp=32&vocab=259&ctx=32").model
    weights: Mixing = torch.tensor([[0.3, 0.7]]), None  # one user with two components, alike here
    mix_forward(network, lambda: weights)
    ids = torch.randint(40, (2, 9), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        name, kept = cache_name(type(network)), DynamicCache(config=network.config)
        network(input_ids=ids[:, :6], use_cache=True, **{name: kept})
        later = network(input_ids=ids[:, 6:], use_cache=True, **{name: kept})
        whole = network(input_ids=ids, use_cache=False)
    assert kept.get_seq_length() == 9
    assert torch.allclose(later.logits, whole.logits[:, 6:], atol=1e-5)
