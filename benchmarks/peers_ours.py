"""comingle's side of ``peers.py``: writes the work of a row for its peers, then answers turns.

    python benchmarks/peers_ours.py ROW --work FOLDER [--dtype bfloat16] [--data FOLDER] [--threads 2] [--toy]

The peers read the same data, initial values and settings from ``FOLDER/work.pt`` (``peers_theirs.py``).
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import comingle  # noqa: F401 (before torch, which reads GOMP_SPINCOUNT)

# isort: split
import torch
from torch import Tensor, nn

from comingle.config.settings import AdaptersSection, OptimizerSection, PrivacySection, RuntimeSection, TrainingSection
from comingle.data.demo import read_library
from comingle.data.samples.samples import UserSamples, join
from comingle.data.text.streams import UserData
from comingle.methods import make
from comingle.models.adapted import adapt
from comingle.models.hardware import keep_buffers
from comingle.models.injection import ExpertCounts
from comingle.models.loading import load_base
from comingle.runs.given import given_of, recipe_with
from comingle.runs.session import build, prepare
from comingle.training.backends.local import InProcess, federate
from comingle.training.client import Clients, batch_size, train
from comingle.training.kinds.text import TextBatchSource
from comingle.training.settings import RunPlan
from comingle.training.steps import PrivateSteps
from many_users import RATE, initial_net, make_federation, stacked_round
from peers_theirs import Side, answer, read_work, replies, small_net, training_score

RANK, SCALE = 8, 1.0
SMALL = {"layers": 4, "dim": 256, "heads": 4, "vocab": 8192}
TEXT = {"family": "llama", **SMALL, "vocab": 259, "users": 16, "batch": 4, "steps": 4, "federated": True}
SETTINGS: dict[str, dict[str, Any]] = {
    "gpt2": {"layers": 12, "dim": 768, "heads": 12, "vocab": 50257, "users": 4, "batch": 4, "rate": 2e-3},
    "small": {**SMALL, "users": 4, "batch": 16, "rate": 2e-3},
    "sixteen": {**SMALL, "users": 16, "batch": 1, "rate": 2e-3},
    "flower": {**TEXT, "rate": 2e-3},
    "pfl-llm": {**TEXT, "rate": 0.1, "clip": 1.0, "optimizer": "sgd"},
    "opacus": {**TEXT, "users": 1, "batch": 16, "steps": 1, "rate": 2e-3, "clip": 0.1},
    "nets": {"users": 300},
    "blazefl": {"users": 100, "samples": 500, "classes": 10, "batch": 50, "epochs": 1, "rate": 0.1},
    "pfllib": {"users": 500, "samples": 90, "classes": 100, "batch": 10, "epochs": 1, "rate": 0.005},
}
TOY = {"layers": 1, "dim": 32, "heads": 2, "users": 2, "batch": 2, "steps": 2, "samples": 20}
"""Sizes of ``--toy``, with which a row only shows that it runs."""

CONTEXT, TEST_WINDOWS = 128, 4


# -------------------------------------------------------------------- language models


def text_row(row: str, settings: Mapping[str, Any], args: argparse.Namespace) -> Side:
    """Write a row of language models for the peers, and return comingle's side of it.

    Args:
        row: Name of the row.
        settings: Sizes of the model, the users' steps and the optimiser.
        args: The command line.
    """
    family = settings.get("family", "gpt2")
    sizes = "&".join(f"{key}={settings[key]}" for key in ("layers", "dim", "heads", "vocab"))
    base = load_base(f"random:{family}?{sizes}", dtype=args.dtype, device="cpu")
    users = demo_users(settings) if "federated" in settings else random_users(settings)
    clients = text_clients(base, users, settings, private=row == "opacus")
    folder = args.work / "base"
    load_base(f"random:{family}?{sizes}", dtype="float32", device="cpu").model.save_pretrained(folder)
    work: dict[str, Any] = {
        **{key: value for key, value in settings.items() if key not in ("layers", "dim", "heads")},
        "rank": RANK,
        "scale": SCALE,
        "context": CONTEXT,
        "turned": family == "gpt2",
        "linears": ["c_attn", "c_proj", "c_fc"] if family == "gpt2" else "all-linear",
    }
    if "federated" in settings:
        work["train"] = torch.stack([windows(user.train, CONTEXT + 1) for user in users])
        work["test"] = torch.stack([windows(user.test, CONTEXT) for user in users])
        if row == "opacus":  # B is zero at the start, which makes half of the gradients zero
            clients.state.rows.normal_(std=0.05, generator=torch.Generator().manual_seed(1))
        work["lora"] = peft_names(clients.model.tensors(clients.state.rows))
    torch.save(work, args.work / "work.pt")
    if row == "opacus":
        return clipped_sums(clients, settings, args.work)
    if "federated" not in settings:
        numbers, everyone = itertools.count(), list(range(settings["users"]))
        return Side(turn=lambda: train(clients, everyone, next(numbers)))
    return rounds(federate(clients), lambda: {"loss": mean([score.mean_loss for score in clients.evaluate()])})


def windows(tokens: Tensor, step: int) -> Tensor:
    """Return a text cut into windows ``(n, CONTEXT + 1)`` whose starts are ``step`` tokens apart."""
    return tokens.long().unfold(0, CONTEXT + 1, step).contiguous()


def random_users(settings: Mapping[str, Any]) -> list[UserData]:
    """Return users with random tokens."""
    draw = torch.Generator().manual_seed(0)
    text = [
        torch.randint(settings["vocab"], (20_000,), generator=draw, dtype=torch.int32) for _ in range(settings["users"])
    ]
    return [UserData(name=f"user{i}", train=t, valid=t, test=t) for i, t in enumerate(text)]


def demo_users(settings: Mapping[str, Any]) -> list[UserData]:
    """Return users with parts of a demo user's text, as bytes: the windows of a round, and test windows."""
    count = settings["steps"] * settings["batch"] * (CONTEXT + 1)
    test = TEST_WINDOWS * CONTEXT + 1
    text = torch.tensor(list("\n".join(read_library()).encode()), dtype=torch.int32)
    parts = text.split(count + test)[: settings["users"]]
    users = [UserData(name=f"user{i}", train=t[:count], valid=t[count:], test=t[count:]) for i, t in enumerate(parts)]
    assert len(users) == settings["users"], "the demo text is too short"
    return users


