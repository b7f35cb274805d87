"""Questions in the engine: what is drawn, what has a loss, what a model answers, and whole runs."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.quick import quick
from torch import Tensor

from comingle.config import Recipe, parse_recipe
from comingle.config.settings import TrainingSection
from comingle.data.conversations.encoding import Answers, Question, UserAnswers, build_answers, encode
from comingle.data.populations import as_users
from comingle.methods import make
from comingle.methods.base import Phase, Stream
from comingle.models.adapted import AdaptedModel
from comingle.models.loading import load_base
from comingle.models.personal import PersonalModel
from comingle.models.random_bases import EOS, byte_tokenizer
from comingle.models.scoring import PAD
from comingle.runs import api, session
from comingle.runs.session import prepare
from comingle.training.backends.local import InProcess
from comingle.training.client import Clients, train
from comingle.training.kinds import conversations as feeding
from comingle.training.kinds.base import RunData, kind_of
from comingle.training.kinds.conversations import AnswerBatchSource, training_tokens
from comingle.training.settings import PassSize, RunPlan
from comingle.utils.errors import RecipeError
from comingle.utils.files import list_checkpoints
from comingle.utils.records import read_events
from comingle.utils.seeds import generator
from comingle_papers.questions import LABELS
from federations import everyone, exchange, gradient_of

EXACT = {"rtol": 1e-9, "atol": 1e-12}
USERS = {"ann": 3, "bob": 9, "cem": 5}
"""Names, and lengths of words: questions of different users have different lengths."""
FLORAL = {"name": "floral", "clusters": 2}


def answers(name: str, split: str, count: int, letters: int, *, prompts: bool = False) -> Answers:
    """Questions of random letters, the answers one to four letters long."""

    def text(number: int, what: str, most: int) -> str:
        random = generator("questions", name, split, number, what)
        size = int(torch.randint(1, most + 1, (), generator=random))
        return bytes((97 + torch.randint(26, (size,), generator=random)).tolist()).decode()

    questions = [Question(prompt=text(i, "prompt", letters), answer=text(i, "answer", 4)) for i in range(count)]
    encoded = encode(questions, byte_tokenizer())
    return build_answers(encoded, limit=5, measures=("rouge1", "loss"), ends=(EOS,), loss_on_all=prompts)


def make_user(name: str, *, train: int = 5, prompts: bool = False) -> UserAnswers:
    letters = USERS[name]
    return UserAnswers(
        name=name,
        train=answers(name, "train", train, letters, prompts=prompts),
        valid=answers(name, "valid", 3, letters),
        test=answers(name, "test", 7, letters),
    )


Ask = Callable[..., InProcess]


pytestmark = pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")  # SDPA under vmap


@pytest.fixture(scope="module")
def ask() -> Ask:
    """A federation of users with questions, over a random base of two layers in float64."""
    # Eager attention has its softmax in float32, whose rounding goes with the width of the batch on some processors.
    base = load_base("random:llama", dtype="float64", device="cpu", attention="sdpa")

    def make(method: Any, users: Sequence[UserAnswers | str] = tuple(USERS), **changes: Any) -> InProcess:
        recipe = parse_recipe(
            {
                "base": "random:llama",
                "method": method,
                "data": {"questions": "xnli"},
                "adapters": {"rank": 2},
                "training": {"rounds": 2, "batch_size": 2, "context": 24, "experts": {"learning_rate": 0.05}},
                "runtime": {"dtype": "float64", "device": "cpu", "compile": False},
            }
        ).with_changes(changes)
        people = tuple(user if isinstance(user, UserAnswers) else make_user(user) for user in users)
        return session.build(recipe, RunData(kind=kind_of(recipe), base=base, users=as_users(people)))

    return make


def stir(sim: Clients) -> None:
    """Give every user a model of its own, far from the base."""
    rows = sim.state.rows
    rows += 0.3 * torch.randn(rows.shape, generator=generator("stir"), dtype=rows.dtype) * sim.mask


# ---------------------------------------------------------------- what is drawn


@pytest.mark.parametrize("name", ["fedavg", "comigs-1g1s"])
def test_a_round_asks_every_question_once(ask: Ask, name: str) -> None:
    sim = ask(name, [make_user("ann"), make_user("bob", train=3)], **{"training.local_epochs": 2}).clients
    batch_source, phase = sim.batch_source, Phase(roles=frozenset())
    assert [batch_source.steps(i) for i in range(2)] == [6, 4]
    assert [batch_source.trained_amount(i) for i in range(2)] == [10, 6]
    for i, user in enumerate(sim.trainers):
        own = present(user.train.windows)
        drawn = [
            window
            for step in range(batch_source.steps(i))
            for window in present(batch_source.draw([i], phase, 0, step, 0)[0])
        ]
        assert sorted(drawn) == sorted(2 * own)
        assert [window for part in batch_source.sweep([i], 0) for window in present(part[0])] == own
    firsts = {tuple(present(batch_source.draw([0], phase, number, 0, 0)[0])) for number in range(5)}
    assert len(firsts) > 1  # every round has an order of its own


def test_batches_before_the_first_step_are_of_the_split_of_their_phase(ask: Ask) -> None:
    sim = ask("fedavg", [make_user("ann", train=5)]).clients
    splits: list[Stream] = ["train", "valid", "train"]
    batches = [sim.batch_source.draw([0], Phase(roles=frozenset(), stream=split), 0, -1, 0)[0] for split in splits]
    ann = sim.trainers[0]
    assert set(present(batches[0])) <= set(present(ann.train.windows))
    assert set(present(batches[1])) <= set(present(ann.valid.windows))
    assert torch.equal(batches[0], batches[2])


def present(windows: Tensor) -> list[tuple[int, ...]]:
    """The windows of real questions, without padding."""
    return [tuple(row[row != PAD].tolist()) for row in windows if bool((row != PAD).any())]


def test_training_tokens_are_those_of_all_passes_without_padding(ask: Ask) -> None:
    sim = ask("fedavg", [make_user("ann"), make_user("bob", train=3)], **{"training.local_epochs": 3}).clients
    own = [len(user.train.tokens(number)) for user in sim.trainers for number in range(len(user.train))]
    assert training_tokens(sim.trainers, sim.plan) == 2 * 3 * sum(own)


def test_batches_are_as_wide_as_their_longest_question_unless_tokens_are_routed(ask: Ask) -> None:
    narrow, even = (ask(method).clients.batch_source for method in ("fedavg", "comigs-1g1s"))
    free = ask("comigs-1g1s", **{"training.balance_weight": 0}).clients.batch_source
    for step in range(3):
        drawn = narrow.draw([0, 1], Phase(roles=frozenset()), 0, step, 0)
        assert bool((drawn[..., -1] != PAD).any())
        assert torch.equal(free.draw([0, 1], Phase(roles=frozenset()), 0, step, 0), drawn)
        assert even.draw([0, 1], Phase(roles=frozenset()), 0, step, 0).shape[-1] == 24


# ---------------------------------------------------------------- what has a loss


def naive(sim: Clients, rows: Sequence[Tensor], tensors: dict[str, Tensor], row: int, *, prompts: bool) -> Tensor:
    """Mean loss of the answers' tokens, each question by itself through all logits; rows as in ``Answers.windows``."""
    losses = []
    for window in rows:
        window = window[window != PAD]
        asked = int((window < 0).sum())
        ids = torch.where(window < 0, -2 - window, window)
        sim.model.adapters.bind(tensors, [row])
        logits = sim.model.network(input_ids=ids.unsqueeze(0)).logits[0]
        first = 1 if prompts else asked
        losses.append(F.cross_entropy(logits[first - 1 : -1], ids[first:], reduction="none"))
    return torch.cat(losses).mean()


