"""A user's model by itself is what the federation evaluates: nets that predict, mixtures that speak."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from comingle.config import parse_recipe
from comingle.data.samples.samples import Samples
from comingle.models.floral.wrapper import floral
from comingle.models.nets import make_net
from comingle.models.personal import PersonalModel
from comingle.models.routers import ClientMixture
from comingle.models.scoring import LOSSES
from comingle.models.stacked import stack
from comingle.runs.results import Run
from comingle.training.backends.local import InProcess
from comingle.training.client import Clients
from comingle.training.kinds.samples import MixtureOfModels, PersonalNet, personal_net
from comingle.utils.errors import DataError
from comingle.utils.trees import CLIENT_ROUTER

EXACT = {"rtol": 1e-9, "atol": 1e-9}
MIXTURES = ["floral", "floral-optimal", "floral-mfl", "local-adaptor"]
WHOLE = ["pretrained", "local", "fedavg", "centralized"]
GENERATING = ["floral", {"name": "floral", "temperature": 0.3}, "floral-mfl", "local-adaptor"]


def run_of(federation: InProcess) -> Run:
    speaks = federation.clients.batch_source.unit == "tokens"
    data = {"users": {"somebody": "unused"}} if speaks else {"task": "unused"}
    recipe = parse_recipe({"method": federation.clients.method.name, "data": data})
    return Run(folder=None, recipe=recipe, metrics={}, federation=federation)


def stirred(federation: InProcess) -> InProcess:
    """Everybody's tensors moved at random, variances kept positive, so that no two users are alike."""
    generator, sim = torch.Generator().manual_seed(5), federation.clients
    rows, mixture = sim.state.rows, sim.method.placement.mixture
    noise = torch.randn(rows.shape, generator=generator, dtype=torch.float64)
    rows.add_(0.3 * noise.to(rows))
    for name, view in sim.model.layout.views(rows).items():
        if name.endswith("running_var"):
            view.abs_().add_(0.1)
        if name == CLIENT_ROUTER and mixture is not None and not mixture.optimal:
            view.mul_(3)
    return federation


# ---------------------------------------------------------------- nets


@pytest.mark.parametrize("task", ["linear", "mlp-norm"])
@pytest.mark.parametrize("method", [*WHOLE, *MIXTURES, "ensemble", "ensemble-optimal", "mfl", "fml"])
def test_a_net_predicts_what_the_federation_does(federate_nets: Any, method: str, task: str) -> None:
    sim = stirred(federate_nets(method, changes={"data.task.name": task}))
    scores = sim.clients.evaluate()
    for i in (0, 3):
        person = run_of(sim).user(sim.clients.users[i].name)
        assert isinstance(person, PersonalNet)
        inputs = sim.clients.users[i].test.inputs
        expected = sim.clients.scorer.predict(
            sim.clients.models, [sim.clients.row_of[i]], inputs.to(torch.float64).unsqueeze(0)
        )[0]
        assert expected.abs().max() > 0.1
        torch.testing.assert_close(person.predict(inputs), expected, **EXACT)
        assert person.evaluate(sim.clients.users[i].test).mean_loss == pytest.approx(scores[i].mean_loss, rel=1e-9)


@pytest.mark.parametrize("method", [*WHOLE, *MIXTURES, "fml"])
def test_a_state_dict_is_one_of_the_plain_net(federate_nets: Any, method: str, tmp_path: Path) -> None:
    sim = stirred(federate_nets(method))
    person = run_of(sim).user(sim.clients.users[1].name)
    torch.save(person.model.state_dict(), tmp_path / "net.pt")
    plain = make_net(
        "mlp-norm", tuple(sim.clients.users[1].test.inputs.shape[1:]), sim.clients.users[1].test.targets.shape[1]
    )
    plain = plain.double().eval()
    plain.load_state_dict(torch.load(tmp_path / "net.pt", weights_only=True))
    inputs = sim.clients.users[1].test.inputs.double()
    expected = sim.clients.scorer.predict(sim.clients.models, [sim.clients.row_of[1]], inputs.unsqueeze(0))[0]
    torch.testing.assert_close(plain(inputs), expected, **EXACT)


