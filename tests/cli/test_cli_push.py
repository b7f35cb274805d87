"""``comingle export --push`` and adapters of the hub, with a stand-in of the hub's HTTP API."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from tests.serving.test_serving_sources import answer
from transformers import AutoModelForCausalLM

from comingle.models.loading import adapter_folder
from comingle.runs import api
from comingle.serving.access import Limits
from comingle.serving.models import Source, open_pool
from comingle.utils.errors import BaseModelError
from exporting import check_same
from hub import OWNER, Hub
from hub import hub as hub

# The hub's client uploads files in a way that its HTTP library warns of.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")


@pytest.fixture(scope="module")
def run(write_recipe: Callable[[Path], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("project")
    recipe = write_recipe(folder / "project")
    content = yaml.safe_load(recipe.read_text())
    recipe.write_text(yaml.safe_dump({**content, "method": "fedit"}))
    api.run(recipe, out=folder / "run")
    return folder / "run"


def test_an_export_is_pushed_to_a_private_repository(comingle: Any, hub: Hub, run: Path) -> None:
    """The stock client gets from it what was trained; the card says how, and no file has a line of the user's text."""
    said = comingle("export", run, "--user", "bob", "--push", "bobs-model")
    assert (said.code, said.err) == (0, "")
    assert f"bob: {hub.endpoint}/{OWNER}/bobs-model" in said.out
    repository = hub.repositories[f"{OWNER}/bobs-model"]
    assert repository.private
    check_same(api.load(run).user("bob"), AutoModelForCausalLM.from_pretrained(f"{OWNER}/bobs-model"))
    card = repository.files["README.md"].decode()
    assert f'from_pretrained("{OWNER}/bobs-model")' in card
    for told in ("the method fedit", "| test perplexity | ", "## Licence", "random:llama"):
        assert told in card
    data = yaml.safe_load((run / "recipe.yaml").read_text())["data"]["users"]["bob"]
    path = data["path"] if isinstance(data, dict) else data
    lines = [line for line in Path(path).read_text().splitlines() if len(line) > 20]
    assert lines
    for content in repository.files.values():
        assert not any(line.encode() in content for line in lines)


def test_a_pushed_export_is_replaced_only_with_force(comingle: Any, hub: Hub, run: Path, tmp_path: Path) -> None:
    name = f"{OWNER}/bob"
    options = ("export", run, "--user", "bob", "--push", name)
    assert comingle(*options, "--format", "peft", "--to", tmp_path / "bob").code == 0
    before = dict(hub.repositories[name].files)
    assert before["adapter_model.safetensors"] == (tmp_path / "bob" / "adapter_model.safetensors").read_bytes()
    again = comingle(*options)
    assert (again.code, again.err) == (2, f"comingle: --push {name}: exists; --force replaces an earlier export\n")
    assert hub.repositories[name].files == before
    assert comingle(*options, "--force").code == 0
    assert "model.safetensors" in hub.repositories[name].files
    assert "adapter_model.safetensors" not in hub.repositories[name].files


def test_files_of_others_and_public_repositories_are_left_alone(comingle: Any, hub: Hub, run: Path) -> None:
    name = f"{OWNER}/bob"
    options = ("export", run, "--user", "bob", "--push", name, "--force")
    assert comingle(*options, "--public").code == 0
    assert not hub.repositories[name].private
    commits = hub.repositories[name].commits
    refused = comingle(*options)
    assert (refused.code, refused.err) == (
        2,
        f"comingle: --push {name}: is public; allowed: a private repository, or --public\n",
    )
    hub.repositories[name].private = True
    hub.repositories[name].files = {"thesis.pdf": b"mine"}
    refused = comingle(*options)
    assert refused.code == 2
    assert "'thesis.pdf'" in refused.err
    assert hub.repositories[name].commits == commits


def test_an_empty_repository_is_filled(comingle: Any, hub: Hub, run: Path) -> None:
    """Such as the one that an upload without success has left."""
    from huggingface_hub import HfApi

    HfApi().create_repo("bob", private=True)
    assert comingle("export", run, "--user", "bob", "--push", "bob", "--format", "peft").code == 0
    assert "adapter_config.json" in hub.repositories[f"{OWNER}/bob"].files


