"""Comparison with alternatives in the same run: PEFT's LoRA one adapter after another, and pfl-research's FedAvg.

    pip install peft pfl                # in an environment of its own: pfl 0.6 wants an older dp-accounting than we do
    python benchmarks/peers.py [--rows gpt2,small,sixteen,nets] [--iters 3] [--threads 1 --cpu-time] [--data FOLDER]

Prints one JSON line: for each row what each of them took for one turn (a local iteration of every user; for nets a
round) and ``times``, how many times faster comingle is, the median over turns in which all were timed.

- ``gpt2``: a random GPT2-124M, 4 users, batch 4, context 128; ``small``: 4 layers, 256 wide, 4 users, batch 16;
  ``sixteen``: the same, 16 users, batch 1. `fedit` against PEFT on one base in bfloat16 and in float32: LoRA of rank 8
  on all linears, AdamW, an adapter for each user, who are trained in turn.
- ``nets``: FedAvg of 784-200-10 on MNIST, 300 users, batch 32, SGD, against pfl-research's simulation in float32.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from typing import Any, cast

import comingle  # noqa: F401 (before torch, which reads GOMP_SPINCOUNT)

# isort: split
import torch
from torch import Tensor, nn

from clocks import add_clock, select_clock
from comingle.data.samples.samples import UserSamples
from comingle.models.hardware import keep_buffers
from comingle.models.loading import load_base
from comingle.training.client import train
from many_users import RATE, initial_net, make_federation, stacked_round
from throughput import make_clients, time_step

CONTEXT, USERS, BATCH = 128, 300, 32
SMALL = {"layers": 4, "dim": 256, "heads": 4, "vocab": 8192}
SHAPES: dict[str, dict[str, int]] = {
    "gpt2": {"layers": 12, "dim": 768, "heads": 12, "vocab": 50257, "users": 4, "batch": 4},
    "small": {**SMALL, "users": 4, "batch": 16},
    "sixteen": {**SMALL, "users": 16, "batch": 1},
}
Turn = Callable[[], object]
"""Function that takes one local step of every user; for nets one round."""


def comingle_turn(name: str, shape: dict[str, int]) -> Turn:
    """Return a turn of ``fedit``: a local step of all users at once, as ``throughput.py`` times it."""
    rest = {"method": "fedit", "experts": 2, "ctx": CONTEXT, "dtype": "auto", "device": "cpu"}
    switches = {"users_per_step": None, "micro_batch": None, "no_compile": False, "no_native": False}
    base = load_base(name, dtype="auto", device="cpu")
    clients = make_clients(argparse.Namespace(**shape, **rest, **switches), base)
    rounds = iter(range(10_000))
    return lambda: train(clients, list(range(shape["users"])), next(rounds))


def peft_turn(name: str, shape: dict[str, int], dtype: str) -> Turn:
    """Return a turn that trains an adapter per user on one base, one after another.

    Args:
        name: The base model.
        shape: Sizes of the model and the batch.
        dtype: Type of the base.
    """
    from peft import LoraConfig, get_peft_model

    base = load_base(name, dtype=dtype, device="cpu", attention="sdpa").model
    linears = ["c_attn", "c_proj", "c_fc"]
    config = LoraConfig(r=8, lora_alpha=16, use_rslora=True, target_modules=linears, fan_in_fan_out=True)
    names = [f"user{i}" for i in range(shape["users"])]
    model: Any = get_peft_model(cast(Any, base), config, adapter_name=names[0])
    for user in names[1:]:
        model.add_adapter(user, config)
    tokens = torch.randint(shape["vocab"], (shape["users"], shape["batch"], CONTEXT + 1))
    optimizers = []
    for user in names:
        model.set_adapter(user)
        optimizers.append(torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=2e-3))

    def turn() -> None:
        for user, optimizer, user_tokens in zip(names, optimizers, tokens, strict=True):
            model.set_adapter(user)
            logits = model(input_ids=user_tokens[:, :-1]).logits
            loss = nn.functional.cross_entropy(logits.flatten(0, 1).float(), user_tokens[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    return turn


class Classifier(nn.Module):
    """A net as pfl-research wants it: with its loss, and no metrics."""

    def __init__(self, net: nn.Module):
        super().__init__()
        self.net = net

    def loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross-entropy."""
        return nn.functional.cross_entropy(self.net(inputs), targets)

    def metrics(self, inputs: Tensor, targets: Tensor) -> dict[str, Any]:
        """Return no metrics."""
        return {}


