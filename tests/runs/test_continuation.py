"""``continue_from``: a run that starts from the users' models at the end of another one."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from tests.commands import comingle as comingle

from comingle.config import parse_recipe
from comingle.data.conversations.encoding import Answers
from comingle.data.samples.samples import Samples
from comingle.runs import api
from comingle.runs.continuation import check_earlier_run, draw_examples, start_from_run
from comingle.runs.given import given_of
from comingle.runs.results import Run
from comingle.runs.session import build, describe, prepare
from comingle.training.backends.local import InProcess
from comingle.training.checkpoints import STATE
from comingle.training.kinds.base import RunData
from comingle.utils.errors import ComingleError, RecipeError, RunError
from comingle.utils.files import list_checkpoints, seal
from comingle.utils.inputs import read_inputs
from comingle.utils.records import read_events, read_metrics
from comingle.utils.trees import Tree

USERS = ("ada", "ben", "cem")
OPTIONS: dict[str, Any] = {
    "base": "random:llama?layers=1&dim=32",
    "method": "comigs-1g1s",
    "training": {"rounds": 2, "local_steps": 2, "batch_size": 2, "context": 16},
    "evaluation": {"every": 1},
    "runtime": {"device": "cpu", "dtype": "float32", "threads": 1, "compile": False},
}

Train = Callable[..., Run]


def texts(*names: str, word: str = "counts") -> dict[str, list[str]]:
    return {name: [f"{name} {word} {number} of {number}." for number in range(60)] for name in names}


@pytest.fixture
def train(tmp_path: Path) -> Train:
    """Return a function that runs the recipe into a folder."""

    def run(out: str, users: Mapping[str, Any], **changes: Any) -> Run:
        return api.run(OPTIONS, users=users, out=tmp_path / out, **changes)

    return run


def prepared(earlier: Path, users: Mapping[str, Any], **changes: Any) -> tuple[InProcess, dict[str, Any]]:
    """A federation that continues, before its first round, and what ``start_from_run`` returns."""
    given = given_of(users, None, None, None)
    recipe = api.recipe_with(OPTIONS, given, base=None, method=None, changes={"continue_from": str(earlier), **changes})
    data: RunData = prepare(recipe, given=given)
    federation = build(recipe, data)
    return federation, start_from_run(federation, recipe, describe(data, recipe))


def tensors_of(federation: InProcess, name: str) -> Tree:
    clients = federation.clients
    row = list(clients.names).index(name)
    return clients.model.layout.views(clients.state.rows[row : row + 1])


def test_users_keep_their_tensors_in_any_order(train: Train) -> None:
    """One is dropped, one is new: its local tensors are initial, its shared ones are downloaded."""
    earlier = train("earlier", texts(*USERS), **{"evaluation.model": "exchanged"})
    federation, continues = prepared(earlier.folder, texts("dan", "cem", "ada"))
    for name in ("ada", "cem"):
        old = tensors_of(earlier.federation, name)
        for key, t in tensors_of(federation, name).items():
            assert torch.equal(t, old[key]), (name, key)
    assert federation.clients.state.versions.tolist() == [-1, 0, 0]
    initial = {key: t.clone() for key, t in tensors_of(federation, "dan").items()}
    federation.download([0])
    downloaded, of_ada = tensors_of(federation, "dan"), tensors_of(federation, "ada")
    changed = {key for key, t in downloaded.items() if not torch.equal(t, initial[key])}
    attention = [key for key in downloaded if "self_attn" in key]
    assert attention
    assert changed >= set(attention)
    assert all(torch.equal(downloaded[key], of_ada[key]) for key in attention)
    expert_keys = [key for key in downloaded if key.endswith("mlp.gate.a")]
    for key in expert_keys:  # experts: the generalist is shared, the specialist is not
        assert not torch.equal(downloaded[key], of_ada[key])
    assert federation.server.version == 0
    assert not federation.clients.state.first.any()
    assert not federation.clients.state.iterations.any()
    kept, new, dropped = (continues[key] for key in ("kept", "new", "dropped"))
    assert (kept, new, dropped) == (["cem", "ada"], ["dan"], ["ben"])


def test_a_run_is_that_of_a_federation_with_the_same_tensors(train: Train, tmp_path: Path) -> None:
    """Against rows that are copied by hand. The first evaluation has the scores with which the earlier run ended."""
    earlier, users = train("earlier", texts(*USERS)), texts(*USERS, word="reads")
    users["ada"] = texts("ada")["ada"]
    finished = train("later", users, continue_from=str(tmp_path / "earlier"), **{"training.rounds": 1})
    given = given_of(users, None, None, None)
    recipe = api.recipe_with(OPTIONS, given, base=None, method=None, changes={"training.rounds": 1})
    by_hand = build(recipe, prepare(recipe, given=given))
    by_hand.clients.state.rows.copy_(earlier.federation.clients.state.rows)
    by_hand.server.kept = {key: t.clone() for key, t in earlier.federation.server.kept.items()}
    api.run_in(
        None, recipe, prepare(recipe, given=given), resume=False, force=False, build_federation=lambda *_, **__: by_hand
    )
    for name in USERS:
        mine = tensors_of(finished.federation, name)
        assert all(torch.equal(t, mine[key]) for key, t in tensors_of(by_hand, name).items()), name
    events = list(read_events(tmp_path / "later"))
    first = next(event for event in events if event["event"] == "evaluation")
    assert first["users"]["ada"]["test_loss_nats"] == earlier.metrics["users"]["ada"]["test_loss_nats"]
    continues = events[0]["continues"]
    assert continues["rounds"] == 2
    assert continues["kept"] == list(USERS)
    assert continues["changed"] == ["ben", "cem"]
    assert continues["run"] == str(tmp_path / "earlier")


def test_moments_and_step_counts_go_on_with_a_constant_rate(train: Train) -> None:
    constant = {"training.experts.schedule": "constant"}
    earlier = train("earlier", texts(*USERS), **constant)
    federation, _ = prepared(
        earlier.folder, texts(*USERS), continue_from={"run": str(earlier.folder), "moments": True}, **constant
    )
    state, old = federation.clients.state, earlier.federation.clients.state
    assert old.first.any()
    for name in ("first", "second", "iterations", "router_steps"):
        assert torch.equal(getattr(state, name), getattr(old, name)), name
    with pytest.raises(RecipeError, match=r"training\.experts\.schedule: got 'cosine'"):
        prepared(earlier.folder, texts(*USERS), continue_from={"run": str(earlier.folder), "moments": True})


def test_users_without_the_newest_shared_tensors_download_them(train: Train) -> None:
    members = {"training.participation": [["ada", "ben"], ["ada"]], "evaluation.every": 2, "evaluation.first": False}
    earlier = train("earlier", texts(*USERS), **members, **{"evaluation.model": "local"})
    stale = earlier.federation.clients.state.versions < earlier.federation.server.version
    federation, _ = prepared(earlier.folder, texts(*USERS))
    assert torch.equal(federation.clients.state.versions == -1, stale)


@pytest.mark.parametrize(
    ("changes", "place"),
    [
        ({"method": "fedavg"}, "method: got 'fedavg'"),
        ({"base": "random:llama?layers=1&dim=64"}, "base: got"),
        ({"adapters": {"rank": 2}}, "adapters.rank: got 2; allowed: as in"),
        ({"adapters": {"rank": {"ada": 8, "ben": 8, "cem": 4}}}, "adapters.rank: got 4; allowed: as in"),
        ({"privacy": {"noise_multiplier": 1.0}}, "privacy.mechanism: got"),
        ({"runtime": {**OPTIONS["runtime"], "store": "disk"}}, "runtime.store: disk"),
    ],
)
def test_another_model_is_refused(train: Train, tmp_path: Path, changes: dict[str, Any], place: str) -> None:
    train("earlier", texts(*USERS))
    with pytest.raises(ComingleError) as refused:
        train("later", texts(*USERS), continue_from=str(tmp_path / "earlier"), **changes)
    assert place in str(refused.value)


def test_tensors_that_only_the_earlier_settings_keep_are_named(train: Train, tmp_path: Path) -> None:
    train("earlier", texts(*USERS), method={"name": "comigs-1g1s", "router_every": 1, "accumulate_gradients": True})
    with pytest.raises(RecipeError, match="tensor 'kept/gradients'"):
        train("later", texts(*USERS), continue_from=str(tmp_path / "earlier"))


def test_folders_that_are_no_run_are_refused(train: Train, tmp_path: Path) -> None:
    train("earlier", texts(*USERS))
    without_base = {"base": "no/such-base"}  # the folder is checked before the base is loaded
    with pytest.raises(ComingleError, match="no checkpoint"):
        train("later", texts(*USERS), continue_from=str(tmp_path / "nothing"), **without_base)
    for out in ("earlier", "earlier/later"):
        with pytest.raises(ComingleError, match="overlaps"):
            train(out, texts(*USERS), continue_from=str(tmp_path / "earlier"), force=True)
    assert list_checkpoints(tmp_path / "earlier")


def test_an_interrupted_run_goes_on_without_the_earlier_one(train: Train, tmp_path: Path) -> None:
    train("earlier", texts(*USERS))
    options = {"continue_from": str(tmp_path / "earlier"), "checkpoints.every": 1}
    whole = train("whole", texts(*USERS), **options)

    def interrupt(event: Mapping[str, Any]) -> None:
        if event["event"] == "round" and event["round"] == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train("halted", texts(*USERS), **options, observers=[interrupt])
    shutil.rmtree(tmp_path / "earlier")
    resumed = train("halted", texts(*USERS), **options, resume=True)
    assert resumed.metrics["users"] == whole.metrics["users"]


@pytest.mark.slow
def test_several_processes_continue_what_others_have_left(comingle: Any, tmp_path: Path) -> None:
    """Two processes from the run of one, and one from that of two: the same scores."""
    for name, lines in texts(*USERS).items():
        (tmp_path / f"{name}.txt").write_text("\n".join(lines))
    data = {"users": {name: {"path": f"{name}.txt"} for name in USERS}}
    recipe = tmp_path / "recipe.yaml"
    runtime = {**OPTIONS["runtime"], "users_per_step": 1, "shard_sums": "ordered"}
    recipe.write_text(yaml.safe_dump({**OPTIONS, "data": data, "runtime": runtime}))

    def scores(out: str, *options: Any) -> Any:
        command = [sys.executable, "-m", "comingle", "run", recipe, "--out", tmp_path / out, *options]
        done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return read_metrics(tmp_path / out)["users"]

    two = ("--processes", "2")
    assert scores("one") == scores("two", *two)
    later = scores("one, one", "--continue-from", tmp_path / "one")
    assert later == scores("one, two", "--continue-from", tmp_path / "one", *two)
    assert later == scores("two, one", "--continue-from", tmp_path / "two")


def write_texts(folder: Path, **words: str) -> dict[str, Any]:
    """Write a file with 60 lines for each user; return the section data."""
    folder.mkdir(exist_ok=True)
    for name, lines in {name: texts(name, word=word)[name] for name, word in words.items()}.items():
        (folder / f"{name}.txt").write_text("\n\n".join(lines))
    return {"users": {name: str(folder / f"{name}.txt") for name in words}}


MONTHLY = {**OPTIONS, "evaluation": {"every": 1, "model": "exchanged"}}


@pytest.fixture
def months(tmp_path: Path) -> dict[str, Run]:
    """A run in May, and one in June that replays; ben's text is the same in both months."""
    may = write_texts(tmp_path / "texts", ada="counts", ben="counts")
    first = api.run({**MONTHLY, "data": may}, out=tmp_path / "may")
    june = write_texts(tmp_path / "june texts", ada="reads and writes", ben="counts")
    later = {**MONTHLY, "data": {**june, "replay": 0.25}}
    return {"may": first, "june": api.run(later, out=tmp_path / "june", continue_from=str(tmp_path / "may"))}