@pytest.mark.parametrize("prompts", [False, True])
def test_the_loss_and_its_gradient_are_those_of_the_answers_alone(ask: Ask, prompts: bool) -> None:
    sim = ask("fedavg", [make_user(name, prompts=prompts) for name in USERS], **{"training.batch_size": 3}).clients
    stir(sim)
    phase = sim.phases[0]
    drawn = sim.batch_source.draw([0, 1, 2], phase, 0, 1, 0)  # the rest of the pass: two questions
    losses, gradients = gradient_of(sim, [0, 1, 2], drawn, phase)
    for row in range(3):
        leaves = {n: t[row : row + 1].clone().requires_grad_() for n, t in sim.steps.tensors(sim.state.rows).items()}
        questions = [window for window in drawn[row] if bool((window != PAD).any())]
        assert len(questions) == 2
        loss = naive(sim, questions, leaves, row, prompts=prompts)
        torch.testing.assert_close(losses[row].double(), loss.detach(), rtol=1e-6, atol=0)  # reported in float32
        expected = torch.autograd.grad(loss, list(leaves.values()))
        for name, gradient in zip(leaves, expected, strict=True):
            torch.testing.assert_close(gradients[name][row], gradient[0], rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("method", ["fedavg", "comigs-1g1s", "floral"])
def test_test_losses_are_those_of_a_loop_over_questions(ask: Ask, method: str) -> None:
    sim = ask(FLORAL if method == "floral" else method).clients
    stir(sim)
    found = sim.scorer.score(sim.models, [user.test for user in sim.users], sim.row_of)
    for row, (user, score) in enumerate(zip(sim.users, found, strict=True)):
        tokens = sum(len(text) + 1 for text in user.test.references)
        assert (score.tokens, score.samples) == (tokens, 7)
        if isinstance(sim.model, AdaptedModel):
            tensors = {n: t[row : row + 1] for n, t in sim.steps.tensors(sim.state.rows).items()}
            expected = naive(sim, list(user.test.windows), tensors, row, prompts=False)
            assert score.mean_loss == pytest.approx(float(expected), rel=1e-8)
        one_by_one = sim.batch_source.score(
            partial(sim.scorer.predict, sim.models), [user.test], [row], PassSize(users=1, sequences=1), None
        )[0]
        assert one_by_one.mean_loss == pytest.approx(score.mean_loss, rel=1e-8)


# ---------------------------------------------------------------- laws


def trained(federation: InProcess) -> Tensor:
    for number in range(2):
        if number:
            exchange(federation, done=number)
        train(federation.clients, everyone(federation), number)
    return federation.clients.state.rows


THREE = {"name": "comigs", "specialists": 2, "router_every": 2, "router_steps": 1}
"""With three experts of which a token takes two, the load-balancing penalty has a gradient."""


@pytest.mark.parametrize("method", ["local", THREE, FLORAL], ids=["local", "comigs", "floral"])
def test_a_cohort_equals_its_users_alone(ask: Ask, method: Any) -> None:
    def one_round(federation: InProcess) -> Tensor:
        train(federation.clients, everyone(federation), 0)
        return federation.clients.state.rows

    together = one_round(ask(method))
    for row, name in enumerate(USERS):
        torch.testing.assert_close(together[row : row + 1], one_round(ask(method, [name])), rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("method", quick(("fedavg", "comigs-1g1s"), "comigs-1g1s"))
def test_portions_change_nothing(ask: Ask, method: str) -> None:
    whole = trained(ask(method))
    for changes in ({"runtime.users_per_step": 1}, {"runtime.micro_batch": 1}):
        torch.testing.assert_close(trained(ask(method, **changes)), whole, rtol=1e-7, atol=1e-9)


# ---------------------------------------------------------------- what models answer


def spoken(sim: Clients, user: int) -> list[str]:
    """One question at a time, by the personal model."""
    row, part = sim.row_of[user], sim.users[user].test
    tensors = {n: t[row : row + 1] for n, t in sim.steps.tensors(sim.state.rows).items()}
    personal = PersonalModel(name="one", model=sim.model, tensors=tensors, row=row)  # type: ignore[arg-type]
    tokenizer = byte_tokenizer()
    prompts = [str(tokenizer.decode(part.prompt(number).tolist())) for number in range(len(part))]
    return [personal.generate(prompt, max_new_tokens=part.limit).strip() for prompt in prompts]


@pytest.mark.parametrize("method", quick(("local", "comigs-1g1s", "floral"), "comigs-1g1s", "floral"))
@pytest.mark.slow
def test_answers_of_many_users_are_those_of_each_alone(ask: Ask, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sim = ask(FLORAL if method == "floral" else method).clients
    stir(sim)
    assert isinstance(sim.batch_source, AnswerBatchSource)
    sets = [user.test for user in sim.users]
    expected = [spoken(sim, user) for user in range(3)]
    generate = partial(sim.scorer.generate, sim.models)
    for speaking in (1, 5, 64):
        monkeypatch.setattr(feeding, "MAX_RESPONSES_AT_ONCE", speaking)
        for sequences in (16, 1):
            assert (
                sim.batch_source.generate_responses(generate, sets, sim.row_of, PassSize(users=2, sequences=sequences))
                == expected
            )
    assert len({tuple(texts) for texts in expected}) == 3
    scores = sim.evaluate()
    assert [list(score.measures) for score in scores] == [["rouge1", "loss"]] * 3


def test_an_answer_ends_at_the_end_of_text_or_at_the_users_limit() -> None:
    """A model that counts up from its row's number."""
    plan = RunPlan(method=make("fedavg"), training=TrainingSection(context=24))
    batch_source = AnswerBatchSource([make_user("ann")], plan, 2, tokenizer=byte_tokenizer())

    def count(rows: Sequence[int], prompts: Tensor, limit: int) -> Tensor:
        assert bool((prompts[..., -1] != PAD).all())
        said = torch.tensor(rows).view(-1, 1, 1) + torch.arange(limit).view(1, 1, -1)
        return torch.where(said == 97 + 3, EOS, said).expand(*prompts.shape[:2], -1)

    first = answers("ann", "test", 4, 3)
    longer = Answers(**{**vars(answers("bob", "test", 1, 9)), "limit": 9})
    found = batch_source.generate_responses(count, [first, longer], [97, 110], PassSize(users=2, sequences=3))
    assert found == [["abc"] * 4, ["nopqrstuv"]]
    assert batch_source.generate_responses(count, [first], [101], PassSize(users=1, sequences=1)) == [["efghi"] * 4]


# ---------------------------------------------------------------- whole runs


def recipe_of(folder: Path, method: Any = "fedavg", *, label: str = "", **changes: Any) -> Recipe:
    """XNLI in two languages, 9 questions each; with ``label`` it answers them all."""
    rows = [
        {"id": i, "lang": who, "premise": f"{who}{i}", "hypothesis": "h" * (i % 3), "label": label or LABELS[i % 3]}
        for who in ("en", "de")
        for i in range(9)
    ]
    (folder / "xnli.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    content = {
        "base": "random:llama",
        "method": method,
        "data": {
            "questions": {
                "name": "xnli",
                "path": str(folder),
                "languages": ["en", "de"],
                "train": 4,
                "valid": 2,
                "test": 3,
            }
        },
        "adapters": {"rank": 2},
        "training": {"rounds": 2, "batch_size": 2, "context": 190, "weighting": "samples"},
        "evaluation": {"every": 1},
        "checkpoints": {"every": 1, "keep": 9},
        "runtime": {"dtype": "float32", "device": "cpu", "threads": 1},
    }
    return parse_recipe(content).with_changes(changes)


@pytest.mark.parametrize(
    "method", quick(("centralized", {"name": "pcl", "exchange_from": 1}, FLORAL, "fedmerge"), FLORAL, "fedmerge")
)
@pytest.mark.slow
def test_methods_run_on_questions(tmp_path: Path, method: Any) -> None:
    run = api.run(recipe_of(tmp_path, method), out=tmp_path / "run")
    metrics = run.metrics
    assert (metrics["measure"], metrics["unit"]) == ("accuracy", "samples")
    assert metrics["mean_test_accuracy"] == pytest.approx(
        sum(user["test_accuracy"] for user in metrics["users"].values()) / 2
    )
    for user in metrics["users"].values():
        assert (user["train_samples"], user["valid_samples"], user["test_samples"]) == (4, 2, 3)
        assert 0 <= user["test_accuracy"] <= user["test_rouge1"] <= 1
        assert 0 < user["test_loss"] < 8
    again = api.load(tmp_path / "run")
    assert isinstance(again.user("de"), PersonalModel)
    assert [score.measures for score in again.federation.clients.evaluate()] == [
        score.measures for score in run.federation.clients.evaluate()
    ]


def test_models_that_have_learnt_the_answer_give_it(tmp_path: Path) -> None:
    optimiser = {"learning_rate": 0.01, "schedule": "constant"}
    changes = {"training.rounds": 20, "adapters.rank": 8, "training.experts": optimiser, "evaluation.every": 20}
    found: list[dict[str, Any]] = []
    run = api.run(
        recipe_of(tmp_path, "local", label="neutral", **changes),
        observers=[lambda event: found.append(event) if event["event"] == "evaluation" else None],
    )
    assert [event["mean_test_accuracy"] for event in found] == [0, 1]
    assert [user["test_rouge1"] for user in run.metrics["users"].values()] == [1, 1]


@pytest.mark.slow
def test_a_resumed_run_is_the_run_that_never_stopped(tmp_path: Path) -> None:
    recipe = recipe_of(tmp_path, THREE, **{"training.rounds": 4, "training.participation": 0.5})
    whole = api.run(recipe, out=tmp_path / "whole")
    shutil.copytree(tmp_path / "whole", tmp_path / "cut")
    (tmp_path / "cut" / "metrics.json").unlink()
    for folder in list_checkpoints(tmp_path / "cut")[2:]:
        shutil.rmtree(folder)
    rest = api.run(recipe, out=tmp_path / "cut", resume=True)
    assert torch.equal(rest.federation.clients.state.rows, whole.federation.clients.state.rows)
    timed = {"wall_seconds", "samples_per_second", "peak_memory_bytes"}
    assert {k: v for k, v in rest.metrics.items() if k not in timed} == {
        k: v for k, v in whole.metrics.items() if k not in timed
    }
    events = [[{**e, "seconds": 0} for e in read_events(tmp_path / name)] for name in ("whole", "cut")]
    assert events[0] == events[1]


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("training.local_steps", 3, "training.local_steps: got 3"),
        ("data.split.test", 0.3, "recipe: data: split "),
        ("data.held_out", "mixture", "recipe: data: held_out "),
        ("data.max_train_tokens", 9, "recipe: data: max_train_tokens "),
        ("floral.rank", 2, "floral.rank: got 2"),
        ("training.weighting", "tokens", "training.weighting: got 'tokens' for data.questions; allowed: uniform, sam"),
        ("data.questions.languages", ["en", "xx"], "xnli: no language 'xx'; allowed: ar, bg, de,"),
    ],
)
def test_what_questions_never_read_is_refused(tmp_path: Path, key: str, value: Any, said: str) -> None:
    with pytest.raises(RecipeError) as found:
        prepare(recipe_of(tmp_path, **{key: value}))
    assert str(found.value).startswith(said)