def test_a_card_of_gguf_says_how_to_get_the_file(comingle: Any, hub: Hub, run: Path) -> None:
    assert comingle("export", run, "--user", "bob", "--push", "bob", "--format", "gguf").code == 0
    card = hub.repositories[f"{OWNER}/bob"].files["README.md"].decode()
    assert f"hf download {OWNER}/bob --local-dir {OWNER}/bob\n" in card
    assert f'Llama("{OWNER}/bob/model.gguf")' in card


@pytest.mark.parametrize(
    ("environment", "name", "said"),
    [
        ({"HF_HUB_OFFLINE": "1"}, "bob", "--push bob: HF_HUB_OFFLINE is set; export with --to FOLDER"),
        ({"HF_TOKEN": "hf_wrong"}, "bob", "--push bob: the hub answers 401: "),
        ({}, "somebody-else/bob", "--push somebody-else/bob: the hub answers 403: "),
        ({}, "no name", "--push: got 'no name'; allowed: a name on the Hugging Face hub, OWNER/NAME"),
        ({}, "random:llama", "--push: got 'random:llama'; allowed: "),
    ],
)
def test_refusals_of_the_hub_are_one_line(
    comingle: Any,
    hub: Hub,
    run: Path,
    monkeypatch: pytest.MonkeyPatch,
    environment: dict[str, str],
    name: str,
    said: str,
) -> None:
    for key, value in environment.items():
        monkeypatch.setenv(key, value)
    answer = comingle("export", run, "--user", "bob", "--push", name, "--format", "peft")
    assert (answer.code, answer.err.count("\n")) == (2, 1)
    assert answer.err.startswith(f"comingle: {said}")
    assert hub.repositories == {}


def test_a_hub_that_is_away_is_one_line(comingle: Any, hub: Hub, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    answer = comingle("export", run, "--user", "bob", "--push", "bob")
    assert (answer.code, answer.err.count("\n")) == (2, 1)
    assert "--push bob: the hub (http://127.0.0.1:9) is unreachable; export with --to FOLDER" in answer.err


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ((), "--to: got none; allowed: a folder, or --push OWNER/NAME"),
        (("--to", "x", "--public"), "--public: got it without --push"),
        (("--push", "bob", "--user", "all"), "--push: got 3 users; allowed: one, with --user NAME"),
    ],
)
def test_options_that_do_not_fit_are_one_line(comingle: Any, hub: Hub, run: Path, options: Any, said: str) -> None:
    answer = comingle("export", run, *options)
    assert (answer.code, answer.err.count("\n")) == (2, 1)
    assert said in answer.err
    assert hub.repositories == {}


# -------------------------------------------------------------------- from the hub


def test_an_adapter_of_the_hub_is_downloaded_once(comingle: Any, hub: Hub, run: Path, tmp_path: Path) -> None:
    comingle("export", run, "--user", "bob", "--push", "bob", "--format", "peft", "--to", tmp_path / "bob")
    folder = adapter_folder(f"{OWNER}/bob", "adapters.start")
    for name in ("adapter_config.json", "adapter_model.safetensors", "tokenizer.json"):
        assert (folder / name).read_bytes() == (tmp_path / "bob" / name).read_bytes()
    assert adapter_folder(str(tmp_path / "bob"), "adapters.start") == tmp_path / "bob"
    hub.requests.clear()
    assert adapter_folder(f"{OWNER}/bob", "adapters.start") == folder
    assert hub.requests == []


@pytest.mark.parametrize(
    ("token", "name", "said"),
    [
        (True, f"{OWNER}/absent", "the hub answers 404: "),
        (False, f"{OWNER}/bob", "the hub answers 401: "),
        (True, f"{OWNER}/model", "no adapter_config.json and no adapter_model.safetensors in it"),
        (True, "/nowhere/at/all", "no such folder"),
    ],
)
def test_what_is_no_adapter_is_one_line(
    comingle: Any, hub: Hub, run: Path, monkeypatch: pytest.MonkeyPatch, token: bool, name: str, said: str
) -> None:
    if name == f"{OWNER}/model":
        comingle("export", run, "--user", "bob", "--push", "model")
    if not token:
        comingle("export", run, "--user", "bob", "--push", "bob", "--format", "peft")
        monkeypatch.delenv("HF_TOKEN")
    with pytest.raises(BaseModelError, match=f"^adapters.start: got '{name}': .*{said}.*; allowed: ") as caught:
        adapter_folder(name, "adapters.start")
    assert "\n" not in str(caught.value)