def test_an_ensembles_state_dict_holds_its_models_and_their_shares(federate_nets: Any) -> None:
    sim = stirred(federate_nets({"name": "ensemble", "clusters": 3}))
    first, second = (run_of(sim).user(sim.clients.users[i].name).model for i in (0, 1))
    assert isinstance(second, MixtureOfModels)
    inputs = sim.clients.users[0].test.inputs.double()
    assert not torch.allclose(second(inputs), first(inputs))
    second.load_state_dict(first.state_dict())
    assert torch.equal(second(inputs), first(inputs))
    assert float(first.shares.sum()) == pytest.approx(1)


def convolutional() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, stride=2, padding=1), nn.BatchNorm2d(6), nn.ReLU(), nn.Flatten(), nn.Linear(96, 5)
    )


@pytest.mark.parametrize("make", [convolutional, lambda: make_net("cifar10", (3, 14, 14), 5, seed=1)])
@pytest.mark.parametrize("conv", ["balanced-2d", "channel"])
@pytest.mark.parametrize("nora", [False, True])
def test_a_convolutional_net_is_merged_with_its_batch_norms(make: Any, conv: Any, nora: bool) -> None:
    wrapped = floral(make(), num_clusters=3, rank=2, conv=conv, batch_nora=nora, generator=torch.Generator())
    model = stack([wrapped], name="net:some", users=2, mixture=ClientMixture(clusters=3), dtype=torch.float64)
    generator = torch.Generator().manual_seed(2)
    rows = torch.cat([s.init(s.shape, generator).flatten() for s in model.layout.slots]).double().repeat(2, 1)
    rows += 0.1 * torch.randn(rows.shape, generator=generator).abs()
    own = {name: t[1:] for name, t in model.layout.views(rows).items()}
    person = personal_net("ann", model, own)
    size = 8 if make is convolutional else 14
    images = torch.randn(1, 2, 3, size, size, generator=generator).double()
    torch.testing.assert_close(person.predict(images[0]), model.predict(own, [1], images)[0], **EXACT)
    assert person.model.state_dict().keys() == make().state_dict().keys()


def test_a_users_net_is_its_own(federate_nets: Any) -> None:
    """In evaluation mode, trainable, and nothing done to it reaches the federation or a second copy."""
    sim = stirred(federate_nets("floral"))
    before = sim.clients.state.rows.clone()
    one, two = (run_of(sim).user("user-0") for _ in range(2))
    assert not one.model.training
    assert all(p.requires_grad for p in one.model.parameters())
    inputs = sim.clients.users[0].test.inputs
    expected = two.predict(inputs)
    one.model.train()(inputs.double()).sum().backward()
    with torch.no_grad():
        for p in one.model.parameters():
            p.sub_(p.grad + 1)
    assert torch.equal(sim.clients.state.rows, before)
    assert torch.equal(two.predict(inputs), expected)
    assert not torch.allclose(one.predict(inputs), expected)


def test_inputs_of_another_dtype_and_no_samples_are_fine(federate_nets: Any) -> None:
    sim = federate_nets("fedavg")
    person = run_of(sim).user("user-1")
    test = sim.clients.users[1].test
    assert person.predict(test.inputs.float()).dtype == torch.float64
    score = person.evaluate(Samples(inputs=test.inputs[:0], targets=test.targets[:0]))
    assert score.samples == 0
    assert math.isnan(score.mean_loss)


def test_classes_are_scored_by_accuracy() -> None:
    net = nn.Linear(4, 3)
    person = PersonalNet(name="ann", model=net.eval(), loss=LOSSES["cross_entropy"])
    inputs = torch.randn(600, 4, generator=torch.Generator().manual_seed(1))
    targets = net(inputs).argmax(-1)
    targets[:60] = (targets[:60] + 1) % 3
    score = person.evaluate(Samples(inputs=inputs, targets=targets))
    assert (score.samples, score.accuracy) == (600, 0.9)
    assert score.mean_loss == pytest.approx(float(nn.functional.cross_entropy(net(inputs), targets).detach()), rel=1e-5)


