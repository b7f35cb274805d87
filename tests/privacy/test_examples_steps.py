"""Steps that hide single examples: gradients against a loop of autograd, sensitivity, batches, noise."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from scipy.stats import kstest
from tests.golden import cases
from tests.privacy.examples import SGD, TRAINED, hidden, noised_of, shared_part, shared_phase, stirred, sums_of
from torch import Tensor
from torch.func import functional_call

from comingle.config.settings import PrivacySection
from comingle.data.text.streams import UserData
from comingle.methods import make
from comingle.models.scoring import PAD, fixed_windows
from comingle.privacy.accounting import Work
from comingle.privacy.mechanisms import Example
from comingle.privacy.noise import gaussian, norms
from comingle.protocol.wire import pack
from comingle.training.backends.local import InProcess
from comingle.training.client import finetuned
from comingle.utils.trees import Tree
from federations import everyone, exchange, local_round
from naive import Reference, Rules, honest_double

# -------------------------------------------------------------------- gradients


def length(tree: Tree) -> float:
    return float(norms({name: t.unsqueeze(0) for name, t in tree.items()}))


def clipped_naively(gradient: Tree, bound: float) -> Tree:
    factor = min(1.0, bound / math.sqrt(sum(float(t.double().square().sum()) for t in gradient.values())))
    return {name: factor * t.double() for name, t in gradient.items()}


def naive_gradient(federation: InProcess, user: int, number: int) -> Tree:
    """Of one window's mean loss, by autograd on one user's model alone, every ``W + s B A`` written out."""
    clients = federation.clients
    model: Any = clients.model
    tensors = {name: t[user].detach().clone() for name, t in shared_part(federation).items()}
    names = noised_of(federation).noised_names(shared_phase(federation), model.layout)
    for name in names:
        tensors[name].requires_grad_()
    stream = clients.trainers[user].train
    window = stream[17 * number : 17 * (number + 1)].long()
    losses, _ = Reference(model.base.model, "llama", tensors, Rules(scale=model.adapters.scale)).losses(window[None])
    found = torch.autograd.grad(losses.mean(), [tensors[name] for name in names], materialize_grads=True)
    return dict(zip(names, found, strict=True))


@pytest.mark.parametrize("method", ["comigs-1g1s", "fedavg", "ffa-lora", "fedlora", "comigs-2g"])
@pytest.mark.parametrize("bound", [1e9, 0.7])
def test_clipped_gradients_are_those_of_a_loop_over_single_examples(federate: Any, method: str, bound: float) -> None:
    """Without and with clipping, of users with unequal batches, by a model that has no specialist and no router."""
    federation = stirred(hidden(federate, method, clip_norm=bound))
    numbers = [[0, 3, 5], [6]]
    with honest_double():
        ours, _ = sums_of(federation, numbers)
        lengths = []
        for user, chosen in enumerate(numbers):
            each = [naive_gradient(federation, user, number) for number in chosen]
            lengths += [length(one) for one in each]
            for name, t in ours.items():
                wanted = sum(clipped_naively(one, bound)[name] for one in each)
                torch.testing.assert_close(t[user], wanted, rtol=1e-9, atol=1e-10)
    assert bound > 1 or max(lengths) > bound


def naive_net_gradient(federation: InProcess, user: int, number: int) -> tuple[Tree, float]:
    """Of one sample, by autograd on the user's net itself; and its loss."""
    clients = federation.clients
    model: Any = clients.model
    train, views = clients.trainers[user].train, model.layout.views(clients.state.rows)
    own = {n: t[user].detach().clone().requires_grad_() for n, t in views.items()}
    output = functional_call(model.net, own, (train.inputs[number : number + 1].double(),))
    target = train.targets[number : number + 1]
    loss = model.loss(output, target if model.loss.classes else target.double()).sum()
    found = torch.autograd.grad(loss, list(own.values()))
    return dict(zip(own, found, strict=True)), float(loss.detach())


def test_nets_too(federate_nets: Any) -> None:
    """A copy of the net for each sample; one user has none in the batch."""
    privacy = {"mechanism": "example", "noise_multiplier": 1.0, "clip_norm": 0.5, "noise": "reproducible"}
    changes = {f"privacy.{key}": value for key, value in privacy.items()} | {"training.weighting": "uniform"}
    federation = federate_nets("fedavg", changes=changes | {"data.task.name": "mlp"})
    numbers = [[0, 4], [7], [1, 2, 3], []]
    ours, losses = sums_of(federation, numbers)
    lengths = []
    for user, chosen in enumerate(numbers):
        each = [naive_net_gradient(federation, user, number) for number in chosen]
        lengths += [length(gradient) for gradient, _ in each]
        for name, t in ours.items():
            wanted = sum((clipped_naively(one, 0.5)[name] for one, _ in each), torch.zeros_like(t[user]))
            torch.testing.assert_close(t[user], wanted)
        assert float(losses[user]) == pytest.approx(sum(loss for _, loss in each))
    assert max(lengths) > 0.5