def text_clients(base: Any, users: list[UserData], settings: Mapping[str, Any], *, private: bool) -> Clients:
    """Return clients of ``fedit``: FedAvg of one LoRA on all linears.

    Args:
        base: The base model.
        users: The users.
        settings: Sizes and settings of the row.
        private: Whether steps clip the gradients of single windows.
    """
    method = make("fedit")
    placement = method.placement
    counts = ExpertCounts(generalists=placement.generalists, specialists=placement.specialists_of(len(users)))
    adapters = AdaptersSection(rank=RANK, alpha=SCALE * RANK**0.5)  # the scale is alpha / sqrt(rank)
    model = adapt(base, adapters, counts, routed=placement.routed, compiled=True, native_code=True)
    name = settings.get("optimizer", "adamw")
    optimizer = OptimizerSection(
        name=name,
        learning_rate=settings["rate"],
        weight_decay=0.01 if name == "adamw" else 0.0,
        schedule="constant",
        clip_norm=None if private else settings.get("clip"),
    )
    training = TrainingSection(
        rounds=100,
        local_steps=settings.get("steps", 1),
        batch_size=settings["batch"],
        context=CONTEXT,
        experts=optimizer,
    )
    plan = RunPlan(method=method, training=training, runtime=RuntimeSection())
    if private:
        privacy = PrivacySection(mechanism="example", clip_norm=settings["clip"], noise_multiplier=1.0)
        plan = replace(plan, privacy=privacy, users=tuple(user.name for user in users))
    source = TextBatchSource(users, plan, batch_size(plan, len(users)))
    return Clients(model, plan, trainers=users, users=users, batch_source=source)


