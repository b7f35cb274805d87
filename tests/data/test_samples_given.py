"""Samples that a program hands over: data sets, arrays, nets and losses of its own."""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from people import adopted, classes, numbers, recipe_of, run_of
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from comingle.data.samples.samples import Samples
from comingle.runs.session import build
from comingle.training.kinds.base import kind_of
from comingle.training.kinds.samples import PersonalNet
from comingle.utils.errors import ComingleError, DataError


class Own(nn.Module):
    """A net with a convolution, batch norm and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.norm = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4)
        self.drop, self.last = nn.Dropout(), nn.Linear(4 * 36, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.drop(self.norm(self.convolution(x).relu())).flatten(1))


class Items(Dataset[Any]):
    """A map-style data set of items as they are."""

    def __init__(self, items: list[Any]) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, number: int) -> Any:
        return self.items[number]


class Endless(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(())


def some(count: int, seed: int = 0) -> TensorDataset:
    return TensorDataset(numbers(count, 1, 8, 8, seed=seed), classes(count, 3, seed))


def people() -> dict[str, Any]:
    return {
        "ada": some(40),
        "bob": {"train": some(30, 1), "test": some(9, 2)},
        "cem": (numbers(20, 1, 8, 8, seed=3).numpy(), classes(20, 3, 3).numpy()),
    }


# ---------------------------------------------------------------- against plain torch


def small(shape: tuple[int, ...], outputs: int) -> nn.Module:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(*shape, 5), nn.Tanh(), nn.Linear(5, outputs)).double()  # pyright: ignore[reportCallIssue]


def fedavg_by_hand(users: list[dict[str, TensorDataset]], loss: Callable[[Tensor, Tensor], Tensor]) -> nn.Module:
    """Two rounds of three steps each on whole data sets, then the mean by numbers of samples."""
    shared = small((4,), 3 if users[0]["train"].tensors[1].dim() == 1 else 2)
    for _ in range(2):
        locals_ = []
        for user in users:
            own, (x, y) = copy.deepcopy(shared), user["train"].tensors
            optimizer = torch.optim.SGD(own.parameters(), lr=0.1)
            for _ in range(3):
                optimizer.zero_grad()
                loss(own(x), y).mean().backward()
                optimizer.step()
            locals_.append((len(x), own))
        total = sum(count for count, _ in locals_)
        mean = {
            key: sum(count / total * own.state_dict()[key] for count, own in locals_) for key in shared.state_dict()
        }
        shared.load_state_dict(mean)
    return shared


def doubled(outputs: Tensor, targets: Tensor) -> Tensor:
    """An own loss: twice the cross-entropy, more for the later classes."""
    return F.cross_entropy(outputs, targets, reduction="none") * (1 + targets.double())


@pytest.mark.parametrize("own_loss", [None, doubled])
@pytest.mark.parametrize("real", [False, True])
def test_a_run_equals_a_naive_loop(real: bool, own_loss: Any) -> None:
    if real and own_loss is not None:
        own_loss = lambda outputs, targets: (outputs - targets).abs().sum(-1) ** 1.5  # noqa: E731
    plain = F.mse_loss if real else F.cross_entropy

    def data(count: int, seed: int) -> TensorDataset:
        return TensorDataset(numbers(count, 4, seed=seed), numbers(count, 2, seed=9) if real else classes(count, 3))

    users = {"ada": {"train": data(11, 1), "test": data(6, 2)}, "bob": {"train": data(25, 3), "test": data(4, 4)}}
    recipe = recipe_of(**{"training.local_epochs": 3, "data.split.valid": 0.0})
    run = run_of(recipe, users, small, own_loss)
    expected = fedavg_by_hand(list(users.values()), own_loss or (lambda o, t: plain(o, t, reduction="none")))
    for name, user in users.items():
        model = run.user(name).model
        for key, value in expected.state_dict().items():
            torch.testing.assert_close(model.state_dict()[key], value, rtol=1e-9, atol=1e-11)
        x, y = user["test"].tensors
        outputs = expected(x).detach()
        lost = own_loss(outputs, y) if own_loss else plain(outputs, y, reduction="none")
        measured = run.metrics["users"][name]
        assert measured["test_loss"] == pytest.approx(float(lost.mean()), rel=1e-9)
        hits = None if real else float((outputs.argmax(-1) == y).double().mean())
        assert measured.get("test_accuracy") == (None if real else pytest.approx(hits))


# ---------------------------------------------------------------- methods, nets


@pytest.mark.parametrize(
    "method",
    ["fedavg", "local", "centralized", "fedavg+", *({"name": n, "clusters": 2} for n in ("floral", "ensemble", "mfl"))]
    + [{"name": n, "models": 2} for n in ("fedmerge", "ifca", "fedem")],
    ids=str,
)
def test_methods_of_nets_train_an_own_net(method: Any) -> None:
    run = run_of(recipe_of(method, **{"floral.rank": 1}), people(), Own)
    assert run.metrics["base"] == "net:Own"
    assert run.metrics["measure"] == "accuracy"
    ada = run.user("ada")
    assert isinstance(ada, PersonalNet)
    assert ada.predict(numbers(2, 1, 8, 8)).shape == (2, 3)
    assert re.fullmatch(r"PersonalNet\('ada', \w+ of [\d,]+ parameters\)", repr(ada))


@pytest.mark.parametrize(("base", "name"), [(None, "net:cnn"), ("net:linear", "net:linear")])
def test_without_an_own_net_there_is_one_of_the_registry(base: str | None, name: str) -> None:
    run = run_of(recipe_of(**({} if base is None else {"base": base})), people())
    assert run.metrics["base"] == name


def test_weights_follow_the_recipes_seed() -> None:
    def first(seed: int) -> Tensor:
        recipe = recipe_of(seed=seed)
        return build(recipe, adopted(recipe, people(), Own)).clients.state.rows[0]

    assert torch.equal(first(0), first(0))
    assert not torch.equal(first(0), first(1))


@pytest.mark.parametrize("named", ["mse", "l1", "smooth_l1", "bce"])
def test_a_regression_on_whole_numbers_takes_them_as_real(named: str) -> None:
    users = {"ada": (numbers(20, 4), classes(20, 2))}
    run = run_of(recipe_of(**{"data.loss": named}), users)
    assert run.metrics["measure"] == "loss"
    assert run.user("ada").predict(numbers(3, 4)).shape == (3, 1)


# ---------------------------------------------------------------- what is handed over


@pytest.mark.parametrize("handed", [list(people().values())[i] for i in range(3)] + [[numbers(5, 2), classes(5, 2)]])
def test_data_sets_pairs_and_splits_are_taken(handed: Any) -> None:
    assert kind_of(recipe_of()).accepts(handed, {})


@pytest.mark.parametrize("other", ["text", ["a", "b"], [{"messages": []}], {"train": ["a"]}, {}, 3, {"test": "x"}])
def test_text_and_rows_are_not(other: Any) -> None:
    assert not kind_of(recipe_of()).accepts(other, {})


def test_samples_are_parted_by_class_and_by_seed() -> None:
    users = {"ada": TensorDataset(torch.arange(100.0).unsqueeze(1), torch.arange(100) % 4)}

    def split(seed: int) -> Any:
        return adopted(recipe_of(seed=seed, **{"data.split.test": 0.2}), users).users[0]

    ada = split(0)
    assert [len(part) for part in (ada.train, ada.valid, ada.test)] == [70, 10, 20]
    everything = torch.cat([part.inputs for part in (ada.train, ada.valid, ada.test)]).flatten()
    assert torch.equal(everything.sort().values, torch.arange(100.0))
    assert ada.test.targets.bincount().tolist() == [5, 5, 5, 5]
    assert torch.equal(split(0).test.inputs, ada.test.inputs)
    assert not torch.equal(split(1).test.inputs, ada.test.inputs)


def test_pictures_and_bytes_become_images_from_0_to_1() -> None:
    pixels = np.arange(4 * 5 * 3, dtype=np.uint8).reshape(4, 5, 3)
    items = [(pixels + i, i % 2) for i in range(20)]
    stacked = np.stack([picture for picture, _ in items])
    ada, bob = adopted(recipe_of(), {"ada": Items(items), "bob": (stacked, classes(20, 2))}).users
    assert ada.train.inputs.shape[1:] == (3, 4, 5)
    assert bob.train.inputs.shape[1:] == (3, 4, 5)
    found = {round(float(v) * 255) for v in torch.cat([ada.train.inputs, ada.valid.inputs, ada.test.inputs]).flatten()}
    assert found == set(range(4 * 5 * 3 + 19))


X, Y = numbers(12, 4), classes(12, 2)


@pytest.mark.parametrize(
    ("users", "message"),
    [
        ({}, "^no users"),
        ({"ada": "text"}, "^user 'ada': got str; allowed: a torch Dataset"),
        ({"ada": (X[:0], Y[:0])}, "^user 'ada': train .*no samples"),
        ({"ada": Items([])}, "^user 'ada': no samples"),
        ({"ada": Endless()}, "^user 'ada': .*without a length; allowed: .*__len__"),
        ({"ada": TensorDataset(X)}, "^user 'ada': .*TensorDataset of 1.*; allowed: two"),
        ({"ada": Items([1, 2])}, r"^user 'ada': item 0 .*int; allowed: \(input, target\)"),
        ({"ada": Items([("a", 1)])}, "^user 'ada': .*input of item 0 .*str; allowed: numbers"),
        ({"ada": Items([(X[0], 0), (X[0, :2], 1)])}, r"^user 'ada': inputs .*\(4,\) and \(2,\)"),
        ({"ada": (X, Y[:5])}, r"^user 'ada': inputs .*\(12, 4\) .*targets \(5,\)"),
        ({"ada": (X, Y.reshape(6, 2))}, r"^user 'ada': inputs .*\(12, 4\) .*targets \(6, 2\)"),
        ({"ada": (X, Y), "bob": (X[:, :2], Y)}, r"^user 'bob': train inputs .*\(2,\) .*'ada' \(4,\)"),
        ({"ada": (X, Y), "bob": (X, X)}, "^user 'ada': train targets .*int64; .*real numbers"),
        ({"ada": (X, -1 - Y)}, "^user 'ada': train targets .*-2 to -1; allowed: 0 to"),
        ({"ada": (X.log(), Y)}, "^user 'ada': train inputs .*NaN"),
        ({"ada": (X[:1], Y[:1])}, r"^user 'ada': 1 sample.*data\.split\.test"),
        ({"ada": {"train": (X, Y)}}, "^user 'ada': .*splits 'train'; allowed: 'train'.*'test'.*'valid'"),
        ({"ada": {"train": (X, Y), "test": (X[:0], Y[:0])}}, "^user 'ada': test .*no samples"),
        ({"ada": (X.to(torch.complex64), Y)}, "^user 'ada': inputs .*complex; allowed: real numbers"),
    ],
)
def test_samples_that_cannot_be_used_are_one_line(users: dict[str, Any], message: str) -> None:
    with pytest.raises(ComingleError, match=message) as error:
        run_of(recipe_of(), users)
    assert "\n" not in str(error.value)


def test_more_classes_may_be_said_than_there_are_and_not_fewer() -> None:
    run = run_of(recipe_of(**{"data.classes": 7}), {"ada": (X, Y)})
    assert run.user("ada").predict(X[:1]).shape == (1, 7)
    with pytest.raises(DataError, match=r"^user 'ada': train targets .*0 to 1; allowed: 0 to 0"):
        run_of(recipe_of(**{"data.classes": 1}), {"ada": (X, Y)})


class Peeking(nn.Module):
    """Looks at a value, which users' stacked copies cannot."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(x) if x.sum().item() < 1e9 else x


