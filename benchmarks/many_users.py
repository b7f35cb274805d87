"""How much stacking the users of a small net saves: a federation's rounds against the same users one after another.

``python benchmarks/many_users.py [--task mlp] [--method fedavg] [--users 100] [--rounds 5] [--grow 10,100]`` prints one
JSON line. The two are timed in turns; on a machine with other work ``--threads 1 --cpu-time`` counts processor time.
``--dtype bfloat16`` has the stacked federation compute in bfloat16, the loop stays in float32. Tasks ``cnn``,
``cifar10``, ``vgg8``, ``vgg8-norm``, ``resnet9`` and ``resnet9-group`` are nets with convolutions on random images,
stacked in native code, with ``--no-compile`` under ``vmap``.

- ``stacked_s`` and ``looped_s``: seconds of a round (local epoch and mean), stacked here and in a plain PyTorch loop;
- ``ratio``: how many times more rounds a second the stacked federation makes, the median over rounds;
- ``s_per_user_round``: seconds for each user and round as the number of users grows (``--grow``).
"""

from __future__ import annotations

import argparse
import copy
import json
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any, cast

import comingle  # noqa: F401 (before torch, which reads GOMP_SPINCOUNT)

# isort: split
import torch
from torch import Tensor, nn

from clocks import add_clock, select_clock
from comingle.config import parse_recipe
from comingle.data.samples.samples import Samples, UserSamples
from comingle.models.floral.layers import precondition
from comingle.models.floral.model import FloralModel, roles
from comingle.models.floral.wrapper import floral
from comingle.models.nets import make_net
from comingle.models.scoring import CROSS_ENTROPY, MSE
from comingle.runs.given import given_of, recipe_with
from comingle.runs.session import build, prepare
from comingle.training.backends.local import InProcess
from comingle.training.client import Clients, train

RATE = 0.05
CLUSTERS = 4
BUDGET = 0.01
"""Of FLoRAL's adaptors, as a part of the base's parameters: the paper's smaller one."""


IMAGES: dict[str, Sequence[int]] = {
    "cnn": (1, 28, 28),
    **dict.fromkeys(("cifar10", "vgg8", "vgg8-norm", "resnet9", "resnet9-group"), (3, 32, 32)),
}
"""Nets with convolutions, and the shape of the random images that they have here."""

IMAGES_PER_USER = 96
"""Random images of a user, in three batches."""


def make_federation(
    task: str,
    users: int,
    method: str,
    users_per_step: int | None,
    dtype: str = "auto",
    *,
    compiled: bool = True,
    data: str | None = None,
) -> InProcess:
    """Return a federation of a synthetic task or of a net on random images.

    Args:
        task: Name of the task or net.
        users: Number of users.
        method: Name of the method.
        users_per_step: Users per pass; None takes the default.
        dtype: Type of the computation.
        compiled: Whether to use native code.
        data: Folder with MNIST's files.
    """
    sgd = {"name": "sgd", "learning_rate": RATE, "schedule": "constant", "weight_decay": 0}
    recipe: dict[str, Any] = {
        "method": method,
        "training": {
            "batch_size": 32 if task in (*IMAGES, "mnist") else 8,
            "weighting": "samples",
            "experts": sgd,
            "router": sgd,
        },
        "runtime": {"device": "cpu", "users_per_step": users_per_step, "dtype": dtype, "compile": compiled},
    }
    if task not in IMAGES:
        path = {"path": data} if data is not None and task == "mnist" else {}
        parsed = parse_recipe(recipe | {"data": {"task": {"name": task, "users": users, "test_samples": 1, **path}}})
        return build(parsed, prepare(parsed))
    given = given_of({f"user{n}": random_images(IMAGES[task], n) for n in range(users)}, None, None, None)
    parsed = recipe_with(recipe | {"base": f"net:{task}"}, given, base=None, method=None, changes={})
    return build(parsed, prepare(parsed, given=given))


def random_images(shape: Sequence[int], user: int) -> dict[str, tuple[Tensor, Tensor]]:
    """Return a user's random images and classes; the validation and test splits are not used."""
    draw = torch.Generator().manual_seed(user)
    inputs, targets = torch.randn(IMAGES_PER_USER, *shape, generator=draw), torch.arange(IMAGES_PER_USER) % 10
    return {"train": (inputs, targets), "valid": (inputs[:1], targets[:1]), "test": (inputs[:10], targets[:10])}


def initial_net(clients: Clients, task: str, method: str) -> nn.Module:
    """Return the net from which all users start, with FLoRAL's adaptors for method "floral".

    Args:
        clients: Users, whose data determines the shapes of inputs and outputs.
        task: Name of the task or net.
        method: Name of the method.
    """
    first = cast(Samples, clients.users[0].train)
    outputs = first.targets.shape[1] if first.targets.is_floating_point() else 10
    net = make_net(task, tuple(first.inputs.shape[1:]), outputs, seed=0)
    return floral(net, budget=BUDGET, num_clusters=CLUSTERS) if method == "floral" else net


