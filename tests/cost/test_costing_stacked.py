"""Costs of nets and of client-level mixtures against real federations: parameters, bytes, FLOPs, live tensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from exchanges import exchanged
from tests.quick import quick
from torch.nn import functional as F

from comingle.config import Recipe, parse_recipe
from comingle.cost.counts import count_stacked, count_users, local_work_on_text, measured_base
from comingle.cost.memory import LiveBytes, rehearse, step_peak
from comingle.cost.planning import federate_bare, local_work_by_user, plan, rehearse_nets, with_method
from comingle.cost.records import Flops, UserCost, count_flops, measure_flops
from comingle.cost.skeleton import bare_mixture, load_skeleton
from comingle.data.samples.samples import SPLITS
from comingle.methods import make
from comingle.models.base import Base
from comingle.models.kernels import convolutions
from comingle.models.nets import make_net
from comingle.runs.session import build, prepare
from comingle.training.backends.local import InProcess
from comingle.training.client import train

SGD = {"name": "sgd", "learning_rate": 0.05, "schedule": "constant", "weight_decay": 0}
NAMES = ("ann", "bob", "cem")
NETS: list[Any] = [
    "fedavg", "centralized", "floral-mfl", "ensemble", {"name": "floral", "stateless": True, "warmup_steps": 2},
    "fedmerge", "fedem", "pfedmoe", {"name": "ifca", "models": 3},
]  # fmt: skip
SWEEPING = ("floral-mfl", "fedem", {"name": "ifca", "models": 3})
MIXTURES: list[Any] = [("random:llama?layers=1", "floral"), ("random:gpt2?layers=1", "floral-mfl")]


def task_recipe(method: Any, **changes: Any) -> Recipe:
    content = {
        "method": method,
        "data": {"task": {"name": "mlp-norm", "users": 4, "clusters": 2, "test_samples": 9}},
        "training": {"rounds": 2, "batch_size": 40, "experts": SGD, "router": SGD},
        "runtime": {"dtype": "float32", "device": "cpu"},
    }
    return parse_recipe(content).with_changes(changes)


def text_recipe(method: Any, base: str = "random:llama") -> Recipe:
    content = {
        "base": base,
        "method": method,
        "data": {"users": dict.fromkeys(NAMES, "nowhere")},
        "adapters": {"rank": 2},
        "training": {"rounds": 2, "local_steps": 2, "batch_size": 2, "context": 16},
        "runtime": {"dtype": "float32", "device": "cpu", "compile": False},
    }
    return parse_recipe(content)


def bare(recipe: Recipe) -> Base:
    return load_skeleton(recipe.base, dtype="float32", device="cpu")


def task_costs(recipe: Recipe) -> list[UserCost]:
    """Without memory, which takes longer."""
    task = prepare(recipe).common
    assert task is not None
    plain, stage = (rehearse_nets(with_method(recipe, name), task) for name in ("fedavg", recipe.method.name))
    return count_stacked(stage, local_work_by_user(stage.federation.clients, task), measured_base(plain))


def text_cost(recipe: Recipe) -> UserCost:
    """The same of a language model; the base's own part is left as nothing."""
    base = bare(recipe)
    stage = rehearse(federate_bare(with_method(recipe, recipe.method.name), base, NAMES), num_trainers=3)
    loads = dict.fromkeys(NAMES, local_work_on_text(stage.federation.clients))
    (user,) = count_stacked(stage, loads, lambda load: (Flops(), Flops()))
    return user


def agrees(cost: UserCost, federation: InProcess, user: int = 0) -> None:
    """Parameters, bytes, and the FLOPs of a real round: what is done when the server's models arrive, and training."""
    clients = federation.clients
    assert cost.trainable_parameters == clients.trainable_parameters()[user]
    assert cost.upload_bytes == clients.upload_bytes()[user]
    assert (cost.upload_bytes, cost.download_bytes) == exchanged(federation, [user])
    found = count_flops(lambda: train(clients, [user], 0)) if clients.method.trains else 0
    if clients.shares:
        message = federation.server.download([clients.trainers[user].name])
        found += count_flops(lambda: clients.receive(message))
    assert cost.round.total == pytest.approx(found, rel=1e-9)


# ---------------------------------------------------------------- nets


@pytest.mark.slow
@pytest.mark.parametrize("method", quick(NETS, *NETS[3:6]))
def test_a_task_costs_what_its_federation_does(method: Any) -> None:
    # A sweep fills its last batch up, and padding is not counted.
    recipe = task_recipe(method, **({"training.batch_size": 97} if method in SWEEPING else {}))
    (cost,) = task_costs(recipe)
    federation = build(recipe, prepare(recipe))
    agrees(cost, federation)
    clients = federation.clients
    inputs = clients.users[0].train.inputs[None, :20]
    with torch.no_grad():
        some, more = (
            count_flops(lambda n=n: clients.scorer.predict(clients.models, [0], inputs[:, :n])) for n in (10, 20)
        )
    assert cost.forward.total * 10 == pytest.approx(more - some, rel=1e-9)
    plain = [p for p in make_net("mlp-norm", tuple(inputs.shape[2:]), 1).parameters() if p.dim() > 1]
    assert cost.forward.base == 2 * sum(p.numel() for p in plain)
    assert cost.unit == "sample"