@pytest.mark.parametrize(
    ("net", "message"),
    [
        (Peeking, "net 'Peeking': .*vmap: It looks like"),
        (lambda: nn.Linear(3, 2), r"net 'own': .*\(4,\): mat1 and mat2 shapes"),
        (lambda: nn.Linear(4, 5), r"net 'own': .*\(2, 5\).*; allowed: \(2, 2\)"),
        (lambda shape, outputs: nn.Identity(), "net 'own': .*an nn.Module with parameters"),
        (lambda: 3, r"net 'own': .*int; allowed: an nn\.Module"),
        (nn.Linear(4, 2), r"net: got an instance of Linear.*lambda: Linear\(\.\.\.\)"),
    ],
)
def test_a_net_that_cannot_be_trained_is_one_line(net: Any, message: str) -> None:
    with pytest.raises(ComingleError, match=f"^{message}") as error:
        run_of(recipe_of(), {"ada": (X, Y)}, net)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data.loss": "cros_entropy"}, r"^data\.loss: .*'cros_entropy'.*Did you mean 'cross_entropy'"),
        ({"data.image_size": 8}, r"^data\.image_size and grayscale "),
        ({"base": "smollm2-135m"}, "^base: got 'smollm2-135m'.*; allowed: net:NAME"),
        ({"base": "net:cn"}, "^base: .*'cn'.*Did you mean 'cnn'"),
        ({"training.context": 64}, r"^training\.context: got 64.*samples"),
        ({"quantise": "8bit"}, "^quantise: got '8bit'.*samples"),
        ({"runtime.gpu": ["graphs"]}, r"^runtime\.gpu: got \['graphs'\].*samples"),
        ({"runtime.gradient_checkpointing": True}, r"^runtime\.gradient_checkpointing: got True.*samples"),
        ({"runtime.attention": "eager"}, r"^runtime\.attention: got 'eager'.*samples"),
        ({"method": "comigs"}, "^method comigs: "),
    ],
)
def test_settings_that_are_not_for_samples_are_one_line(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ComingleError, match=message) as error:
        run_of(recipe_of(**changes), {"ada": (X, Y)})
    assert "\n" not in str(error.value)


