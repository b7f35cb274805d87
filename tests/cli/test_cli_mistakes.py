"""Each mistake of a user is one line on stderr and exit code 2, and leaves nothing behind."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from comingle.config import load_recipe

SETTINGS = {
    "an unknown key": (
        "training.ronds=3",
        r"--set: unknown key 'training.ronds'. Did you mean 'rounds'\? Allowed: rounds, ",
    ),
    "a wrong type": ("training.rounds=many", "--set: training.rounds: Input should be a valid integer; got 'many'"),
    "no equals sign": ("training.rounds", "--set 'training.rounds': give KEY=VALUE"),
    "no key": ("=3", "--set '=3': give KEY=VALUE"),
    "a value that is not YAML": ("base=[", r"--set 'base=\[': not YAML: while parsing a flow node"),
    "zero users": ("data.users={}", r"--set: data: no users; .*`users: {alice: path/to/text}`"),
    "a missing file": ("data.users.ann=texts/anne.txt", "data.users.ann: .*texts/anne.txt: no such file or folder"),
    "an unknown demo user": ("data.users.ann=demo:libary", "no demo user 'libary'; allowed: library, reference, "),
    "too little text": (
        "data.max_train_tokens=16",
        r"3 of 3 users .*: 'ann' \(train [^)]*\b16 tokens[^)]* 17\), 'bob' \(train [^)]*\b16 ",
    ),
    "no validation text": (
        "data.split.valid=0",
        r"3 of 3 users .*: 'ann' \(valid [^)]*\b0 tokens[^)]* 17\), 'bob' \(valid [^)]*\), 'cem' \(valid [^)]*\) "
        ".*context 16; .*valid split or fraction",
    ),
    "no test text": ("data.split.test=0", r"3 of 3 users .*: 'ann' \(test [^)]*\b0 tokens"),
    "fractions without a rest": (
        "data.split={valid: 0.5, test: 0.5}",
        "user 'ann': split fractions valid=0.5, test=0.5",
    ),
    "an unknown method": (
        "method=comig",
        r"method: no method 'comig'. Did you mean 'comigs'\? Allowed: pretrained, centralized, local, fedavg, ",
    ),
    "an unknown setting": (
        "method.router_evry=3",
        r"method comigs-1g1s: no setting 'router_evry'. Did you mean 'router_every'\? Allowed: accumulate_gradients, ",
    ),
    "a setting out of range": (
        "method.router_every=0",
        "method comigs-1g1s: router_every is 0; allowed: whole numbers",
    ),
    "no experts": (
        "method={name: comigs, generalists: 0, specialists: 0}",
        r"method comigs: generalists \+ specialists is 0 for some user; at least 1 expert is needed",
    ),
    "numbers for other users": (
        "method={name: comigs, specialists: [1, 2]}",
        "method.specialists: 2 numbers for 3 users; give one, or one per user",
    ),
    "somebody who is no user": (
        "training.participation=[[ann, dan]]",
        "training.participation: no user 'dan'; allowed: ann, bob, cem",
    ),
    "a wrong dtype": (
        "runtime.dtype=float8",
        ".*dtype: got 'float8'.*allowed.*bfloat16",
    ),
    "a wrong device": ("runtime.device=gpu", ".*device: got 'gpu'.*allowed.*cuda:N"),
    "a wrong attention": ("runtime.attention=fast", ".*attention: got 'fast'.*allowed.*eager"),
    "an unknown family": (
        "base=random:lama",
        ".*'random:lama'.*'lama'.*allowed.*gpt2",
    ),
    "a base that is a text": ("base=texts/ann.txt", "base model 'texts/ann.txt': a file must be a .gguf"),
    "a rate beyond reason": (
        "training.experts.learning_rate=1e30",
        "user 'ann': training loss is nan in round 1, local step 2; try a smaller ",
    ),
}


def one_line(answer: Any) -> str:
    """The line on stderr; there must be no other, no traceback, and exit code 2."""
    assert answer.code == 2, answer
    assert answer.err.endswith("\n")
    (line,) = answer.err.splitlines()
    assert line.startswith("comingle: ")
    return line.removeprefix("comingle: ")


def test_a_misspelt_verb_gets_one_hint(comingle: Any) -> None:
    """Not one of typer's and another of click's."""
    said = comingle("runn")
    assert said.code == 2
    assert said.err.count("Did you mean 'run'?") == 1


@pytest.mark.parametrize("verb", ["run", "federate", "data"])
@pytest.mark.parametrize("words", [("--method", "fedit"), ("--method=fedit",)])
def test_a_method_in_place_of_a_setting_gets_the_setting(comingle: Any, verb: str, words: tuple[str, ...]) -> None:
    answer = comingle(verb, "offices.yaml", *words)
    assert answer.code == 2
    assert "Did you mean '--set method=fedit'?" in " ".join(answer.err.split())


@pytest.mark.parametrize("mistake", SETTINGS)
def test_a_wrong_setting(
    comingle: Any, recipe_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mistake: str
) -> None:
    setting, said = SETTINGS[mistake]
    monkeypatch.chdir(recipe_file.parent)
    line = one_line(comingle("run", recipe_file, "--out", tmp_path / "run", "--set", setting))
    assert re.match(said, line)
    diverged = mistake == "a rate beyond reason"
    assert (tmp_path / "run").exists() == diverged
    assert not (tmp_path / "run" / "metrics.json").exists()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b"", "no text;"),
        (b" \n\n ", "no text;"),
        (b"caf\xe9", "byte 0xe9 at offset 3"),
        (b"Hi", "user 'bob': train "),
    ],
    ids=["empty", "blank", "latin-1", "two letters"],
)
def test_a_user_without_usable_text(comingle: Any, recipe_file: Path, tmp_path: Path, text: bytes, said: str) -> None:
    path = recipe_file.parent / "texts" / "bob.txt"
    path.write_bytes(text)
    line = one_line(comingle("run", recipe_file, "--out", tmp_path / "run"))
    assert said in line
    assert "bob" in line
    assert not (tmp_path / "run").exists()


def test_a_mistake_can_be_corrected_and_the_same_command_given_again(
    comingle: Any, recipe_file: Path, tmp_path: Path
) -> None:
    path = recipe_file.parent / "texts" / "bob.txt"
    text = path.read_text()
    path.write_text("")
    command = ("run", recipe_file, "--out", tmp_path / "run", "--set", "training.rounds=1")
    one_line(comingle(*command))
    path.write_text(text)
    assert comingle(*command).code == 0


def test_a_missing_recipe(comingle: Any, tmp_path: Path) -> None:
    for verb in (["run"], ["data"], ["compare", "--methods", "local"]):
        assert one_line(comingle(*verb, tmp_path / "mine.yaml")) == f"{tmp_path / 'mine.yaml'}: no such recipe."
    assert "demo.yaml'?" in one_line(comingle("run", tmp_path / "demo.yaml"))


def test_a_recipe_with_an_unknown_key_is_named(comingle: Any, recipe_file: Path) -> None:
    recipe_file.write_text(recipe_file.read_text().replace("local_steps", "local_step"))
    line = one_line(comingle("run", recipe_file))
    assert line.startswith(f"{recipe_file}: unknown key 'training.local_step'. Did you mean 'local_steps'? Allowed: ")


@pytest.mark.parametrize("both", [("--resume", "--force"), ("--force", "--resume")])
@pytest.mark.parametrize("verb", ["run", "compare", "demo", "reproduce"])
def test_a_folder_is_kept_or_replaced(
    comingle: Any, recipe_file: Path, tmp_path: Path, verb: str, both: tuple[str, str]
) -> None:
    given = {"run": (recipe_file,), "compare": (recipe_file, "--methods", "local"), "reproduce": ("comigs/table1",)}
    line = one_line(comingle(verb, *given.get(verb, ()), "--out", tmp_path / "out", *both))
    assert line.startswith("--resume and --force: got both; ")
    assert not (tmp_path / "out").exists()


def test_a_run_folder_is_not_overwritten(comingle: Any, recipe_file: Path, tmp_path: Path) -> None:
    command = ("run", recipe_file, "--out", tmp_path / "run", "--set", "method=pretrained")
    assert comingle(*command).code == 0
    before = (tmp_path / "run" / "metrics.json").read_bytes()
    line = one_line(comingle(*command))
    assert line.startswith(f"{tmp_path / 'run'}: exists; --resume ")
    assert "--force" in line
    assert "--out" in line
    assert (tmp_path / "run" / "metrics.json").read_bytes() == before


@pytest.mark.parametrize("verb", ["run", "compare"])
def test_a_run_of_another_recipe_is_not_offered_to_resume(
    comingle: Any, recipe_file: Path, tmp_path: Path, verb: str
) -> None:
    given = {"run": ("--set", "method=pretrained"), "compare": ("--methods", "pretrained", "--seeds", "0")}
    command = (verb, recipe_file, "--out", tmp_path / "out", *given[verb])
    assert comingle(*command).code == 0
    folder = tmp_path / "out" if verb == "run" else tmp_path / "out" / "pretrained-seed0"
    line = one_line(comingle(*command, "--set", "training.batch_size=3"))
    assert line.startswith(f"{folder}: exists and belongs to another recipe, training.batch_size was ")
    assert line.endswith(" and is 3; --force replaces it, --out names another")
    (folder / "recipe.yaml").write_text("not: a recipe\n")
    assert one_line(comingle(*command)).startswith(f"{folder}: exists; --resume continues it, ")


def test_resume_needs_something_to_resume(comingle: Any, recipe_file: Path, tmp_path: Path) -> None:
    line = one_line(comingle("run", recipe_file, "--out", tmp_path / "run", "--resume"))
    assert line.startswith(f"{tmp_path / 'run'}: ")
    assert "recipe.yaml" in line


def test_resume_refuses_another_recipe(comingle: Any, recipe_file: Path, tmp_path: Path) -> None:
    command = ("run", recipe_file, "--out", tmp_path / "run", "--set", "method=pretrained")
    comingle(*command)
    line = one_line(comingle(*command, "--resume", "--set", "seed=4"))
    assert line == f"{tmp_path / 'run'}: belongs to another recipe, seed was 0 and is 4; use another --out"


def test_resume_refuses_a_damaged_checkpoint(comingle: Any, recipe_file: Path, tmp_path: Path) -> None:
    command = ("run", recipe_file, "--out", tmp_path / "run", "--set", "training.rounds=1")
    comingle(*command)
    state = tmp_path / "run" / "checkpoints" / "round-0001" / "state.safetensors"
    state.write_bytes(state.read_bytes()[:-10])
    line = one_line(comingle(*command, "--resume"))
    assert line.startswith(f"{state.parent}: damaged")
    assert "state.safetensors" in line
    assert "SHA256SUMS" in line


@pytest.mark.parametrize("blank", ["", " "])
def test_out_must_be_a_name(
    comingle: Any, recipe_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, blank: str
) -> None:
    """An empty name is what a shell makes of a variable that is not set, and must not mean the current folder."""
    monkeypatch.chdir(tmp_path)
    before = {path.name for path in tmp_path.iterdir()}
    for verb, *more in (
        ("run", "--set", "method=pretrained"),
        ("compare", "--methods", "local"),
        ("report",),
        ("plot",),
    ):
        answer = comingle(verb, recipe_file, *more, "--out", blank, "--force")
        assert (answer.code, answer.out) == (2, "")
        assert "--out" in answer.err
    assert {path.name for path in tmp_path.iterdir()} == before


def test_out_must_be_a_folder(comingle: Any, recipe_file: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    assert one_line(comingle("run", recipe_file, "--out", tmp_path / "file")).startswith(
        f"{tmp_path / 'file'}: is a file"
    )
    below = tmp_path / "file" / "run"
    line = one_line(comingle("run", recipe_file, "--out", below, "--set", "method=pretrained"))
    assert line == f"--out {below}: cannot be a folder: {tmp_path / 'file'} is a file"
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--methods", "local,comig"], "method: no method 'comig'. Did you mean 'comigs'?"),
        (["--methods", ","], "--methods: "),
        (["--methods", "local", "--seeds", "0,x"], "--seeds '0,x': "),
        (["--methods", "local", "--seeds", ""], "--seeds '': "),
        (["--methods", "local", "--seeds", "0.5"], "--seeds '0.5': "),
        (["--methods", "local", "--seeds=-1"], "--seeds: seed: Input should be greater than or equal to 0; got -1"),
        (["--methods", "comigs-1g1s", "--set", "method.router_every=0"], "method comigs-1g1s: router_every is 0"),
        (
            ["--methods", "local,fedavg", "--against", "fedvag"],
            "--against 'fedvag': ",
        ),
    ],
)
def test_compare_checks_methods_and_seeds_first(
    comingle: Any, recipe_file: Path, tmp_path: Path, options: list[str], said: str
) -> None:
    line = one_line(comingle("compare", recipe_file, "--out", tmp_path / "out", *options))
    assert line.startswith(said)
    assert not (tmp_path / "out").exists()


def test_compare_does_not_overwrite_a_single_run(comingle: Any, recipe_file: Path, tmp_path: Path) -> None:
    command = ("compare", recipe_file, "--seeds", 0, "--out", tmp_path / "out", "--methods")
    assert comingle(*command, "pretrained").code == 0
    line = one_line(comingle(*command, "local,pretrained"))
    assert line.startswith(f"{tmp_path / 'out' / 'pretrained-seed0'}: exists; --resume ")
    assert not (tmp_path / "out" / "local-seed0").exists()


def test_a_wrong_seed(comingle: Any, recipe_file: Path) -> None:
    line = one_line(comingle("run", recipe_file, "--seed", "-1"))
    assert line == "--seed: seed: Input should be greater than or equal to 0; got -1"


def test_methods_knows_no_such_method(comingle: Any) -> None:
    said = one_line(comingle("methods", "fedav"))
    assert said.startswith("method: no method 'fedav'. Did you mean 'fedavg'?")
    assert said.endswith("--plugin FILE")


def test_show_needs_a_finished_run(comingle: Any, recipe_file: Path, tmp_path: Path) -> None:
    assert one_line(comingle("show", tmp_path / "nowhere")) == f"{tmp_path / 'nowhere'}: no such run folder"
    line = one_line(comingle("show", recipe_file.parent))
    assert line.startswith(f"{recipe_file.parent}: no metrics.json; ")
    comingle("run", recipe_file, "--out", tmp_path / "run", "--set", "method=pretrained")
    (tmp_path / "run" / "metrics.json").unlink()
    line = one_line(comingle("show", tmp_path / "run"))
    assert line.startswith(f"{tmp_path / 'run'}: no metrics.json; ")
    assert f"`comingle run --resume {tmp_path / 'run'}`" in line


def test_what_show_advises_works(comingle: Any, recipe_file: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    comingle("run", recipe_file, "--out", run, "--set", "training.rounds=1")
    found = (run / "metrics.json").read_text()
    (run / "metrics.json").unlink()
    assert comingle("run", "--resume", run).code == 0
    assert (run / "metrics.json").read_text().partition("wall_seconds")[0] == found.partition("wall_seconds")[0]


# ---------------------------------------------------------------- --force


def test_force_replaces_a_run(comingle: Any, recipe_file: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    comingle("run", recipe_file, "--out", run, "--set", "training.rounds=1")
    (run / ".metrics.json.abc").write_text("a draft that a crash left")
    answer = comingle("run", recipe_file, "--out", run, "--set", "method=pretrained", "--force")
    assert answer.code == 0, answer.err
    assert load_recipe(run).method.name == "pretrained"
    assert not (run / "checkpoints").exists()
    assert not (run / ".metrics.json.abc").exists()


@pytest.mark.parametrize(
    "also", [[], ["recipe.yaml"], ["recipe.yaml", "events.jsonl"]], ids=lambda names: " ".join(names)
)
def test_force_never_touches_a_folder_with_other_files(
    comingle: Any, recipe_file: Path, tmp_path: Path, also: list[str]
) -> None:
    folder = tmp_path / "thesis"
    for name in ("thesis.txt", *also):
        folder.mkdir(exist_ok=True)
        (folder / name).write_text("years of work")
    line = one_line(comingle("run", recipe_file, "--out", folder, "--force"))
    assert line.startswith(f"{folder}: ")
    assert "'thesis.txt'" in line
    assert "use another --out" in line
    assert {path.name: path.read_text() for path in folder.iterdir()} == dict.fromkeys(
        ("thesis.txt", *also), "years of work"
    )


def test_force_never_touches_the_folder_of_a_recipe_called_recipe(comingle: Any, recipe_file: Path) -> None:
    """The file name of a run's own recipe is also one that people choose."""
    mine = recipe_file.rename(recipe_file.with_name("recipe.yaml"))
    text = mine.read_text()
    assert "is not a run folder" in one_line(comingle("run", mine, "--out", mine.parent, "--force"))
    alone = mine.parent / "alone"
    alone.mkdir()
    copy = alone / "recipe.yaml"
    copy.write_text(text.replace("texts/", "../texts/"))
    before = copy.read_text()
    assert "is not a run folder" in one_line(comingle("run", copy, "--out", alone, "--force"))
    assert copy.read_text() == before