@pytest.mark.slow
def test_users_with_unequal_numbers_of_samples_are_counted_each(tmp_path: Path) -> None:
    """50 images for 4 users: two have 13, of which the last batch has one."""
    images(tmp_path, 50)
    recipe = task_recipe(
        "fedavg", **{"data.task": {"name": "cifar10", "users": 4, "path": str(tmp_path)}, "training.batch_size": 4}
    )
    few, many = sorted(task_costs(recipe), key=lambda user: user.round.total)
    assert (few.names, many.names) == (("user-2", "user-3"), ("user-0", "user-1"))
    assert many.round.total / few.round.total == pytest.approx(13 / 12)
    agrees(many, build(recipe, prepare(recipe)))
    agrees(few, build(recipe, prepare(recipe)), user=3)


@pytest.mark.slow
def test_convolutions_of_several_models_are_counted_once_each(tmp_path: Path) -> None:
    images(tmp_path, 16)
    task = {"name": "cifar10", "users": 2, "clusters": 2, "path": str(tmp_path)}
    changes = {"data.task": task, "training.batch_size": 4, "training.rounds": 1}
    (one,) = task_costs(task_recipe("fedavg", **changes))
    (found,) = task_costs(task_recipe({"name": "ensemble", "clusters": 3}, **changes))
    assert found.forward.total == pytest.approx(3 * one.forward.total, rel=1e-5)
    assert found.round.total == pytest.approx(3 * one.round.total, rel=1e-5)
    assert found.parameters["adaptor"] == 3 * one.parameters["base"]


def images(folder: Path, count: int) -> None:
    random = np.random.default_rng(0)
    for split, number in (("train", count), ("test", 8)):
        pixels = random.integers(0, 256, (number, 32, 32, 3), dtype=np.uint8)
        np.savez(folder / f"cifar10-{split}.npz", images=pixels, labels=np.arange(number) % 10)


def test_a_grouped_convolution_costs_what_its_groups_do() -> None:
    x, w = torch.randn(2, 6, 8, 8, requires_grad=True), torch.randn(9, 2, 3, 3, requires_grad=True)

    def whole() -> None:
        F.conv2d(x, w, groups=3, stride=2).sum().backward()

    def apart() -> None:
        sum(F.conv2d(x[:, i * 2 :][:, :2], w[i * 3 :][:3], stride=2).sum() for i in range(3)).backward()  # pyright: ignore

    by_hand = 3 * 2 * (2 * 9 * 3 * 3) * (2 * 3 * 3)  # three products of out channels x places with in channels x kernel
    assert count_flops(whole) == count_flops(apart) == by_hand


def test_work_is_a_line() -> None:
    fixed, each = torch.randn(5, 5), torch.randn(3, 3)

    def work(n: int) -> None:
        _ = fixed @ fixed, torch.randn(n, 3) @ each

    line = measure_flops(work)
    assert (line.per_call, line.per_item) == (250, 18)
    assert line.flops(2, 7) == count_flops(lambda: work(3)) + count_flops(lambda: work(4))


@pytest.mark.parametrize(
    ("method", "optimizer"),
    [("fedavg", "sgd"), pytest.param("floral-mfl", "adamw", marks=pytest.mark.slow), ("ensemble", "sgd")],
)
def test_a_step_without_data_holds_what_a_real_one_does(method: str, optimizer: str) -> None:
    recipe = task_recipe(method, **{"training.experts.name": optimizer})

    def made() -> InProcess:
        return build(recipe, prepare(recipe))

    real = made().clients
    phase, users = real.phases[-1], [0, 1, 2, 3]
    cohort, drawn = real.cohort(users, 0), torch.zeros(4, 40, dtype=torch.int64)
    with LiveBytes() as live:
        _, gradients = real.steps.gradient(cohort, drawn, phase)
        size = sum(gradient.nbytes for gradient in gradients.values())
        real.steps.descend(phase, cohort, gradients, 0)
    step = step_peak(rehearse(made(), 4), users, phase)
    assert (step.peak, step.gradients) == (live.peak, size)


@pytest.mark.slow
def test_a_tasks_plan_has_its_users_and_its_samples() -> None:
    recipe = task_recipe("fedavg", **{"data.task.users": 12})
    few, many = plan(recipe, users=4), plan(recipe)
    assert (many.unit, many.base.name, many.local_steps, len(many.users)) == ("sample", "net:mlp-norm", 3, 12)
    assert many.base.flops == many.methods[0].users[0].forward.base
    assert many.methods[0].own_device.adapters_bytes == pytest.approx(few.methods[0].own_device.adapters_bytes, rel=0.2)
    real = build(recipe, prepare(recipe))
    held = real.clients.state.rows.nbytes + sum(t.nbytes for t in real.server.kept.values())
    assert many.methods[0].machine.adapters_bytes == pytest.approx(held, rel=0.05)
    task = prepare(recipe).common
    assert task is not None
    parts = [user.split(split) for user in task.users for split in SPLITS]
    assert many.methods[0].machine.data_bytes == 2 * sum(part.inputs.nbytes + part.targets.nbytes for part in parts)