# ---------------------------------------------------------------- mixtures on a language model


def materialised(sim: Clients, row: int) -> Any:
    """The base with ``W + alpha sum_c pi_c B_c A_c`` in the place of every adapted weight, written out."""
    model, tensors = sim.model, sim.steps.tensors(sim.state.rows[row : row + 1])
    merged = copy.deepcopy(model.base.model)
    pi = (tensors[CLIENT_ROUTER][0] / model.mixture.temperature).softmax(0)
    inner = merged.base_model
    for name in [n.removesuffix(".a") for n in tensors if n.endswith(".a")]:
        a, b = tensors[f"{name}.a"][0], tensors[f"{name}.b"][0]
        change = sum(p * (bc @ ac) for p, ac, bc in zip(pi, a, b, strict=True))
        layer = inner.get_submodule(name.removeprefix("model."))
        alpha = model.net.get_submodule(name).alpha
        layer.weight.data += alpha * (change if isinstance(layer, nn.Linear) else change.T)
    return merged


def greedy(network: Any, ids: list[int], count: int) -> list[int]:
    """One token after the other, each with a whole forward pass."""
    ids = list(ids)
    with torch.no_grad():
        for _ in range(count):
            ids.append(int(network(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    return ids


@pytest.mark.parametrize("method", GENERATING)
@pytest.mark.sampled(1)
def test_a_mixture_speaks_and_scores_as_the_federation_does(federate: Any, method: Any) -> None:
    sim = stirred(federate(method))
    run, scores, said = run_of(sim), sim.clients.evaluate(), set()
    for i in (0, 2, 0):
        person = run.user(sim.clients.users[i].name)
        assert isinstance(person, PersonalModel)
        own = person.score(sim.clients.users[i].test, context=16)
        assert own.loss_nats == pytest.approx(scores[i].loss_nats, rel=1e-12)
        merged = materialised(sim.clients, sim.clients.row_of[i])
        prompt = list(b"one two")
        expected = bytes(t for t in greedy(merged, prompt, 12)[len(prompt) :] if t < 256)
        answer = person.generate("one two", max_new_tokens=12)
        assert answer == expected.decode(errors="replace")
        said.add(answer)
    assert len(said) == 2


@pytest.mark.parametrize("base", ["random:llama", "random:gpt2"])
def test_a_merged_language_model_is_a_plain_one(federate: Any, base: str, tmp_path: Path) -> None:
    sim = stirred(federate("floral", base=base))
    person = run_of(sim).user("bob")
    merged = person.merge()
    assert type(merged) is type(sim.clients.model.base.model)
    assert merged.state_dict().keys() == sim.clients.model.base.model.state_dict().keys()
    ids = torch.arange(3, 19).unsqueeze(0)
    expected = materialised(sim.clients, 1)(input_ids=ids).logits
    assert (expected - sim.clients.model.base.model(input_ids=ids).logits).abs().max() > 1e-3
    torch.testing.assert_close(merged(input_ids=ids).logits, expected, **EXACT)
    with person.generating() as network:
        torch.testing.assert_close(network(input_ids=ids).logits, expected, **EXACT)
    merged.save_pretrained(tmp_path / "bob")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "bob", dtype=torch.float64)
    # transformers makes the rotation's frequencies anew, which are float32 there.
    torch.testing.assert_close(again(input_ids=ids).logits, expected, rtol=0, atol=1e-5)


def test_speaking_copies_no_weight_of_the_base_and_changes_nobody(federate: Any) -> None:
    sim = stirred(federate("floral"))
    base, run = sim.clients.model.base.model, run_of(sim)
    ids = torch.arange(5, 15).unsqueeze(0)
    rows, logits = sim.clients.state.rows.clone(), base(input_ids=ids).logits
    scores = [score.mean_loss for score in sim.clients.evaluate()]
    ann, bob = run.user("ann"), run.user("bob")
    with ann.generating() as one, bob.generating() as two:
        own = {id(p) for p in base.parameters()}
        adaptors = [n for n, p in one.named_parameters() if id(p) not in own]
        assert adaptors
        assert all(n.endswith((".a", ".b")) for n in adaptors)
        assert not torch.allclose(one(input_ids=ids).logits, two(input_ids=ids).logits)
    merged: Any = ann.merge()
    with torch.no_grad():
        for p in merged.parameters():
            p.zero_()
    assert torch.equal(base(input_ids=ids).logits, logits)
    assert torch.equal(sim.clients.state.rows, rows)
    assert [score.mean_loss for score in sim.clients.evaluate()] == scores


def test_perplexity_and_sampling_work_as_for_experts(federate: Any) -> None:
    sim = stirred(federate("floral"))
    person = run_of(sim).user("cem")
    text = "some words that nobody has read"
    ids = torch.tensor([list(text.encode())])
    logits = materialised(sim.clients, 2)(input_ids=ids).logits[0, :-1]
    expected = float(nn.functional.cross_entropy(logits, ids[0, 1:]).exp())
    assert person.perplexity(text) == pytest.approx(expected, rel=1e-9)
    sampled = [person.generate("a", max_new_tokens=10, temperature=1.0, seed=s) for s in (1, 1, 2)]
    assert sampled[0] == sampled[1] != sampled[2]
    assert isinstance(person.generate("", max_new_tokens=3), str)


def test_what_a_model_cannot_do_is_one_line(federate: Any) -> None:
    mixed = run_of(federate("floral")).user("ann")
    with pytest.raises(DataError, match=r"user 'ann': .*mixture"):
        mixed.route("words")
    routed = run_of(federate("comigs-1g1s")).user("ann")
    with pytest.raises(DataError, match=r"user 'ann': .*experts .*merged"):
        routed.merge()
    with pytest.raises(DataError, match=r"'dan'.* ann, bob, cem"):
        run_of(federate("floral")).user("dan")


def test_a_bfloat16_base_is_spoken_over_without_rounding_its_weights(federate: Any) -> None:
    sim = stirred(federate("floral", dtype="bfloat16"))
    tokens: Tensor = sim.clients.users[0].test
    person = run_of(sim).user("ann")
    with person.generating() as network, torch.no_grad():
        logits = network(input_ids=tokens[None, :16].long()).logits[0].float()
    found = nn.functional.cross_entropy(logits[:-1], tokens[1:16].long())
    assert float(found) == pytest.approx(person.score(tokens[:16], context=16).mean_loss, rel=2e-2)


# ---------------------------------------------------------------- both


def test_what_only_the_other_can_do_is_refused_in_one_line(federate: Any, federate_nets: Any) -> None:
    ann, net = run_of(federate("fedavg")).user("ann"), run_of(federate_nets("fedavg")).user("user-0")
    has = "export, generate, logits, merge, perplexity, route, score"
    some = Samples(inputs=torch.zeros(3, 2), targets=torch.zeros(3, dtype=torch.int64))
    for ask, asked in ((lambda: ann.predict(some.inputs), "predict"), (lambda: ann.evaluate(some), "evaluate")):
        with pytest.raises(DataError, match=rf"user 'ann': .*PersonalModel .*{asked}; .*: model, {has}$"):
            ask()
    calls = {
        "generate": lambda: net.generate("x", max_new_tokens=2),
        "perplexity": lambda: net.perplexity("x"),
        "logits": lambda: net.logits(torch.zeros(1, 2)),
        "score": lambda: net.score(torch.zeros(2), context=2),
        "route": lambda: net.route("x"),
        "merge": net.merge,
        "export": lambda: net.export("somewhere"),
    }
    assert ", ".join(sorted(calls)) == has
    for asked, ask in calls.items():
        with pytest.raises(DataError, match=rf"user 'user-0': .*PersonalNet .*{asked}; .*: model, evaluate, predict$"):
            ask()
