"""Many users' models in one pass (functional_call under vmap) against the same users one after another."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from clusters import scatter
from torch import Tensor, nn
from torch.func import functional_call, vmap

from comingle.models.floral.model import FloralModel, roles
from comingle.models.floral.wrapper import floral

USERS = 3


def network() -> nn.Module:
    """Every kind of layer once."""
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1, groups=2),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.InstanceNorm2d(4, affine=True),
        nn.Conv2d(4, 4, (3, 2), stride=2, padding=1, padding_mode="circular"),
        nn.GroupNorm(2, 4),
        nn.Flatten(2),
        nn.Conv1d(4, 2, 3),
        nn.Flatten(),
        nn.LazyLinear(6),
        nn.LayerNorm(6),
        nn.Tanh(),
        nn.Linear(6, 3),
    ).double()


def people(**settings: Any) -> list[FloralModel]:
    base = network()
    base(torch.randn(2, 2, 6, 5, dtype=torch.float64))  # the lazy layer learns its size
    first = floral(base, num_clusters=2, rank=2, **settings)
    users = [copy.deepcopy(first) for _ in range(USERS)]
    for user in users:
        scatter(user)
    return users


def stacked(users: list[FloralModel]) -> dict[str, Tensor]:
    trees = [{**dict(user.named_parameters()), **dict(user.named_buffers())} for user in users]
    own = set(dict(users[0].named_parameters()))
    return {name: torch.stack([tree[name].detach() for tree in trees]).requires_grad_(name in own) for name in trees[0]}


@pytest.mark.parametrize("conv", ["balanced-2d", "channel", "filter", "linear"])
@pytest.mark.parametrize("batch_nora", [False, True])
def test_stacked_users_are_the_users_alone(conv: str, batch_nora: bool) -> None:
    users = people(conv=conv, batch_nora=batch_nora)
    tensors = stacked(users)
    x = torch.randn(USERS, 5, 2, 6, 5, dtype=torch.float64)
    model = copy.deepcopy(users[0])

    def call(own: dict[str, Tensor], x: Tensor) -> Tensor:
        return functional_call(model, own, (x,))

    for train in (True, True, False):  # twice, so that the statistics of the users have drifted apart
        model.train(train)
        y = vmap(call)(tensors, x)
        names = [name for name, tensor in tensors.items() if tensor.requires_grad]
        gradients = torch.autograd.grad(y.square().mean((1, 2)).sum(), [tensors[name] for name in names])
        for i, user in enumerate(users):
            user.train(train).zero_grad()
            own = user(x[i])
            torch.testing.assert_close(y[i], own)
            own.square().mean().backward()
            for name, gradient in zip(names, gradients, strict=True):
                torch.testing.assert_close(gradient[i], user.get_parameter(name).grad, msg=name)
            for name, buffer in user.named_buffers():
                torch.testing.assert_close(tensors[name][i], buffer, msg=name)


def test_each_user_may_be_given_a_mixture() -> None:
    users = people()
    tensors = stacked(users)
    x, given = torch.randn(USERS, 5, 2, 6, 5, dtype=torch.float64), torch.eye(2, dtype=torch.float64)[[0, 1, 0]]
    model = users[0]

    def call(own: dict[str, Tensor], x: Tensor, mixture: Tensor) -> Tensor:
        return functional_call(model, own, (x,), {"mixture": mixture})

    y = vmap(call)(tensors, x, given)
    for i, user in enumerate(users):
        torch.testing.assert_close(y[i], copy.deepcopy(user)(x[i], mixture=given[i]))


def test_all_clusters_of_one_user_are_evaluated_in_one_pass() -> None:
    user = people()[0].eval()
    x, every = torch.randn(5, 2, 6, 5, dtype=torch.float64), torch.eye(2, dtype=torch.float64)
    y = vmap(lambda mixture: user(x, mixture=mixture))(every)
    for cluster in range(2):
        torch.testing.assert_close(y[cluster], user.merge(every[cluster])(x))


def test_noise_differs_between_users() -> None:
    users = people(noise=0.5)
    x = torch.randn(5, 2, 6, 5, dtype=torch.float64).expand(USERS, -1, -1, -1, -1)
    same = {name: tensor[:1].expand_as(tensor).detach().clone() for name, tensor in stacked(users).items()}
    y = vmap(lambda own, x: functional_call(users[0], own, (x,)), randomness="different")(same, x)
    assert not torch.allclose(y[0], y[1])


def test_a_frozen_language_model_is_shared_while_its_adaptors_are_the_users() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=11, hidden_size=8, intermediate_size=12, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, attn_implementation="eager",
    )  # fmt: skip
    model = floral(LlamaForCausalLM(config).double(), num_clusters=2, rank=2)
    kinds = roles(model)
    own = [name for name, _ in model.named_parameters() if kinds[name] in ("adaptor", "router")]
    users = [copy.deepcopy(model) for _ in range(USERS)]
    for user in users:
        for name in own:
            user.get_parameter(name).data += 0.3 * torch.randn_like(user.get_parameter(name))
    adaptors = {name: torch.stack([user.get_parameter(name).detach() for user in users]) for name in own}
    tokens = torch.randint(11, (USERS, 2, 7))

    def loss(own: dict[str, Tensor], tokens: Tensor) -> Tensor:
        logits = functional_call(model, own, (tokens,), {"use_cache": False}).logits
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())

    together = vmap(loss)(adaptors, tokens)
    for i, user in enumerate(users):
        logits = user(tokens[i], use_cache=False).logits
        torch.testing.assert_close(
            together[i], F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[i, :, 1:].flatten())
        )