def test_batches_larger_than_a_pass_are_the_same_sum(federate: Any) -> None:
    found = []
    for micro_batch in (1, 2, 64):
        changes = {"runtime.micro_batch": micro_batch, "training.batch_size": 6, "training.local_steps": 1}
        federation = hidden(federate, "comigs-1g1s", noise_multiplier=1e-300, **changes)
        local_round(federation, everyone(federation), 0)
        found.append(federation.clients.state.rows)
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], rtol=1e-9, atol=1e-12)


# -------------------------------------------------------------------- sensitivity


@pytest.mark.parametrize("method", TRAINED)
@pytest.mark.sampled(3)
def test_no_example_moves_the_sum_by_more_than_the_bound(federate: Any, method: str) -> None:
    """All sets of four of a user's examples, and each with any of them taken away; all shared tensors together."""
    bound = 0.05
    federation = stirred(hidden(federate, method, clip_norm=bound))
    sums = {
        some: {n: t[0] for n, t in sums_of(federation, [list(some)])[0].items()}
        for size in range(5)
        for some in itertools.combinations(range(4), size)
    }
    moved = [
        length({n: t - sums[tuple(x for x in some if x != gone)][n] for n, t in sums[some].items()})
        for some in sums
        for gone in some
    ]
    assert len(moved) == 32
    assert max(moved) <= bound * (1 + 1e-9)
    assert max(moved) > 0.99 * bound


@pytest.mark.parametrize("seed", range(4))
def test_an_example_that_becomes_another_moves_only_its_own_share(federate: Any, make_user: Any, seed: int) -> None:
    """In the data, not in the batch: windows have no token in common, so no other example has changed."""
    draw = torch.Generator().manual_seed(seed)
    at = int(torch.randint(7, (), generator=draw))
    user = make_user("ann")
    other = user.train.clone()
    other[17 * at : 17 * (at + 1)] = torch.randint(256, (17,), generator=draw, dtype=torch.int32)
    changed = UserData(name="ann", train=other, valid=user.valid, test=user.test)
    sums = []
    for of_user in (user, changed):
        federation = stirred(hidden(federate, "comigs-1g1s", clip_norm=0.1, users=(of_user,)))
        whole, _ = sums_of(federation, [list(range(7))])
        without, _ = sums_of(federation, [[i for i in range(7) if i != at]])
        sums.append((whole, without))
    (whole, without), (whole_2, without_2) = sums
    assert all(torch.equal(without[n], without_2[n]) for n in without)
    assert 0 < length({n: (t - whole_2[n])[0] for n, t in whole.items()}) <= 0.2 * (1 + 1e-9)