@pytest.mark.slow
def test_fewer_users_in_a_pass_hold_less() -> None:
    whole, part = (
        plan(task_recipe("fedavg", **{"data.task.users": 12, "runtime.users_per_step": n})).methods[0] for n in (12, 3)
    )
    assert (whole.users_per_step, part.users_per_step) == (12, 3)
    assert part.machine.pass_bytes == pytest.approx(whole.machine.pass_bytes / 4, rel=0.05)
    assert part.machine.adapters_bytes == pytest.approx(whole.machine.adapters_bytes, rel=0.15)


# ---------------------------------------------------------------- mixtures on a language model


@pytest.mark.parametrize(("base", "method"), [MIXTURES[0], pytest.param(*MIXTURES[1], marks=pytest.mark.slow)])
@pytest.mark.slow
def test_a_mixture_costs_what_its_federation_does(method: Any, base: str, federate: Any) -> None:
    cost = text_cost(text_recipe(method, base))
    agrees(cost, federate(method, users=NAMES, base=base, dtype="float32"))
    assert cost.names == NAMES
    recipe = with_method(text_recipe("fedavg", base), "fedavg")
    (experts,) = count_users(federate_bare(recipe, bare(recipe), NAMES), NAMES)
    # Each entry of an adaptor takes part in one product.
    assert cost.forward.total == pytest.approx(experts.forward.base + 2 * cost.parameters["adaptor"], rel=1e-9)


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2"])
def test_a_mixture_without_weights_has_the_layout_of_a_real_one(family: str, federate: Any) -> None:
    recipe, method = text_recipe("floral", f"random:{family}"), make("floral")
    real = federate("floral", base=f"random:{family}", dtype="float32").clients.model
    found = bare_mixture(recipe, bare(recipe), method, 3)

    def described(model: Any) -> list[Any]:
        return [(slot.name, slot.shape, slot.roles) for slot in model.layout.slots]

    assert described(found) == described(real)
    assert found.net.get_parameter(found.layout.slots[0].name).is_meta
    one, two = ([layer.alpha for layer in model.net.layers().values()] for model in (found, real))
    assert one == two


def test_a_mixtures_step_without_data_holds_what_a_real_one_does(federate: Any) -> None:
    changes = {"runtime.compile": False}
    clients = federate("floral", users=NAMES, base="random:llama?layers=1", dtype="float32", changes=changes).clients
    users, phase = [0, 1], clients.phases[-1]
    cohort, drawn = clients.cohort(users, 0), clients.batch_source.draw(users, phase, 0, 0, 0)
    with LiveBytes() as live:
        gradients = clients.steps.gradient(cohort, drawn, phase)[1]
        clients.steps.descend(phase, cohort, gradients, 0)
    recipe = with_method(text_recipe("floral", "random:llama?layers=1"), "floral")
    stage = rehearse(federate_bare(recipe, bare(recipe), NAMES), num_trainers=3)
    assert step_peak(stage, users, phase).peak == pytest.approx(live.peak, rel=0.02)


@pytest.mark.slow
def test_experts_and_mixtures_stand_in_one_plan() -> None:
    found = plan(text_recipe("floral", "random:llama?layers=1"), ["floral", "fedavg"]).as_dict()
    mixture, experts = (method["users"][0] for method in found["methods"])
    assert (mixture["experts"], experts["experts"]) == (0, 2)
    assert mixture["forward_flops_per_token"]["base"] == experts["forward_flops_per_token"]["base"]
    assert mixture["training_flops_per_round"]["base"] == experts["training_flops_per_round"]["base"]
    assert found["comigs_1g1s_minus_fedavg"]


@pytest.mark.slow
def test_native_code_without_data_takes_what_a_real_step_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its tensors; under vmap, which short runs have, a step takes others. FLOPs are the same."""
    images(tmp_path, 24)
    task = {"name": "cifar10", "users": 2, "clusters": 2, "path": str(tmp_path)}
    recipe = task_recipe("fedavg", **{"data.task": task, "training.batch_size": 12, "runtime.threads": 1})
    found, costs = {}, {}
    for rounds in (19, 20):
        recipe = recipe.with_changes({"training.rounds": rounds})
        real = build(recipe, prepare(recipe)).clients
        phase, users = real.phases[-1], [0, 1]
        cohort, drawn = real.cohort(users, 0), torch.zeros(2, 12, dtype=torch.int64)
        with LiveBytes() as live:
            _, gradients = real.steps.gradient(cohort, drawn, phase)
            real.steps.descend(phase, cohort, gradients, 0)
        with monkeypatch.context() as patch:
            patch.setattr(convolutions, "_allocate_scratch", lambda *_: None)  # which is not PyTorch's
            told = step_peak(rehearse(build(recipe, prepare(recipe)), 2), users, phase).peak
        assert told == live.peak
        found[rounds], costs[rounds] = live.peak, task_costs(recipe)[0].round.total
    if convolutions.supports(torch.empty(0)):
        assert found[20] != found[19]
    assert costs[20] == costs[19]
