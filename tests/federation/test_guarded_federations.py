"""``evaluation.guard`` in a federation: clients serve the best model as in the run of one process, and tell nothing."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.commands import comingle as comingle
from tests.federation.direct import Direct, federated, nodes_of
from tests.federation.test_continued_federations import continued, of_users
from tests.federation.test_continuous_federations import ANN, BOB, Federation, Restarting
from tests.federation.tiny import assert_equal, one_base, said, tasks_of, tensors_of, tiny

from comingle.config import parse_recipe
from comingle.federation.client import Client
from comingle.federation.conditions import DeviceConditions
from comingle.federation.messages import unpack_answer, unpack_task
from comingle.federation.model_server import model_of_all_users, personal_model
from comingle.federation.run_folder import run_federation
from comingle.runs import api
from comingle.runs.guard import LOCAL, PERSONAL, SHARED
from comingle.utils.errors import RunError
from comingle.utils.files import list_checkpoints
from comingle.utils.records import SERVED, read_choices, read_metrics

HARD = {"training__rounds": 4, "training__local_steps": 6, "training__experts__learning_rate": 0.15}
"""Training after which the users of fedavg are best served different kinds of models."""


def guarded(folder: Path, name: str = "fedavg", **changes: Any) -> dict[str, Any]:
    """A recipe of three users whose models are trained enough to differ."""
    options = {"evaluation__guard": "local", "evaluation__every": 1, "runtime__users_per_step": 1}
    options |= {"training__rounds": 3, "training__local_steps": 2}
    return tiny(folder, name, users=3, **{**options, **changes})


def run_of(folder: Path, name: str) -> Path:
    """A user's newest run."""
    return max((folder / name).glob("run-*"), key=lambda path: path.stat().st_mtime)


def served_by(folder: Path, name: str) -> dict[str, Any]:
    return read_metrics(run_of(folder, name) / "model")["served"][name]


def unnamed(entry: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in entry.items() if key not in ("since", "since_round")}


def assert_same_guard(together: api.Run, apart: Path) -> set[str]:
    """The same choices by the same losses, local and served models; returns the kinds that are served."""
    assert together.local is not None
    names = together.users
    for name in names:
        served = together.metrics["served"][name]
        assert unnamed(served_by(apart, name)) == unnamed(served)
        opened = api.load(run_of(apart, name) / "model")
        assert opened.local is not None
        local = together.local.clients.state.rows[names.index(name) :: len(names)]
        assert torch.equal(opened.local.clients.state.rows, local)
        assert_equal(dict(opened.user(name).tensors), dict(together.user(name).tensors))
    return {entry["model"] for entry in together.metrics["served"].values()}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("model", ["local", "exchanged"])
@pytest.mark.parametrize("name", ["comigs-1g1s", "fdlora", "fedavg+", "ifca", "stacking", "pcl", "fedmerge", "hetlora"])
def test_it_is_the_guard_of_one_process(name: str, model: str, tmp_path: Path) -> None:
    content = guarded(tmp_path / "texts", name, evaluation__model=model)
    together = api.run(content, out=tmp_path / "together")
    federated(content, tmp_path / "apart")
    assert_same_guard(together, tmp_path / "apart")


@pytest.fixture(scope="module", autouse=True)
def shared_base() -> Iterator[None]:
    with one_base():
        yield


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[api.Run, Path, Direct]:
    """A run of one process, and the same as a federation."""
    folder = tmp_path_factory.mktemp("pair")
    content = guarded(folder / "texts", **HARD)
    _, channel = federated(content, folder / "apart")
    return api.run(content, out=folder / "together"), folder / "apart", channel


def test_users_are_served_different_kinds(pair: tuple[api.Run, Path, Direct]) -> None:
    together, apart, _ = pair
    assert assert_same_guard(together, apart) == {PERSONAL, LOCAL, SHARED}
    for name in together.users:
        assert (run_of(apart, name) / "model" / SHARED).exists() == (served_by(apart, name)["model"] == SHARED)