def pfl_turn(net: nn.Module, users: list[UserSamples]) -> Turn:
    """Return a function that runs a central iteration of FedAvg over all users."""
    from pfl.aggregate.simulate import SimulatedBackend
    from pfl.algorithm.base import NNAlgorithmParams
    from pfl.algorithm.federated_averaging import FederatedAveraging
    from pfl.data.dataset import Dataset
    from pfl.data.federated_dataset import FederatedDataset
    from pfl.hyperparam import NNTrainHyperParams
    from pfl.model.pytorch import PyTorchModel

    turns = iter(range(10**9))
    data = FederatedDataset(
        lambda user: Dataset((users[user].train.inputs, users[user].train.targets)), lambda: next(turns) % len(users)
    )
    model = PyTorchModel(
        Classifier(net),
        lambda parameters, lr: torch.optim.SGD(parameters, lr=lr),
        torch.optim.SGD(net.parameters(), 1.0),
    )
    hyper = NNTrainHyperParams(local_num_epochs=1, local_learning_rate=RATE, local_batch_size=BATCH)
    backend = SimulatedBackend(training_data=data, val_data=data)

    params = NNAlgorithmParams(
        central_num_iterations=10**9, evaluation_frequency=10**9, train_cohort_size=len(users), val_cohort_size=None
    )
    algorithm = FederatedAveraging()

    def turn() -> None:
        # Iteration 1, in which nothing is evaluated.
        contexts, _, _ = algorithm.get_next_central_contexts(model, 1, params, hyper, hyper)
        gathered, metrics = backend.gather_results(model, algorithm, central_context=contexts[0])
        algorithm.process_aggregated_statistics(contexts[0], metrics, model, gathered)

    return turn


def make_turns(row: str, data: str | None) -> dict[str, Turn]:
    """Return the implementations of one row, comingle first.

    Args:
        row: Name of the row.
        data: Folder with MNIST's files; None reads the hub.
    """
    if row == "nets":
        made = make_federation("mnist", USERS, "fedavg", None, data=data)
        users = cast(list[UserSamples], made.clients.users)
        turn, numbers = stacked_round(made), iter(range(10_000))
        bfloat16_turn = stacked_round(make_federation("mnist", USERS, "fedavg", None, "bfloat16", data=data))
        net = initial_net(made.clients, "mnist", "fedavg").requires_grad_()
        return {
            "comingle": lambda: turn(next(numbers)),
            "comingle_bfloat16": lambda: bfloat16_turn(next(numbers)),
            "pfl": pfl_turn(net, users),
        }
    shape = SHAPES[row]
    name = "random:gpt2?" + "&".join(f"{key}={shape[key]}" for key in ("layers", "dim", "heads", "vocab"))
    peers = {f"peft_{dtype}": peft_turn(name, shape, dtype) for dtype in ("bfloat16", "float32")}
    return {"comingle": comingle_turn(name, shape), **peers}


def compare(row: str, iters: int, clock: Callable[[], float], data: str | None = None) -> dict[str, Any]:
    """Return the seconds of a turn of each implementation and the speed-ups of comingle.

    Args:
        row: Name of the row.
        iters: Number of timed turns.
        clock: Function that returns the time in seconds.
        data: Folder with MNIST's files.
    """
    turns = make_turns(row, data)
    times: dict[str, list[float]] = {key: [] for key in turns}
    for number in range(iters + 2):  # the first two rounds compile and warm up
        for key, turn in turns.items():
            seconds = time_step(turn, clock)
            if number >= 2:
                times[key].append(seconds)
    ours = {key: seconds for key, seconds in times.items() if key.startswith("comingle")}
    ratios = {
        f"{peer}/{key}": round(statistics.median(b / a for a, b in zip(ours[key], times[peer], strict=True)), 2)
        for key in ours
        for peer in times
        if peer not in ours
    }
    return {"seconds": {key: round(statistics.median(s), 3) for key, s in times.items()}, "times": ratios}


def main() -> None:
    """Compare the rows and print one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="gpt2,small,sixteen,nets")
    parser.add_argument("--data", help="a folder with MNIST's files, where the hub is not at hand")
    parser.add_argument("--iters", type=int, default=3)
    add_clock(parser)
    args = parser.parse_args()
    clock = select_clock(parser, args)
    keep_buffers()
    rows = {row: compare(row, args.iters, clock.now, args.data) for row in args.rows.split(",")}
    print(json.dumps({**clock.fields, **rows}))


if __name__ == "__main__":
    main()