def test_runs_and_newcomers_start_from_an_adapter_of_the_hub(
    comingle: Any, hub: Hub, run: Path, tmp_path: Path
) -> None:
    """The first has bob's score before its first round; a name that is not there is one line."""
    comingle("export", run, "--user", "bob", "--push", "bob", "--format", "peft")
    recipe = run.parent / "project" / "tiny.yaml"
    settings = ("--set", f"adapters.start={OWNER}/bob", "--set", "method=pretrained")
    assert comingle("run", recipe, *settings, "--out", tmp_path / "again").code == 0
    (again, bob) = (api.load(folder).metrics["users"]["bob"]["test_perplexity"] for folder in (tmp_path / "again", run))
    assert again == pytest.approx(bob, rel=1e-4)
    for command, said in (
        (("run", recipe, "--set", f"adapters.start={OWNER}/absent"), "the hub answers 404: "),
        (("join", run, "--name", "dan", "--data", __file__, "--adapter", f"{OWNER}/bob"), "fedit shares all LoRAs; "),
    ):
        answer = comingle(*command, "--out", tmp_path / "none")
        assert (answer.code, answer.err.count("\n")) == (2, 1)
        assert answer.err.startswith("comingle: ")
        assert "adapters.start: got " in answer.err
        assert said in answer.err
        assert not (tmp_path / "none").exists()


def test_a_pushed_model_is_a_base_of_the_next_run(comingle: Any, hub: Hub, run: Path) -> None:
    comingle("export", run, "--user", "bob", "--push", "bob")
    recipe = yaml.safe_load((run / "recipe.yaml").read_text())
    next_run = api.run({**recipe, "base": f"{OWNER}/bob", "method": "pretrained"})
    bob = api.load(run).metrics["users"]["bob"]["test_perplexity"]
    assert next_run.metrics["users"]["bob"]["test_perplexity"] == pytest.approx(bob, rel=1e-4)


@pytest.mark.slow
def test_an_adapter_on_the_hub_is_served(comingle: Any, hub: Hub, run: Path) -> None:
    """By ``comingle serve RUN hub:OWNER/NAME``."""
    comingle("export", run, "--user", "bob", "--push", "letters", "--format", "peft")
    pool = open_pool([Source.of(str(run)), Source.of(f"hub:{OWNER}/letters")], Limits(rows=2))
    assert answer(pool, ("letters", "A cat")) == [api.load(run).user("bob").generate("A cat", max_new_tokens=6)]
    assert Source.of(f"mine=hub:{OWNER}/letters").names() == ["mine"]
    with pytest.raises(BaseModelError, match="nobody/nothing"):
        Source.of("hub:nobody/nothing")


@pytest.mark.slow
def test_processes_of_their_own_push_and_open(hub: Hub, run: Path) -> None:
    """By the variables HF_ENDPOINT and HF_TOKEN alone; the second process never imports comingle."""
    source = Path(__file__).parents[2] / "src"
    environment = {**os.environ, "PYTHONPATH": str(source)}
    command = ["export", str(run), "--user", "bob", "--push", "bob", "--format", "transformers"]
    pushed = subprocess.run(
        [sys.executable, "-m", "comingle", *command], env=environment, capture_output=True, text=True, check=True
    )
    assert f"{hub.endpoint}/{OWNER}/bob" in pushed.stdout
    script = (
        "import json, sys, torch\n"
        "from transformers import AutoModelForCausalLM, AutoTokenizer\n"
        f"model = AutoModelForCausalLM.from_pretrained('{OWNER}/bob')\n"
        f"tokenizer = AutoTokenizer.from_pretrained('{OWNER}/bob')\n"
        "logits = model(**tokenizer('A cat sat', return_tensors='pt')).logits\n"
        "assert not any(name.split('.')[0] == 'comingle' for name in sys.modules)\n"
        "print(json.dumps(logits.tolist()))\n"
    )
    opened = subprocess.run(
        [sys.executable, "-c", script],
        env={key: value for key, value in os.environ.items() if key != "PYTHONPATH"},
        capture_output=True,
        text=True,
        check=True,
    )
    bob = api.load(run).user("bob")
    ids = torch.tensor([bob.model.base.tokenizer("A cat sat")["input_ids"]])
    torch.testing.assert_close(torch.tensor(json.loads(opened.stdout)), bob.logits(ids), rtol=0, atol=1e-4)