def test_a_gradient_that_is_not_finite_adds_nothing(federate: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    federation = stirred(hidden(federate, "fedavg"))
    model = type(federation.clients.model)
    losses = model.losses

    def broken(self: Any, tensors: Tree, users: Any, batch: Tensor, **options: Any) -> Any:
        found, penalty = losses(self, tensors, users, batch, **options)
        return found * torch.where(torch.arange(len(found)) == 1, torch.inf, 1.0).view(-1, 1, 1), penalty

    wanted, _ = sums_of(federation, [[0, 2]])
    monkeypatch.setattr(model, "losses", broken)
    ours, _ = sums_of(federation, [[0, 1, 2]])
    for name, t in ours.items():
        torch.testing.assert_close(t, wanted[name])


@pytest.mark.parametrize("method", TRAINED)
@pytest.mark.sampled(3)
def test_text_reaches_what_is_sent_through_noised_sums_alone(
    federate: Any, make_user: Any, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With something else in their place, uploads of three rounds are the same, byte for byte, whatever the text is."""
    monkeypatch.setattr(
        Example,
        "noised",
        lambda self, sums, work, *parts: {
            n: gaussian(tuple(t.shape), "fixed", n, *map(str, parts)).to(t) for n, t in sums.items()
        },
    )
    sent, local = [], []
    for text in ("one", "another"):
        users = [make_user(name, text=text) for name in ("ann", "bob")]
        changes = {"training.local_steps": 3, "training.rounds": 3, "training.experts.learning_rate": 0.1}
        federation = hidden(federate, cases.method(method), users=users, **changes)
        uploads = []
        for number in range(3):
            local_round(federation, everyone(federation), number)
            upload = federation.clients.upload(list(everyone(federation)), number + 1, {"loss": torch.ones(2)})
            uploads += [pack(part) for part in upload.split()]
            exchange(federation, done=number + 1)
        sent.append(uploads)
        local.append(federation.clients.state.rows)
    assert sent[0] == sent[1]
    own_roles = make(method).client.trained - make(method).shared
    layout = federation.clients.model.layout
    if own_roles & layout.roles:
        assert not torch.equal(local[0], local[1])


def test_what_is_a_users_own_is_trained_without_noise_and_is_nowhere_in_the_gradient(federate: Any) -> None:
    federation = stirred(hidden(federate, "comigs-1g1s"))
    wanted, _ = sums_of(federation, [[0, 1], [2]])
    clients = federation.clients
    layout = clients.model.layout
    local = layout.mask(clients.method.client.trained) & ~layout.mask(clients.method.shared)
    clients.state.rows[:, local] += 1.0
    ours, _ = sums_of(federation, [[0, 1], [2]])
    assert all(torch.equal(ours[name], wanted[name]) for name in wanted)


def test_a_users_own_step_is_that_of_the_method_without_privacy(federate: Any) -> None:
    """The first step: specialist and router are what they would have been, as all begins with the same tensors."""
    short = {"training.local_steps": 1}
    plain = federate("comigs-1g1s", users=("ann", "bob"), base="random:llama?layers=1&dim=32", changes=short)
    federations = [plain, *(hidden(federate, "comigs-1g1s", noise_multiplier=z, **short) for z in (1.0, 30.0))]
    rows = []
    for federation in federations:
        local_round(federation, everyone(federation), 0)
        clients = federation.clients
        rows.append(
            clients.state.rows[:, clients.model.layout.mask(clients.method.client.trained - clients.method.shared)]
        )
    torch.testing.assert_close(rows[0], rows[1], rtol=1e-12, atol=1e-13)
    assert torch.equal(rows[1], rows[2])


# -------------------------------------------------------------------- noise


def test_the_noise_on_what_arrives_is_as_large_as_it_says(federate: Any) -> None:
    """After one step of SGD at rate 1 an upload is the download less the noised mean: what is left is Gaussian."""
    changes = {"training.experts": SGD, "training.local_steps": 1, "training.batch_size": 4}
    uploads = []
    for multiplier in (3.0, 1e-300):
        federation = hidden(federate, "comigs-1g1s", clip_norm=0.01, noise_multiplier=multiplier, **changes)
        local_round(federation, everyone(federation), 0)
        uploads.append(federation.clients.upload([0, 1], 1, {}).tensors)
    found = [
        torch.cat([(t[user] - uploads[1][name][user]).flatten() for name, t in uploads[0].items()]) for user in (0, 1)
    ]
    for noise in found:
        assert kstest((noise / (3.0 * 0.01 / 4)).numpy(), "norm").pvalue > 0.001
    assert float(torch.corrcoef(torch.stack(found))[0, 1].abs()) < 0.1  # the same stream never serves two users


def test_batches_are_drawn_example_by_example() -> None:
    examples = Example(privacy=PrivacySection(mechanism="example", noise_multiplier=1.0), key="k")
    work = Work(examples=20, batch=5, steps=1, rounds=1)
    drawn = [examples.draw_examples(work, "ann", number) for number in range(4000)]
    sizes = torch.tensor([float(len(one)) for one in drawn])
    assert abs(float(sizes.mean()) - 5) < 0.15
    assert abs(float(sizes.var()) - 20 * 0.25 * 0.75) < 0.3
    counts = torch.bincount(torch.cat(drawn), minlength=20) / 4000
    assert float((counts - 0.25).abs().max()) < 0.03
    everything = examples.draw_examples(Work(examples=3, batch=5, steps=1, rounds=1), "ann")
    assert everything.tolist() == [0, 1, 2]


def test_no_stream_serves_twice() -> None:
    """Neither another key, user, round, step nor beginning has the same batch or noise; the same ones have."""
    work, privacy = (
        Work(examples=400, batch=200, steps=1, rounds=1),
        PrivacySection(mechanism="example", noise_multiplier=1.0),
    )
    parts = [("ann", 0, "s", 0), ("bob", 0, "s", 0), ("ann", 1, "s", 0), ("ann", 0, "t", 0), ("ann", 0, "s", 1)]
    sums = {"w": torch.zeros(500, dtype=torch.float64)}
    made = [(Example(privacy=privacy, key=key), part) for key in ("k", "l") for part in parts]
    batches = [tuple(one.draw_examples(work, *part).tolist()) for one, part in made]
    noises = torch.stack([one.noised(sums, work, *part)["w"] for one, part in made])
    assert len(set(batches)) == len(made)
    assert float(torch.corrcoef(noises).fill_diagonal_(0).abs().max()) < 0.25
    again = Example(privacy=privacy, key="k")
    assert tuple(again.draw_examples(work, *parts[0]).tolist()) == batches[0]
    assert torch.equal(again.noised(sums, work, *parts[0])["w"], noises[0])


def test_who_is_asked_again_with_another_model_draws_another_batch_and_other_noise(
    federate: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[int, ...]] = []
    noises: list[Tensor] = []
    draw, noised = Example.draw_examples, Example.noised

    def watched(self: Example, work: Work, *parts: Any) -> Tensor:
        seen.append(tuple(draw(self, work, *parts).tolist()))
        return torch.tensor(seen[-1], dtype=torch.int64)

    def added(self: Example, sums: Tree, work: Work, *parts: Any) -> Tree:
        made = noised(self, sums, work, *parts)
        noises.append(torch.cat([(made[n] * work.expected - t).flatten() for n, t in sums.items()]))
        return made

    monkeypatch.setattr(Example, "draw_examples", watched)
    monkeypatch.setattr(Example, "noised", added)
    for moved in (0.0, 0.0, 1e-6):
        federation = hidden(federate, users=("ann",), **{"training.local_steps": 1, "training.batch_size": 4})
        federation.clients.state.rows += moved
        local_round(federation, [0], 0)
    assert seen[0] == seen[1] != seen[2]
    assert torch.equal(noises[0], noises[1])
    assert abs(float(torch.corrcoef(torch.stack(noises))[0, 2])) < 0.1


def test_what_finetunes_has_no_noise_and_leaves_nothing(federate: Any) -> None:
    """What ``fedavg+`` makes of the model before it is used is never sent."""
    tuned = []
    for settings in ({}, {"noise_multiplier": 50.0}):
        federation = hidden(federate, "fedavg+", **settings)
        before = federation.clients.state.rows.clone()
        with finetuned(federation.clients, 0):
            tuned.append(federation.clients.state.rows.clone())
        assert torch.equal(federation.clients.state.rows, before)
        assert not torch.equal(tuned[-1], before)
    assert torch.equal(tuned[0], tuned[1])


def test_copies_that_are_not_sent_have_no_noise(federate: Any) -> None:
    """FDLoRA's personal copies, the second two rows, are trained as they are without privacy."""
    rows = []
    for settings in ({}, {"noise_multiplier": 50.0}):
        federation = hidden(federate, "fdlora", **settings)
        local_round(federation, everyone(federation), 0)
        rows.append(federation.clients.state.rows)
    plain = federate("fdlora", users=("ann", "bob"), base="random:llama?layers=1&dim=32")
    local_round(plain, everyone(plain), 0)
    torch.testing.assert_close(rows[0][2:], plain.clients.state.rows[2:], rtol=1e-12, atol=1e-13)
    assert torch.equal(rows[0][2:], rows[1][2:])
    assert not torch.equal(rows[0][:2], rows[1][:2])


# -------------------------------------------------------------------- what an example is


def test_windows_are_at_fixed_places_and_have_no_token_in_common() -> None:
    for count in (17, 18, 19, 33, 34, 35, 120):
        stream = torch.arange(count, dtype=torch.int32)
        windows = fixed_windows(stream, context=16)
        tokens = windows[windows != PAD]
        assert tokens.tolist() == list(range(count - (count % 17 == 1)))
        assert (windows[:, 0] % 17 == 0).all()
        assert windows.shape[1] == 17
        assert ((windows != PAD).sum(1) >= 2).all()


def test_conversations_and_samples_are_examples_by_number(federate_nets: Any) -> None:
    batch_source = federate_nets("fedavg").clients.batch_source
    assert batch_source.examples(0) == len(batch_source.trainers[0].train)
    assert batch_source.examples_at([0, 1], torch.tensor([[3, PAD], [0, 5]]), 0).tolist() == [[3, PAD], [0, 5]]