def peft_names(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the first user's LoRA on a Llama by PEFT's names, with B turned as PEFT holds it."""
    named = {}
    for name, value in tensors.items():
        linear, _, factor = name.rpartition(".")
        linear = linear if "self_attn" in linear else f"{linear}_proj"
        matrix = value[0].detach().squeeze(0)
        turned = matrix if factor == "a" else matrix.T
        named[f"base_model.model.model.{linear}.lora_{factor.upper()}.weight"] = turned.contiguous().float()
    return named


def clipped_sums(clients: Clients, settings: Mapping[str, Any], folder: Path) -> Side:
    """Return turns that sum the clipped gradients of a batch of single windows; the score writes them for the peer.

    Args:
        clients: A client with example-level privacy.
        settings: Sizes and settings of the row.
        folder: Folder of the work.
    """
    private = cast(PrivateSteps, clients.steps.private)
    names = private.noised_names(clients.phases[0], clients.model.layout)
    cohort, examples = clients.cohort([0], 0), torch.arange(settings["batch"]).unsqueeze(0)

    def sums() -> Mapping[str, Tensor]:
        tensors = clients.model.tensors(cohort.state.rows)
        source = clients.batch_source
        found, _ = private.clipped_sums(clients.model, source, tensors, names, cohort, examples, settings["clip"])
        return found

    def score() -> dict[str, Any]:
        torch.save(peft_names(sums()), folder / "sums.pt")
        return {}

    return Side(turn=sums, score=score)


def rounds(federation: InProcess, score: Callable[[], dict[str, Any]]) -> Side:
    """Return rounds of all users: local steps, uploads, aggregation, downloads."""
    run_round, numbers = stacked_round(federation), itertools.count()
    return Side(turn=lambda: run_round(next(numbers)), score=score)


def mean(values: list[float]) -> float:
    """Return the mean."""
    return sum(values) / len(values)


# -------------------------------------------------------------------- nets


def large_net() -> nn.Module:
    """Return PFLlib's 4-layer CNN for 100 classes: inputs ``(3, 32, 32)``."""
    features = [nn.Conv2d(3, 32, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(32, 64, 5), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*features, nn.Flatten(), nn.Linear(1600, 512), nn.ReLU(), nn.Linear(512, 100))


def images(settings: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """Return stand-in images ``(users, samples, 3, 32, 32)`` and classes: a picture for each class, with noise."""
    draw = torch.Generator().manual_seed(0)
    pictures = torch.randn(settings["classes"], 3, 32, 32, generator=draw)
    targets = torch.randint(settings["classes"], (settings["users"], settings["samples"]), generator=draw)
    targets[-1, -1] = settings["classes"] - 1  # the number of classes is read off the data
    inputs = pictures[targets]
    for images_of_user in inputs:
        images_of_user.add_(torch.randn(images_of_user.shape, generator=draw).mul_(2))
    return inputs, targets


def image_federation(
    make_net: Callable[[], nn.Module], data: tuple[Tensor, Tensor], settings: Mapping[str, Any]
) -> InProcess:
    """Return FedAvg of a net on users' images, with SGD.

    Args:
        make_net: Function that makes the net.
        data: Images and classes of the users.
        settings: Sizes and settings of the row.
    """
    sgd = {"name": "sgd", "learning_rate": settings["rate"], "schedule": "constant", "weight_decay": 0}
    training = {
        "batch_size": settings["batch"],
        "local_epochs": settings["epochs"],
        "weighting": "samples",
        "experts": sgd,
    }
    recipe = {"method": "fedavg", "training": training, "runtime": {"device": "cpu", "dtype": "float32"}}
    users = {
        f"user{i}": {"train": (inputs, targets), "valid": (inputs[:1], targets[:1]), "test": (inputs[:1], targets[:1])}
        for i, (inputs, targets) in enumerate(zip(*data, strict=True))
    }
    given = given_of(users, make_net, None, None)
    parsed = recipe_with(recipe, given, base=None, method=None, changes={})
    return build(parsed, prepare(parsed, given=given))


def shared_net(federation: InProcess) -> dict[str, Tensor]:
    """Return the tensors of the net that users download."""
    download = federation.server.download(federation.clients.names[:1])
    return {name: value[0, 0].detach().clone() for name, value in download.tensors.items()}


def net_row(row: str, settings: Mapping[str, Any], args: argparse.Namespace) -> Side:
    """Write a row of nets for the peers, and return comingle's side of it.

    Args:
        row: Name of the row.
        settings: Sizes and settings of the row.
        args: The command line.
    """
    work: dict[str, Any] = dict(settings)
    if row == "nets":
        federation = make_federation("mnist", settings["users"], "fedavg", None, args.dtype, data=args.data)
        net = initial_net(federation.clients, "mnist", "fedavg").requires_grad_()
        samples = join([user.train for user in cast(list[UserSamples], federation.clients.users)])
        inputs, targets = (t.unflatten(0, (settings["users"], -1)) for t in samples.contents)  # equally many of each
        work |= {"rate": RATE, "batch": 32}
    else:
        make_net = small_net if row == "blazefl" else large_net
        net = make_net()
        inputs, targets = images(settings)
        federation = image_federation(make_net, (inputs, targets), settings)
    work |= {"inputs": inputs, "targets": targets}
    work["state"] = shared_net(federation)
    torch.save(work, args.work / "work.pt")
    del work, inputs, targets  # or they count in the peak memory

    def score() -> dict[str, Any]:
        written = read_work(args.work, args.dtype)
        net.load_state_dict(shared_net(federation))
        found = training_score(net, written)
        return {**found, "is_repeatable": is_repeatable(written, settings)} if row == "blazefl" else found

    return rounds(federation, score)


def is_repeatable(work: Mapping[str, Any], settings: Mapping[str, Any]) -> bool:
    """Return whether two rounds of four users, each from the start, end with the same bits.

    Args:
        work: Contents of the row.
        settings: Sizes and settings of the row.
    """
    found = []
    for _ in range(2):
        federation = image_federation(small_net, (work["inputs"][:4], work["targets"][:4]), settings)
        stacked_round(federation)(0)
        found.append(shared_net(federation))
    first, second = found
    return all(torch.equal(value, second[name]) for name, value in first.items())


def main() -> None:
    """Write the work of a row and answer turns."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("row", choices=sorted(SETTINGS))
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--data", help="a folder with MNIST's files")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--toy", action="store_true", help="tiny sizes")
    args = parser.parse_args()
    replies()
    torch.set_num_threads(args.threads)
    keep_buffers()
    settings = SETTINGS[args.row]
    if args.toy:
        settings = {**settings, **{key: value for key, value in TOY.items() if key in settings}}
    row = net_row if args.row in ("nets", "blazefl", "pfllib") else text_row
    answer(row(args.row, settings, args))


if __name__ == "__main__":
    main()