def train_alone(model: nn.Module, data: Samples, batch_size: int) -> nn.Module:
    """Train one epoch of a user with torch's SGD; adaptors have preconditioned gradients.

    Args:
        model: The net, trained in place.
        data: Samples of the user.
        batch_size: Samples per step.
    """
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    for at in torch.randperm(len(data)).split(batch_size):
        optimizer.zero_grad()
        loss = MSE if data.targets.is_floating_point() else CROSS_ENTROPY
        loss(model(data.inputs[at]), data.targets[at]).mean().backward()
        if isinstance(model, FloralModel):
            values = {name: p.detach() for name, p in model.named_parameters()}
            gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
            for name, gradient in precondition(model.pairs(), values, gradients).items():
                model.get_parameter(name).grad = gradient
        optimizer.step()
    return model


@torch.no_grad()
def average(shared: nn.Module, models: list[nn.Module]) -> None:
    """Set the shared model to the mean over users; adaptors are weighted by their users' routers."""
    shares = torch.full((len(models), 1), 1 / len(models))
    adaptor_names: set[str] = set()
    if isinstance(shared, FloralModel):
        shares = torch.stack([m.get_parameter("router.theta").softmax(0) for m in models])
        shares = shares / shares.sum(0)
        adaptor_names = {n for n, role in roles(shared).items() if role == "adaptor"}
    for name, value in shared.named_parameters():
        of_users = torch.stack([model.get_parameter(name) for model in models])
        value.copy_(torch.einsum("uc,uc...->c...", shares, of_users) if name in adaptor_names else of_users.mean(0))


def looped_round(clients: Clients, task: str, method: str) -> Callable[[int], None]:
    """Return a round of the usual implementation: each user trains a copy of the global model.

    Args:
        clients: Users and their data.
        task: Name of the task or net.
        method: Name of the method.
    """
    shared = initial_net(clients, task, method)
    users = cast(list[UserSamples], clients.users)

    def a_round(number: int) -> None:
        average(shared, [train_alone(copy.deepcopy(shared), user.train, clients.batch_size) for user in users])

    return a_round


def stacked_round(federation: InProcess) -> Callable[[int], None]:
    """Return a round of comingle: local epoch of all users at once, uploads, aggregation and downloads."""
    clients = federation.clients
    all_users = list(range(len(clients.users)))

    def a_round(number: int) -> None:
        trained = train(clients, all_users, number)
        federation.upload(all_users, number + 1, trained.losses)
        federation.aggregate()
        federation.download(all_users)

    return a_round


def time_rounds(rounds: Sequence[Callable[[int], None]], count: int, clock: Callable[[], float]) -> list[list[float]]:
    """Return the seconds of rounds, timed in turns after one to warm up.

    Args:
        rounds: Functions that run a round.
        count: Number of timed rounds.
        clock: Function that returns the time in seconds.
    """
    times: list[list[float]] = [[] for _ in rounds]
    for number in range(count + 1):
        for a_round, of_round in zip(rounds, times, strict=True):
            started = clock()
            a_round(number)
            of_round.append(clock() - started)
    return [of_round[1:] for of_round in times]


def main() -> None:
    """Time rounds of both implementations and print one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", default="mlp", choices=("linear", "mlp", "mnist", *IMAGES))
    parser.add_argument("--users", type=int, default=100)
    parser.add_argument("--method", default="fedavg", choices=("fedavg", "floral"))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--grow", default="10,100,1000", help="numbers of users, or nothing")
    parser.add_argument("--users-per-step", type=int)
    parser.add_argument("--dtype", default="auto", help="of the stacked federation")
    parser.add_argument("--data", help="a folder with MNIST's files, where the hub is not at hand")
    parser.add_argument("--no-compile", action="store_true", help="leave native code off, as runtime.compile: false")
    add_clock(parser)
    args = parser.parse_args()
    clock = select_clock(parser, args)
    settings = (args.method, args.users_per_step, args.dtype)
    options = {"compiled": not args.no_compile, "data": args.data}
    made = make_federation(args.task, args.users, *settings, **options)
    looped = looped_round(made.clients, args.task, args.method)
    stacked_seconds, looped_seconds = time_rounds([stacked_round(made), looped], args.rounds, clock.now)
    seconds_by_users = {}
    for users in [int(n) for n in args.grow.split(",") if n]:
        larger = make_federation(args.task, users, *settings, **options)
        seconds_by_users[users] = median(time_rounds([stacked_round(larger)], args.rounds, clock.now)[0]) / users
    line = {
        "task": args.task,
        "method": args.method,
        "users": args.users,
        **clock.fields,
        "dtype": str(made.clients.model.dtype).removeprefix("torch."),
        "stacked_s": round(median(stacked_seconds), 4),
        "looped_s": round(median(looped_seconds), 4),
        "ratio": round(median(b / a for a, b in zip(stacked_seconds, looped_seconds, strict=True)), 2),
        "s_per_user_round": {users: float(f"{s:.3g}") for users, s in seconds_by_users.items()},
    }
    print(json.dumps(line))


if __name__ == "__main__":
    main()
