"""Faults of FedMerge's tasks, methods and questions: one line and exit code 2, and the same in Python.

Users whose updates are no numbers are left out, and the round goes on.
"""

from __future__ import annotations

import functools
import gzip
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from safetensors.torch import load_file, save_file
from test_cli_mistakes import one_line

from comingle.runs import api
from comingle.utils.errors import ComingleError
from comingle.utils.files import seal
from comingle_papers.questions import LABELS

Refuse = Callable[..., str]

SGD = {"name": "sgd", "learning_rate": 0.05, "schedule": "constant", "weight_decay": 0}
RUNTIME = {"dtype": "float32", "device": "cpu", "threads": 1}


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Grey noise with ten labels, and coloured noise in three domains, one of which has no image."""
    folder, random = tmp_path_factory.mktemp("images"), np.random.default_rng(0)
    for split, count in (("train", 500), ("test", 100)):
        pixels = random.integers(0, 256, (count, 8, 8), dtype=np.uint8)
        np.savez(folder / f"mnist-{split}.npz", images=pixels, labels=np.arange(count) % 10)
    pixels = random.integers(0, 256, (80, 3, 8, 8), dtype=np.uint8)
    names = np.array(["art", "photo", "sketch"])
    np.savez(folder / "pacs.npz", images=pixels, labels=np.arange(80) % 7, domain=np.arange(80) % 2, domains=names)
    return folder


def write_recipe(path: Path, images: Path, task: dict[str, Any] | None = None, **content: Any) -> Path:
    """A recipe of FedMerge on ten users in clusters of labels; ``task`` and ``content`` replace parts of it."""
    recipe = {
        "base": "net:mnist",
        "method": {"name": "fedmerge", "models": 3},
        "data": {"task": {"name": "mnist-cluster", "users": 10, "path": str(images), **(task or {})}},
        "training": {"rounds": 1, "batch_size": 20, "weighting": "samples", "experts": SGD},
        "runtime": RUNTIME,
        **content,
    }
    path.write_text(yaml.safe_dump(recipe), encoding="utf-8")
    return path


@pytest.fixture
def recipe_of(tmp_path: Path, images: Path) -> Callable[..., Path]:
    """Writes that recipe."""
    return functools.partial(write_recipe, tmp_path / "fedmerge.yaml", images)


@pytest.fixture
def refuse(comingle: Any, tmp_path: Path) -> Refuse:
    """What is said of a recipe with some settings: the same through both doors, and nothing is left behind.

    Only where a setting was changed differs: the command line names its option, Python has none.
    """

    def run(path: Path, *settings: str) -> str:
        line = one_line(comingle("run", path, "--out", tmp_path / "run", *(f"--set={s}" for s in settings)))
        assert not (tmp_path / "run").exists()
        changes = {key: yaml.safe_load(value) for key, value in (s.split("=", 1) for s in settings)}
        with pytest.raises(ComingleError) as error:
            api.run(path, **changes)
        assert str(error.value) == line.replace("--set: ", "recipe: ")
        return line

    return run


# ---------------------------------------------------------------- methods

METHODS = {
    "{name: fedmerge, models: 0}": "method fedmerge: models is 0; allowed: whole numbers from 1",
    "{name: fedmerge, models: -2}": "method fedmerge: models is -2; allowed: whole numbers from 1",
    "{name: fedmerge, models: 2.5}": "method fedmerge: models is 2.5; allowed: whole numbers from 1",
    "{name: fedmerge, weight_step: -0.1}": "method fedmerge: weight_step is -0.1; allowed: numbers from 0",
    "{name: fedmerge, inner_product_keys: fc}": (
        "method fedmerge: inner_product_keys is 'fc'; allowed: head, all, trained, body, first"
    ),
    "{name: fedmerge, inner_product_keys: []}": (
        "method fedmerge: inner_product_keys is []; allowed: head, all, trained, body, first"
    ),
    "{name: fedmerge, global_rate: .inf}": "method fedmerge: global_rate is inf; allowed: numbers from 0",
    "{name: fedmerge, global_iterations: 0}": "method fedmerge: global_iterations is 0; allowed: whole numbers from 1",
    "{name: fedmerge, softmax: 1}": "method fedmerge: softmax is 1; allowed: true, false",
    "{name: fedmerge, model: 3}": "method fedmerge: no setting 'model'. Did you mean 'models'? Allowed: column_",
    "{name: fedmerge-fixed, chosen: 6, models: 5}": "method fedmerge-fixed: chosen is 6 of 5 models; allowed: 1 to 5",
    "{name: fedmerge-fixed, chosen: 0}": "method fedmerge-fixed: chosen is 0; allowed: whole numbers from 1",
    "{name: ifca, models: 0}": "method ifca: models is 0; allowed: whole numbers from 1",
    "{name: ifca, picks: 2}": "method ifca: no setting 'picks'. Allowed: models",
    "{name: fedem, models: 0}": "method fedem: models is 0; allowed: whole numbers from 1",
    "{name: pfedmoe, models: 2}": "method pfedmoe: no setting 'models'. Allowed: no settings",
    "{name: fedavg+, steps: 2}": "method fedavg+: no setting 'steps'. Allowed: no settings",
    "fedit": "method fedit: trains no part of a net",
    "fedlora": "method fedlora: shares no part of a net",
}


@pytest.mark.parametrize("method", METHODS)
def test_a_wrong_setting_of_a_method(recipe_of: Any, refuse: Refuse, method: str) -> None:
    assert refuse(recipe_of(), f"method={method}").startswith(METHODS[method])


# ---------------------------------------------------------------- tasks

TASKS = {
    "alpha=0": "--set: data.task.alpha: Input should be greater than 0; got 0",
    "alpha=-1": "--set: data.task.alpha: Input should be greater than 0; got -1",
    "valid=1": "--set: data.task.valid: Input should be less than 1; got 1",
    "valid=-0.5": "--set: data.task.valid: Input should be greater than or equal to 0; got -0.5",
    "labels_per_cluster=1": "task 'mnist-cluster': labels_per_cluster=1; allowed: 2, so that every label is used, to ",
    "labels_per_cluster=11": "task 'mnist-cluster': labels_per_cluster=11; allowed: 2, so that every label is used, ",
    "clusters=11": "task 'mnist-cluster': clusters=11; allowed: 1 to 10, the number of users",
    "users=3": "task 'mnist-cluster': clusters=5; allowed: 1 to 3, the number of users",
    "users=3000": "task 'mnist-cluster', cluster 0 (labels ",
    "shift=rotate": "task 'mnist-cluster': shift='rotate'; this task has no shift",
    "path=nowhere": "nowhere: no such folder; it should contain the images of mnist",
    "alphas=1": "--set: unknown key 'data.task.alphas'. Did you mean 'alpha'? Allowed: name, users, clusters, ",
    "name=mnist-clusters": "no task 'mnist-clusters'. Did you mean 'mnist-cluster'? Allowed: ",
    "name=cifar10-cluster": "{images}: no train images of cifar10; looked for cifar10-train-images-ubyte[.gz|.xz], ",
    "name=pacs": "task 'pacs', domain 'sketch': 0 images for ",
}


@pytest.mark.parametrize("setting", TASKS)
def test_a_wrong_setting_of_a_task(recipe_of: Any, refuse: Refuse, images: Path, setting: str) -> None:
    assert refuse(recipe_of(), f"data.task.{setting}").startswith(TASKS[setting].format(images=images))


def test_users_from_whom_no_sample_can_be_spared(recipe_of: Any, refuse: Refuse, tmp_path: Path) -> None:
    """Three images each, of two labels or more."""
    few = tmp_path / "few"
    few.mkdir()
    for split in ("train", "test"):
        np.savez(few / f"mnist-{split}.npz", images=np.zeros((30, 8, 8), np.uint8), labels=np.arange(30) % 10)
    line = refuse(recipe_of({"users": 20, "path": str(few)}))
    assert line.startswith("user 'user-")
    assert "none can be held out" in line


DAMAGED = {"empty": b"", "torn": None, "text": b"images"}
"""Contents of a file; None: half of the whole one."""


@pytest.mark.parametrize("kind", DAMAGED)
def test_a_damaged_file_of_images(recipe_of: Any, refuse: Refuse, images: Path, tmp_path: Path, kind: str) -> None:
    whole, damaged = (images / "mnist-train.npz").read_bytes(), DAMAGED[kind]
    content = whole[: len(whole) // 2] if damaged is None else damaged
    path = tmp_path / "mnist-train.npz"
    path.write_bytes(content)
    (tmp_path / "mnist-test.npz").write_bytes((images / "mnist-test.npz").read_bytes())
    line = refuse(recipe_of({"path": str(tmp_path)}))
    assert re.match(f"{re.escape(str(path))}: .*got {len(content)} bytes, .*zip", line)


def test_a_damaged_file_of_compressed_bytes(recipe_of: Any, refuse: Refuse, tmp_path: Path) -> None:
    content = bytearray(gzip.compress(b"\0\0\x08\x03" + bytes(range(256)) * 8))
    content[-300] ^= 0xFF
    (tmp_path / "mnist-train-images-ubyte.gz").write_bytes(content)
    (tmp_path / "mnist-train-labels-ubyte").write_bytes(b"\0\0\x08\x01\0\0\0\0")
    line = refuse(recipe_of({"path": str(tmp_path)}))
    assert line.startswith(f"{tmp_path}/mnist-train-images-ubyte.gz: cannot be read: ")


def unreachable(*_: Any, **__: Any) -> Any:
    """A hub that cannot be reached."""
    raise ConnectionError("no connection")


def test_no_images_in_the_folder_of_data(
    recipe_of: Any, refuse: Refuse, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COMINGLE_DATA", str(tmp_path))
    monkeypatch.setattr("datasets.load_dataset", unreachable)
    line = refuse(recipe_of({"path": None}))
    assert line.startswith(
        "hub:ylecun/mnist: cannot be loaded as a data set: no connection; without the hub, give data."
    )
    assert line.endswith(f"({tmp_path / 'images'} has no images of mnist)")


# ---------------------------------------------------------------- updates that are no numbers


def test_users_whose_updates_are_no_numbers_are_left_out(
    comingle: Any, recipe_of: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """At an absurd rate two steps leave the real numbers, one does not; the server takes it back by its own rate.

    Users of large clusters have fewer images than those of small ones, so only they have a single batch.
    """
    huge = {**SGD, "learning_rate": 1e20}
    path = recipe_of(
        {"users": 20, "valid": 0},
        method={"name": "fedmerge", "models": 2, "global_rate": 1e-20},
        training={"rounds": 2, "batch_size": 30, "weighting": "samples", "experts": huge},
        evaluation={"model": "exchanged", "every": 1},
    )
    answer = comingle("run", path, "--out", tmp_path / "run")
    assert answer.code == 0, answer.err
    events = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    users = json.loads((tmp_path / "run" / "metrics.json").read_text())["users"]
    broken = [name for name, found in users.items() if found["train_samples"] > 30]
    assert 0 < len(broken) < len(users)
    rejected = [event for event in events if event["event"] == "rejected"]
    assert [(e["round"], e["user"]) for e in rejected] == [(r, name) for r in (1, 2) for name in broken]
    assert {e["reason"] for e in rejected} == {f"training loss is nan in round {r}, local step 2" for r in (1, 2)}
    assert caplog.messages == [f"user {e['user']!r} is left out of round {e['round']}: {e['reason']}" for e in rejected]
    rounds = [event for event in events if event["event"] == "round"]
    assert [set(event["train_loss_nats"]) for event in rounds] == [set(users) - set(broken)] * 2


def test_where_nobodys_update_is_a_number_the_run_ends(comingle: Any, recipe_of: Any, tmp_path: Path) -> None:
    path = recipe_of({"valid": 0}, training={"rounds": 1, "batch_size": 10, "experts": {**SGD, "learning_rate": 1e30}})
    answer = comingle("run", path, "--out", tmp_path / "run")
    assert answer.code == 2
    last = answer.err.splitlines()[-1]
    assert last.startswith("comingle: user 'user-0': training loss is nan in round 1, local step 2; try a smaller ")


# ---------------------------------------------------------------- checkpoints of something else


def drop_model(tensors: dict[str, Any]) -> None:
    for name in [n for n in tensors if n.startswith("server/soup.")]:
        tensors[name] = tensors[name][:2].clone()


FOREIGN = {
    "fewer models": (drop_model, "tensor 'server/soup.1.bias': got ((2, 200), torch.float32); this recipe has ((3, "),
    "no models": (
        lambda t: [t.pop(n) for n in list(t) if n.startswith("server/soup.")],
        "tensor 'server/soup.1.bias': got nothing; this recipe has ((3, 200), torch.float32)",
    ),
    "weights of other users": (
        lambda t: t.update({"server/merging": t["server/merging"][:9].clone()}),
        "tensor 'server/merging': got ((9, 3), torch.float32); this recipe has ((10, 3), torch.float32)",
    ),
    "no weights": (lambda t: t.pop("server/merging"), "tensor 'server/merging': got nothing; this recipe has ((10, 3)"),
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, images: Path) -> Path:
    """A finished run."""
    folder = tmp_path_factory.mktemp("trained")
    api.run(write_recipe(folder / "recipe.yaml", images), out=folder / "run")
    return folder / "run"


@pytest.mark.parametrize("kind", FOREIGN)
def test_a_checkpoint_whose_models_do_not_fit(comingle: Any, trained: Path, kind: str) -> None:
    change, said = FOREIGN[kind]
    (path,) = (trained / "checkpoints").glob("*/state.safetensors")
    sums = path.parent / "SHA256SUMS"
    whole, tensors, summed = path.read_bytes(), load_file(path), sums.read_bytes()
    change(tensors)
    save_file(tensors, path)
    seal(path.parent)
    try:
        line = one_line(comingle("run", "--resume", trained))
        with pytest.raises(ComingleError) as error:
            api.load(trained)
    finally:
        path.write_bytes(whole)
        sums.write_bytes(summed)
    assert line == str(error.value)
    assert line.startswith(f"{path}: {said}")


def test_a_run_is_not_resumed_with_another_number_of_models(comingle: Any, trained: Path) -> None:
    line = one_line(comingle("run", trained, "--out", trained, "--resume", "--set", "method.models=4"))
    assert line == f"{trained}: belongs to another recipe, method.settings.models was 3 and is 4; use another --out"


def test_a_run_whose_images_have_become_others(comingle: Any, trained: Path, images: Path) -> None:
    wholes = {path: path.read_bytes() for path in images.glob("mnist-*.npz")}
    try:
        for path in wholes:
            np.savez(path, images=np.zeros((100, 9, 9), np.uint8), labels=np.arange(100) % 10)
        line = one_line(comingle("run", "--resume", trained))
    finally:
        for path, whole in wholes.items():
            path.write_bytes(whole)
    assert line.startswith(f"{trained}: user 'user-0': the train data changed since the run began; restore it, or ")


# ---------------------------------------------------------------- questions


@pytest.fixture
def asked(tmp_path: Path) -> Callable[..., Path]:
    """Writes a recipe with XNLI in two languages, twelve questions each; ``row`` changes the fifth row."""

    def write(row: dict[str, Any] | None = None, **content: Any) -> Path:
        rows = [
            {"id": i, "lang": who, "premise": f"{who}{i}", "hypothesis": "h", "label": LABELS[i % 3]}
            for who in ("en", "de")
            for i in range(12)
        ]
        rows[4] |= row or {}
        (tmp_path / "xnli.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows), encoding="utf-8")
        languages = {"languages": ["en", "de"], "train": 4, "valid": 2, "test": 3}
        recipe = {
            "base": "random:llama",
            "method": "fedmerge",
            "data": {"questions": {"name": "xnli", "path": str(tmp_path), **languages}},
            "adapters": {"rank": 2},
            "training": {"rounds": 1, "batch_size": 4, "context": 190},
            "runtime": RUNTIME,
            **content,
        }
        path = tmp_path / "xnli.yaml"
        path.write_text(yaml.safe_dump(recipe), encoding="utf-8")
        return path

    return write


ASKED = {
    "data.questions.path=nowhere": "nowhere: no such file or folder; without data.questions.path xnli comes ",
    "data.questions.name=xquad": "{folder}: no file xquad*.jsonl in it (.xz and .gz allowed)",
    "data.questions.name=xnly": "no questions 'xnly'. Did you mean 'xnli'? Allowed: xnli, xquad",
    "data.questions.languages=[en, fr]": "{folder}/xnli.jsonl: no row in language 'fr'; every user needs some",
    "data.questions.languages=[en, xx]": "xnli: no language 'xx'; allowed: ar, bg, ",
    "data.questions.languages=[en, en]": "xnli: language 'en' twice; allowed: each once",
    "data.questions.train=50": "xnli: 12 of 12 questions have at most 190 tokens (training.context) in each of en, de",
    "training.context=30": "xnli: 0 of 12 questions have at most 30 tokens (training.context) in each of en, de; train",
    "base=net:mnist": "base: got 'net:mnist' for text; allowed: a language model; nets are for users with samples",
    "method=fedem": "method fedem: mixes whole models",
    "adapters.rank=[2, 4]": "method fedmerge: adapters.rank differs between users; the server's models have one rank",
    "method=pcl": "user 'en': valid has 0 questions",
}


@pytest.mark.parametrize("setting", ASKED)
def test_a_wrong_setting_of_questions(asked: Any, refuse: Refuse, tmp_path: Path, setting: str) -> None:
    more = ["data.questions.valid=0"] if setting == "method=pcl" else []
    assert refuse(asked(), setting, *more).startswith(ASKED[setting].format(folder=tmp_path))


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"label": ""}, "label is ''; allowed: entailment, neutral, contradiction, or their numbers 0 to 2"),
        ({"premise": None}, "premise is None; allowed: text"),
        ({"id": 3}, "id '3' occurs twice; allowed: once per language"),
    ],
)
def test_a_wrong_row_of_questions(asked: Any, refuse: Refuse, tmp_path: Path, row: dict[str, Any], said: str) -> None:
    assert refuse(asked(row)) == f"{tmp_path}/xnli.jsonl: line 5 is not a row of xnli: {said}"


def test_a_base_without_a_tokenizer(asked: Any, refuse: Refuse, tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    LlamaForCausalLM(LlamaConfig(vocab_size=16, **sizes)).save_pretrained(tmp_path / "mute")
    line = refuse(asked(base=str(tmp_path / "mute")))
    assert line.startswith(f"base {tmp_path / 'mute'}: ")
    assert "tokenizer" in line