def test_the_rounds_of_changes_are_recorded(pair: tuple[api.Run, Path, Direct]) -> None:
    _, apart, channel = pair
    changed = 0
    for name in channel.nodes:
        choices = read_choices(run_of(apart, name))
        assert [choice["round"] for choice in choices] == [1, 2, 3, 4]
        models = [choice["served"][name]["model"] for choice in choices]
        entry = served_by(apart, name)
        assert entry["model"] == models[-1]
        assert set(models[entry["since_round"] - 1 :]) == {models[-1]}
        assert entry["since_round"] == 1 or models[entry["since_round"] - 2] != models[-1]
        assert entry["since"] == run_of(apart, name).name
        changed += entry["since_round"] > 1
    assert changed


def test_programs_on_the_users_machine_get_the_served_model(pair: tuple[api.Run, Path, Direct]) -> None:
    """As ``comingle client --serve`` publishes it, also after a restart."""
    together, apart, channel = pair
    for name, node in channel.nodes.items():
        for client in (node, Client(node.folder, node.own)):
            store = client._open(run_of(apart, name).name.removeprefix("run-"))
            published = personal_model(store, model_of_all_users(store), name)
            assert_equal(dict(published.tensors), dict(together.user(name).tensors))


def test_show_status_and_report_say_what_the_user_is_served(
    pair: tuple[api.Run, Path, Direct], comingle: Any, tmp_path: Path
) -> None:
    _, apart, channel = pair
    for name in channel.nodes:
        entry, run = served_by(apart, name), run_of(apart, name)
        wanted = f"served {entry['model']} since {run.name}, round {entry['since_round']}: {name}"
        difference = ""
        if entry["model"] != "personal":
            low, high = entry["candidates"][entry["model"]]["interval"]
            difference = f"95% interval {low:+.3f} to {high:+.3f}"
        for command in (["show", apart / name], ["show", run], ["show", run / "model"], ["status", apart / name]):
            shown = " ".join(comingle(*command).out.split())
            assert wanted in shown
            assert difference in shown
        comingle("report", apart / name, "--no-tokens", "--out", tmp_path / f"{name}.html")
        page = (tmp_path / f"{name}.html").read_text()
        assert wanted in page
        assert difference in page


@pytest.mark.slow
def test_nothing_of_the_guard_leaves_a_client(comingle: Any, tmp_path: Path) -> None:
    """Messages, reports and shared tensors are those of a federation without a guard, whose clients write one model."""
    texts, recorded = tmp_path / "texts", {}
    for guard in ("local", None):
        content = guarded(texts, "ditto", evaluation__guard=guard, **HARD)
        plan, nodes = nodes_of(parse_recipe(content), tmp_path / str(guard))
        for node in nodes.values():
            node.own = node.own.model_copy(update={"tells": "all"})
        channel = Direct(nodes)
        run_federation(plan, channel, tmp_path / str(guard) / "server")
        recorded[guard] = channel
    with_guard, without = recorded["local"], recorded[None]
    assert len(with_guard.recorded) == len(without.recorded)
    for (name, task, answer), (same_name, same_task, same_answer) in zip(
        with_guard.recorded, without.recorded, strict=True
    ):
        assert name == same_name
        assert unpack_task(task).todo == unpack_task(same_task).todo
        assert said(unpack_answer(answer)) == said(unpack_answer(same_answer))
    for name in without.nodes:
        assert_equal(tensors_of(with_guard.nodes[name]), tensors_of(without.nodes[name]))
        run = run_of(tmp_path / "None", name)
        assert not {LOCAL, SHARED, SERVED} & {path.name for path in run.rglob("*")}
        report = tmp_path / f"{name}.html"
        comingle("report", run / "model", "--no-tokens", "--out", report)
        assert "perplexity" in report.read_text()


class Forgetful(Direct):
    """Before each task the client is a new process."""

    def exchange(self, requests: Mapping[str, bytes], *, timeout: float) -> Iterator[tuple[str, bytes | str]]:
        for name, node in self.nodes.items():
            self.nodes[name] = Client(node.folder, node.own)
        yield from super().exchange(requests, timeout=timeout)