def streams_of(run: Run) -> dict[str, torch.Tensor]:
    return {user.name: user.train for user in run.federation.clients.trainers}


def test_replay_adds_random_windows_of_earlier_text(months: dict[str, Run], tmp_path: Path) -> None:
    """A quarter of ada's training tokens, each window of them as it was; ben's text has not changed."""
    old, new = streams_of(months["may"]), streams_of(months["june"])
    own = read_inputs(tmp_path / "june").users["ada"].counts["train"]
    replayed = new["ada"][own:]
    assert len(replayed) == round(own / 3)
    width = OPTIONS["training"]["context"] + 1
    windows = {tuple(window) for window in old["ada"].unfold(0, width, 1).tolist()}
    assert all(
        tuple(window) in windows for window in replayed[: len(replayed) // width * width].view(-1, width).tolist()
    )
    assert torch.equal(new["ben"], old["ben"])
    (start, *_) = read_events(tmp_path / "june")
    assert start["continues"]["replayed"] == {"ada": len(replayed)}
    assert start["continues"]["changed"] == ["ada"]
    assert start["users"]["ada"]["train_tokens"] == own + len(replayed)


def test_forgetting_is_the_change_of_the_earlier_test_score(months: dict[str, Run], tmp_path: Path) -> None:
    """Against a third run, which scores ada's text of May before its first round."""
    (entry,) = months["june"].metrics["earlier"]
    assert entry["run"] == str(tmp_path / "may")
    assert list(entry["users"]) == ["ada"]
    scores, old = entry["users"]["ada"], months["may"].metrics["users"]["ada"]
    assert scores["before"] == {key: old[key] for key in scores["after"]}
    may = {"users": {name: str(tmp_path / "texts" / f"{name}.txt") for name in ("ada", "ben")}}
    api.run({**MONTHLY, "data": may}, out=tmp_path / "july", continue_from=str(tmp_path / "june"))
    first = next(event for event in read_events(tmp_path / "july") if event["event"] == "evaluation")
    assert first["users"]["ada"] == pytest.approx(scores["after"], rel=1e-6)
    assert scores["after"] != scores["before"]


def test_nothing_is_forgotten_without_learning(months: dict[str, Run], tmp_path: Path) -> None:
    """Two earlier runs, the latest first."""
    data = write_texts(tmp_path / "august texts", ada="sings", ben="runs")
    rates = {"training.experts.learning_rate": 1e-30, "training.router.learning_rate": 1e-30}
    recipe = {**MONTHLY, "data": data}
    run = api.run(recipe, out=tmp_path / "august", continue_from=str(tmp_path / "june"), **rates)
    june, may = run.metrics["earlier"]
    assert [entry["run"] for entry in (june, may)] == [str(tmp_path / month) for month in ("june", "may")]
    assert june["users"]["ada"]["after"] == pytest.approx(june["users"]["ada"]["before"])
    assert may["users"]["ada"]["after"] == months["june"].metrics["earlier"][0]["users"]["ada"]["after"]
    assert set(june["users"]) == {"ada", "ben"}
    assert set(may["users"]) == {"ada"}  # ben's text of May is that of June


def test_earlier_text_that_is_gone_is_neither_replayed_nor_scored(
    months: dict[str, Run], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "texts" / "ada.txt").write_text("ada writes something else\n\n" * 60)
    july = {**write_texts(tmp_path / "july texts", ada="sings", ben="runs"), "replay": 0.5}
    recipe = {**OPTIONS, "data": july}
    run = api.run(recipe, out=tmp_path / "july", continue_from=str(tmp_path / "may"))
    assert list(run.metrics["earlier"][0]["users"]) == ["ben"]
    assert "data has changed since" in caplog.text
    shutil.rmtree(tmp_path / "texts")
    run = api.run(recipe, out=tmp_path / "july", continue_from=str(tmp_path / "may"), force=True)
    assert "earlier" not in run.metrics
    assert "is not there" in caplog.text


def test_a_run_is_not_resumed_without_the_text_that_it_replays(months: dict[str, Run], tmp_path: Path) -> None:
    shutil.rmtree(tmp_path / "texts")
    recipe = tmp_path / "june" / "recipe.yaml"
    with pytest.raises(RunError, match="restore the files"):
        api.run(recipe, out=tmp_path / "june", resume=True)


def test_a_run_is_not_resumed_with_as_much_other_earlier_text(months: dict[str, Run], tmp_path: Path) -> None:
    """July replays text of May and of June; June's alone would be enough."""
    july = write_texts(tmp_path / "july texts", ada="sings", ben="counts")
    recipe = {**MONTHLY, "data": {**july, "replay": 0.25}, "continue_from": str(tmp_path / "june")}
    api.run(recipe, out=tmp_path / "july")
    replayed = next(read_events(tmp_path / "july"))["continues"]["replayed"]
    shutil.rmtree(tmp_path / "texts")
    again = api.run(recipe, out=tmp_path / "again")
    assert next(read_events(tmp_path / "again"))["continues"]["replayed"] == replayed
    assert again.metrics["rounds"] == 2
    with pytest.raises(RunError, match="restore the files"):
        api.run(recipe, out=tmp_path / "july", resume=True)


@pytest.mark.parametrize("lost", ["continues", "replayed"])
def test_a_start_event_without_replayed_amounts_is_refused_in_one_line(
    lost: str, months: dict[str, Run], tmp_path: Path
) -> None:
    path = tmp_path / "june" / "events.jsonl"
    start, *rest = path.read_text().splitlines(keepends=True)
    event = json.loads(start)
    del (event if lost == "continues" else event["continues"])[lost]
    path.write_text("".join([f"{json.dumps(event)}\n", *rest]))
    with pytest.raises(RunError, match=r"then \{\}"):
        api.run(tmp_path / "june" / "recipe.yaml", out=tmp_path / "june", resume=True)


def test_another_rank_is_refused_before_base_and_data_are_read(train: Train, tmp_path: Path) -> None:
    train("earlier", texts(*USERS))
    content = {**OPTIONS, "adapters": {"rank": 2}, "data": {"users": {"ada": "gone.txt"}}}
    with pytest.raises(RecipeError, match=r"^adapters\.rank: got 2"):
        check_earlier_run(parse_recipe({**content, "continue_from": str(tmp_path / "earlier")}))


def test_conversations_and_samples_are_drawn_whole() -> None:
    numbers = torch.tensor([1, 2])
    answers = Answers(
        windows=torch.arange(12).view(3, 4),
        owners=torch.tensor([0, 1, 1, 2]),
        prompt_tokens=torch.tensor([1, 1, 3, 2]),
        references=("a", "b", "c", "d"),
        limit=2,
        measures=("f1",),
        ends=(0,),
    )
    drawn = answers.select(numbers)
    assert drawn.windows.tolist() == [[4, 5, 6, 7], [8, 9, 10, 11]]
    assert drawn.owners.tolist() == [0, 0, 1]
    assert drawn.prompt_tokens.tolist() == [1, 3, 2]
    assert drawn.references == ("b", "c", "d")
    samples = Samples(inputs=torch.arange(6.0).view(3, 2), targets=torch.tensor([4, 5, 6]))
    assert samples.select(numbers).targets.tolist() == [5, 6]
    chosen = draw_examples(samples, 2, width=9, generator=torch.Generator().manual_seed(0))
    assert len(chosen) == 2
    assert draw_examples(samples, 3, width=9, generator=torch.Generator()) is samples


def test_commands_name_what_has_changed(comingle: Any, tmp_path: Path) -> None:
    """Also from a recipe's key, whose path is relative to the recipe; the report has the same line."""
    for name, lines in texts("ada", "ben").items():
        (tmp_path / f"{name}.txt").write_text("\n".join(lines))
    data = {"users": {name: {"path": f"{name}.txt"} for name in ("ada", "ben")}}
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(yaml.safe_dump({**OPTIONS, "data": data}))
    assert comingle("run", recipe, "--out", tmp_path / "may").code == 0
    del data["users"]["ben"]
    recipe.write_text(yaml.safe_dump({**OPTIONS, "data": data}))
    answer = comingle("run", recipe, "--out", tmp_path / "june", "--continue-from", tmp_path / "may")
    assert answer.code == 0, answer.err
    assert "test data of" not in comingle("show", tmp_path / "june").out  # ada's is the same
    recipe.write_text(yaml.safe_dump({**OPTIONS, "data": data, "continue_from": "may"}))
    assert comingle("run", recipe, "--out", tmp_path / "by key").code == 0
    third = comingle("run", recipe, "--out", tmp_path / "july", "--continue-from", tmp_path / "june")
    assert third.code == 0, third.err
    (start, *_) = read_events(tmp_path / "july")
    assert [one["run"] for one in start["continues"]["ancestors"]] == [str(tmp_path / "may")]
    assert "before it" in comingle("show", tmp_path / "july").out
    for run in ("june", "by key"):
        shown = " ".join(comingle("show", tmp_path / run).out.split())
        assert "after 2 rounds: 1 user goes on, 1 dropped (ben)" in shown
        assert comingle("report", tmp_path / run, "--no-tokens").code == 0
        assert "1 dropped (ben)" in (tmp_path / run / "report.html").read_text()


SELECTED: dict[str, Any] = {
    "evaluation": {"every": 1, "first": False, "select": "best", "model": "exchanged"},
    "training.rounds": 3,
}
HARMFUL = {"training.experts.learning_rate": 1000.0, "training.experts.schedule": "constant"}
"""With this rate no round is better than the first one."""


@pytest.mark.parametrize("method", ["comigs-1g1s", "fedmerge", "pcl"])
@pytest.mark.parametrize("evaluated", ["exchanged", "local"])
def test_a_run_continues_from_the_best_round_of_the_earlier_one(train: Train, method: str, evaluated: str) -> None:
    """Users and server, as of that round; the last round is worse."""
    options = {**SELECTED, **HARMFUL, "method": method}
    options["evaluation"] = {**SELECTED["evaluation"], "model": evaluated}
    earlier = train("earlier", texts(*USERS), **options)
    assert earlier.metrics["selected_round"] == 1
    federation, _ = prepared(earlier.folder, texts(*USERS), **options)
    assert torch.equal(federation.clients.state.rows, earlier.federation.clients.state.rows)
    one_round = train("one", texts(*USERS), **{**options, "training.rounds": 1 if evaluated == "exchanged" else 2})
    kept = one_round.federation.server.best.tensors if evaluated == "local" else one_round.federation.server.kept
    for name, t in federation.server.kept.items():
        assert torch.equal(t, kept[name]), name
    if method == "comigs-1g1s":
        assert federation.clients.state.versions.tolist() == [0, 0, 0]


def test_a_run_that_makes_all_worse_ends_with_the_earlier_best(train: Train, tmp_path: Path) -> None:
    """Also without ``evaluation.first`` the start is round 0, scored by the validation data of the new run."""
    train("earlier", texts(*USERS), **SELECTED)
    later = train(
        "later", texts(*USERS, word="reads"), continue_from=str(tmp_path / "earlier"), **{**SELECTED, **HARMFUL}
    )
    assert later.metrics["selected_round"] == 0
    evaluations = [event for event in read_events(tmp_path / "later") if event["event"] == "evaluation"]
    assert [event["round"] for event in evaluations] == [0, 1, 2, 3]
    losses = [event["mean_valid_loss"] for event in evaluations]
    assert min(losses) == losses[0]
    federation, _ = prepared(tmp_path / "later", texts(*USERS), **SELECTED)
    of_earlier, _ = prepared(tmp_path / "earlier", texts(*USERS), **SELECTED)
    assert torch.equal(federation.clients.state.rows, of_earlier.clients.state.rows)
    for name, t in federation.server.kept.items():
        assert torch.equal(t, of_earlier.server.kept[name]), name


def test_a_run_of_an_earlier_version_continues_from_its_last_round(train: Train) -> None:
    """It has not stored the server as of the best round; such a run can also be resumed."""
    options = {**SELECTED, **HARMFUL}
    earlier = train("earlier", texts(*USERS), **options)
    checkpoint = list_checkpoints(earlier.folder)[-1]
    path = checkpoint / STATE
    tensors = {name: t for name, t in load_file(path).items() if not name.startswith("server/best/")}
    save_file(tensors, path)
    seal(checkpoint)
    federation, _ = prepared(earlier.folder, texts(*USERS), **options)
    last = torch.cat([tensors[f"user/{slot.name}"].flatten(1) for slot in federation.clients.model.layout.slots], 1)
    assert torch.equal(federation.clients.state.rows, last)
    assert api.load(earlier.folder, users=texts(*USERS)).metrics["selected_round"] == 1