def test_force_keeps_the_old_run_when_the_new_one_cannot_begin(
    comingle: Any, recipe_file: Path, tmp_path: Path
) -> None:
    command = ("run", recipe_file, "--out", tmp_path / "run", "--set", "method=pretrained")
    comingle(*command)
    before = (tmp_path / "run" / "metrics.json").read_bytes()
    one_line(comingle(*command, "--force", "--set", "data.users.dan=missing.txt"))
    assert (tmp_path / "run" / "metrics.json").read_bytes() == before


@pytest.mark.parametrize("family", ["gpt2", "llama"])
@pytest.mark.parametrize("verb", ["run", "cost"])
def test_a_context_that_the_base_does_not_read_at_once(
    comingle: Any, recipe_file: Path, tmp_path: Path, verb: str, family: str
) -> None:
    """Learnt positions would have none there; rotary ones train what the base's own answers refuse."""
    sets = ["--set", f"base=random:{family}?layers=1&ctx=32", "--set", "training.context=33"]
    out = ["--out", tmp_path / "run"] if verb == "run" else []
    answer = comingle(verb, recipe_file, *sets, *out)
    assert answer.code == 2
    assert "training.context: got 33; allowed: up to 32" in " ".join(answer.err.split())
    assert not (tmp_path / "run").exists()