class Undone(Direct):
    """Each task is preceded by another one with the same number, which the client has to revert."""

    def exchange(self, requests: Mapping[str, bytes], *, timeout: float) -> Iterator[tuple[str, bytes | str]]:
        for name, data in requests.items():
            task = unpack_task(data)
            if "train" in task.todo or "evaluate" in task.todo:
                other = replace(task, round=(task.round + 1) % 4)
                assert not unpack_answer(self.nodes[name].handle(other.pack())).refused
        yield from super().exchange(requests, timeout=timeout)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Forgetful, Undone])
def test_a_client_that_is_killed_or_reverts_ends_with_the_same(
    kind: type[Direct], pair: tuple[api.Run, Path, Direct], tmp_path: Path
) -> None:
    together, apart, _ = pair
    content = guarded(tmp_path / "texts", **HARD)
    plan, nodes = nodes_of(parse_recipe(content), tmp_path / "apart")
    run_federation(plan, kind(nodes), tmp_path / "apart" / "server")
    assert_same_guard(together, tmp_path / "apart")
    for name in nodes:
        rounds = [served_by(folder, name)["since_round"] for folder in (apart, tmp_path / "apart")]
        assert rounds[0] == rounds[1]


class Crash(Exception):
    """Stands for the end of a process."""


@pytest.mark.slow
@pytest.mark.parametrize("after", ["the guard's state", "all states"])
def test_a_crash_between_two_files_of_a_task(after: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The task is carried out again from the state before, or is complete."""
    content = guarded(tmp_path / "texts", "fedavg", **HARD)
    together = api.run(content, out=tmp_path / "together")
    plan, nodes = nodes_of(parse_recipe(content), tmp_path / "apart")
    crashes: list[int] = []

    class Crashing(Direct):
        def exchange(self, requests: Mapping[str, bytes], *, timeout: float) -> Iterator[tuple[str, bytes | str]]:
            for name, data in requests.items():
                node, serial = self.nodes[name], unpack_task(data).serial
                if serial in (2, 3):
                    store = node._open(unpack_task(data).run)
                    assert store.guard is not None
                    crashed = copy_of_crash(node, store.guard, data)
                    crashes.append(serial)
                    self.nodes[name] = crashed
            yield from super().exchange(requests, timeout=timeout)

    def copy_of_crash(node: Client, guard: Any, data: bytes) -> Client:
        """The client of a new process on the folder that a killed one has left."""
        target = node.folder.with_name(f"{node.folder.name} crashed")
        method = "save" if after == "the guard's state" else "prune"
        original = getattr(guard, method)

        def crash(*arguments: Any) -> None:
            if method == "save":
                original(*arguments)
            shutil.rmtree(target, ignore_errors=True)
            shutil.copytree(node.folder, target)
            raise Crash

        monkeypatch.setattr(guard, method, crash)
        node.handle(data)
        monkeypatch.undo()
        shutil.rmtree(node.folder)
        target.rename(node.folder)
        return Client(node.folder, node.own)

    run_federation(plan, Crashing(nodes), tmp_path / "apart" / "server")
    assert crashes
    assert_same_guard(together, tmp_path / "apart")


@pytest.mark.parametrize("guard", ["local", None])
def test_a_client_has_its_user_in_memory(guard: str | None, tmp_path: Path) -> None:
    """Whatever the recipe says of runs of one process: a restarted client and programs read what it has saved."""
    content = guarded(tmp_path / "texts", runtime__store="disk", evaluation__guard=guard)
    plan, nodes = nodes_of(parse_recipe(content), tmp_path / "apart")
    run_federation(plan, Forgetful(nodes), tmp_path / "apart" / "server")
    for name in nodes:
        opened = api.load(run_of(tmp_path / "apart", name) / "model")
        assert (opened.local is None) == (guard is None)
        assert dict(opened.user(name).tensors)


def test_reverted_states_are_deleted(tmp_path: Path) -> None:
    _, channel = federated(guarded(tmp_path / "texts", evaluation__model="exchanged"), tmp_path / "apart")
    for name, node in channel.nodes.items():
        store = node._store
        assert store is not None
        for serial in (store.serial, store.serial - 2):
            store.revert_to(serial)
            for folder in (LOCAL, SHARED):
                assert list_checkpoints(store.folder / folder)[-1].name == list_checkpoints(store.folder)[-1].name
                assert len(list_checkpoints(store.folder / folder)) <= len(list_checkpoints(store.folder)) + 1
            assert read_choices(run_of(tmp_path / "apart", name))[-1]["task"] <= serial


def test_a_lost_state_is_one_line(tmp_path: Path) -> None:
    _, channel = federated(guarded(tmp_path / "texts"), tmp_path / "apart")
    node = channel.nodes[ANN]
    run = run_of(tmp_path / "apart", ANN)
    shutil.rmtree(run / LOCAL)
    with pytest.raises(RunError, match=r"local: no state after task \d+; delete .*run-"):
        Client(node.folder, node.own)._open(run.name.removeprefix("run-"))


@pytest.mark.slow
def test_the_best_round_is_compared(tmp_path: Path) -> None:
    content = guarded(tmp_path / "texts", "fedavg", **{**HARD, "training__rounds": 6}, evaluation__select="best")
    together = api.run(content, out=tmp_path / "together")
    federated(content, tmp_path / "apart")
    assert_same_guard(together, tmp_path / "apart")


@pytest.mark.slow
def test_noise_is_not_in_the_local_model(tmp_path: Path) -> None:
    privacy = {"mechanism": "example", "noise_multiplier": 1.0, "noise": "reproducible", "accountant": "rdp"}
    changes = {f"privacy__{key}": value for key, value in privacy.items()}
    content = guarded(tmp_path / "texts", "fedavg", **changes)
    together = api.run(content, out=tmp_path / "together")
    federated(content, tmp_path / "apart")
    assert assert_same_guard(together, tmp_path / "apart") == {LOCAL}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fedavg", "fedavg+"])
def test_a_federation_that_ends_early(name: str, tmp_path: Path) -> None:
    """Its privacy budget is that of two rounds of three."""
    privacy = {"mechanism": "central", "noise_multiplier": 8.0, "epsilon": 0.7, "noise": "reproducible"}
    changes = {f"privacy__{key}": value for key, value in privacy.items()}
    content = guarded(tmp_path / "texts", name, evaluation__model="exchanged", **changes)
    together = api.run(content, out=tmp_path / "together")
    federated(content, tmp_path / "apart")
    assert together.metrics["rounds"] == 2
    assert_same_guard(together, tmp_path / "apart")


@pytest.mark.slow
def test_masks_hide_uploads_and_nothing_is_masked_alone(tmp_path: Path) -> None:
    changes = {"privacy__mechanism": "none", "privacy__secure_aggregation": {"bits": 24}}
    content = guarded(tmp_path / "texts", **changes)
    together = api.run(content, out=tmp_path / "together")
    federated(content, tmp_path / "apart")
    assert_same_guard(together, tmp_path / "apart")


class Counting(DeviceConditions):
    """Counts the announced and the taken steps of tasks."""

    def __init__(self) -> None:
        super().__init__([])
        self.announced = self.taken = 0

    def begin_task(self, steps: int, upload_bytes: int, deadline: float) -> None:
        self.announced += steps
        super().begin_task(steps, upload_bytes, deadline)

    def end_step(self) -> None:
        self.taken += 1
        super().end_step()


def test_a_device_knows_how_many_steps_it_will_take(tmp_path: Path) -> None:
    plan, nodes = nodes_of(parse_recipe(guarded(tmp_path / "texts")), tmp_path / "apart")
    counts = {name: Counting() for name in nodes}
    clients = {name: Client(node.folder, node.own, conditions=counts[name]) for name, node in nodes.items()}
    run_federation(plan, Direct(clients), tmp_path / "apart" / "server")
    steps = plan.recipe.training.rounds * plan.recipe.training.most_local_steps
    assert [(each.announced, each.taken) for each in counts.values()] == [(2 * steps, 2 * steps)] * 3


def test_a_user_trains_alone_in_the_rounds_in_which_it_takes_part(tmp_path: Path) -> None:
    content = guarded(tmp_path / "texts")
    content["training"]["participation"] = [["ann", "bob"], ["bob"], ["bob"]]
    together = api.run(content, out=tmp_path / "together")
    federated(content, tmp_path / "apart")
    assert_same_guard(together, tmp_path / "apart")


@pytest.mark.slow
@pytest.mark.parametrize("moments", [False, True])
def test_local_models_continue(moments: bool, tmp_path: Path) -> None:
    """One user is new; what is served stays so since the earlier run, if it is of the same kind."""
    content = guarded(tmp_path / "texts", "ditto", training__experts__schedule="constant", **HARD)
    ann, bob, cem = content["data"]["users"]
    before, after = of_users(content, ann, bob), of_users(content, cem, ann)
    api.run(before, out=tmp_path / "together")
    federated(before, tmp_path / "apart")
    earlier, first = run_of(tmp_path / "apart", ann).name, served_by(tmp_path / "apart", ann)
    section = {"run": str(tmp_path / "together"), "moments": moments}
    together = api.run({**after, "continue_from": section}, out=tmp_path / "together later")
    continued({**after, "continue_from": {"moments": moments}}, tmp_path / "apart", tmp_path / "later")
    assert_same_guard(together, tmp_path / "apart")
    models = [choice["served"][ann]["model"] for choice in read_choices(run_of(tmp_path / "apart", ann))]
    assert models[0] == first["model"]  # what was served at the start
    entry = served_by(tmp_path / "apart", ann)
    if set(models) == {first["model"]}:
        assert (entry["since"], entry["since_round"]) == (earlier, first["since_round"])
    else:
        assert entry["since"] == run_of(tmp_path / "apart", ann).name


def test_a_download_of_the_earlier_run_is_no_shared_model(tmp_path: Path) -> None:
    """A new user gets it before the first round, and nothing is aggregated in a single round."""
    content = guarded(tmp_path / "texts", training__rounds=1)
    ann, bob, cem = content["data"]["users"]
    before, after = of_users(content, ann, bob), of_users(content, cem, ann)
    api.run({**before, "training": {**before["training"], "rounds": 2}}, out=tmp_path / "together")
    federated({**before, "training": {**before["training"], "rounds": 2}}, tmp_path / "apart")
    together = api.run({**after, "continue_from": str(tmp_path / "together")}, out=tmp_path / "together later")
    _, channel = continued(after, tmp_path / "apart", tmp_path / "later")
    assert any("receive" in task.todo for task in tasks_of(channel, cem))
    assert_same_guard(together, tmp_path / "apart")
    assert list(served_by(tmp_path / "apart", cem)["candidates"]) == [PERSONAL, LOCAL]


@pytest.mark.slow
def test_local_models_begin_anew_after_a_federation_without_a_guard(tmp_path: Path) -> None:
    content = guarded(tmp_path / "texts")
    plain = guarded(tmp_path / "texts", evaluation__guard=None)
    api.run(plain, out=tmp_path / "together")
    federated(plain, tmp_path / "apart")
    together = api.run({**content, "continue_from": str(tmp_path / "together")}, out=tmp_path / "together later")
    continued(content, tmp_path / "apart", tmp_path / "later")
    assert_same_guard(together, tmp_path / "apart")


@pytest.mark.slow
@pytest.mark.parametrize("restarts", [False, True])
def test_runs_with_arriving_text(restarts: bool, tmp_path: Path) -> None:
    """In a continuous federation; the models of the user without new text are as before, but for the shared one."""
    options = {"name": "ditto", "evaluation__guard": "local", **HARD}
    federation = Federation(tmp_path, ANN, BOB, **options)
    assert federation.run_due()
    federation.together(1, federation.snapshot(), ANN, BOB)
    federation.write(ANN)
    texts = federation.snapshot()
    assert federation.server.plan_next()
    if restarts:
        channel = Restarting(federation.nodes)
        channel.federation = federation
        federation.channel = channel
        federation.open().run()
    else:
        federation.server.run()
    together = federation.together(2, texts, ANN, BOB, ready=(ANN,))
    assert_same_guard(together, tmp_path)
    first = min((tmp_path / BOB).glob("run-*"), key=lambda path: path.stat().st_mtime)
    before, now = (entry["candidates"] for entry in (read_choices(first)[-1]["served"][BOB], served_by(tmp_path, BOB)))
    assert [now[kind] for kind in (PERSONAL, LOCAL)] == [before[kind] for kind in (PERSONAL, LOCAL)]
    assert now[SHARED] != before[SHARED]