def test_a_net_is_evaluated_on_whatever_a_user_may_be() -> None:
    x, y = numbers(30, 4), classes(30, 3)
    ada = run_of(recipe_of(), {"ada": (x, y)}).user("ada")
    expected = ada.evaluate(Samples(inputs=x, targets=y))
    predicted = ada.predict(x).argmax(1)
    assert expected.accuracy == pytest.approx(float((predicted == y).double().mean()))
    for same in (TensorDataset(x, y), (x, y), (x.numpy(), y.numpy()), [x, y], Items([*zip(x, y, strict=True)])):
        assert ada.evaluate(same) == expected
    assert math.isnan(ada.evaluate(TensorDataset(x[:0], y[:0])).mean_loss)
    for wrong, message in (
        (DataLoader(TensorDataset(x, y)), "^user 'ada': samples: got DataLoader; allowed: a torch Dataset"),
        (TensorDataset(x), "^user 'ada': samples: .*TensorDataset of 1.*; allowed: two"),
        ((x, y + 1), "^user 'ada': samples: targets .*1 to 3; allowed: 0 to 2"),
        ((x, y.float()), "^user 'ada': samples: targets .*real numbers; allowed: class numbers"),
        ((x, y[:3]), r"^user 'ada': samples: inputs .*\(30, 4\) .*targets \(3,\)"),
    ):
        with pytest.raises(DataError, match=message):
            ada.evaluate(wrong)


def test_a_regression_is_evaluated_on_whole_targets_too() -> None:
    x = numbers(30, 4)
    ada = run_of(recipe_of(), {"ada": (x, x[:, 0])}).user("ada")
    whole = classes(30, 3)
    assert ada.evaluate((x, whole)) == ada.evaluate(TensorDataset(x, whole.float()))
