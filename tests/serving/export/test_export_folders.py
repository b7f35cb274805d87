"""What an export writes besides weights, and what it leaves alone."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from comingle.models.loading import load_base
from comingle.models.personal import ModelInfo
from comingle.serving.export.exporting import Card, licence_of, name_of, replace_folder
from comingle.utils.errors import ComingleError, RunError
from comingle.utils.records import DRAFT
from exporting import trained

CARD = "---\ntags:\n- comingle\n---\n"


@pytest.fixture(scope="module")
def bob(federate: Any) -> Any:
    return trained(federate, "comigs-1g1s", base="random:llama?layers=1").user("bob")


def tree(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def everything(folder: Path) -> dict[str, bytes | None]:
    """Folders and links too."""
    return {str(path.relative_to(folder)): None for path in folder.rglob("*")} | tree(folder)


def test_a_folder_that_exists_is_replaced_only_when_asked_to(bob: Any, tmp_path: Path) -> None:
    bob.export(tmp_path / "bob")
    before = tree(tmp_path)
    with pytest.raises(RunError, match=r"bob: .*--force"):
        bob.export(tmp_path / "bob", format="gguf")
    assert tree(tmp_path) == before
    bob.export(tmp_path / "bob", format="gguf", force=True)
    assert set(tree(tmp_path)) == {
        f"bob/{name}" for name in ("README.md", "model.gguf", "Modelfile", "comingle_export.json")
    }
    assert (tmp_path / "bob").stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("listed", [True, False])
@pytest.mark.parametrize(
    "name",
    ["notes.odt", "notes.txt", "data.json", "old.safetensors", "more/config.json", "folder", "link", "README.md"],
)
@pytest.mark.sampled(2)
def test_what_no_export_has_written_is_left_alone(bob: Any, tmp_path: Path, name: str, listed: bool) -> None:
    """A stranger's file or folder, and a card that is somebody else's; also where an older version has exported."""
    bob.export(tmp_path / "bob")
    if not listed:
        (tmp_path / "bob" / "comingle_export.json").unlink()
    mine = tmp_path / "bob" / name
    mine.parent.mkdir(exist_ok=True)
    put = {"folder": mine.mkdir, "link": lambda: mine.symlink_to(tmp_path)}
    put.get(name, lambda: mine.write_text("mine"))()
    before = everything(tmp_path)
    with pytest.raises(RunError, match=r"bob: .*--force") as caught:
        bob.export(tmp_path / "bob", force=True)
    assert everything(tmp_path) == before
    assert name == "README.md" or repr(name.split("/")[0]) in str(caught.value)


def test_a_folder_without_a_card_is_no_export(bob: Any, tmp_path: Path) -> None:
    (tmp_path / "bob").mkdir()
    (tmp_path / "bob" / "config.json").write_text("mine")
    for name in ("", "README.md"):
        (tmp_path / "bob" / (name or "vocab.json")).write_text("mine")
        with pytest.raises(RunError, match=r"bob: .*not an exported model"):
            bob.export(tmp_path / "bob", force=True)


@pytest.mark.parametrize("format", ["transformers", "peft", "gguf", "gguf-adapter", "merged-approximately"])
@pytest.mark.sampled(1)
def test_an_export_lists_its_files_and_is_replaced(federate: Any, tmp_path: Path, format: str) -> None:
    ann = trained(federate, "fedit", base="random:llama?layers=1").user("ann")
    ann.export(tmp_path / "ann", format=format)
    names = {path.name for path in (tmp_path / "ann").iterdir()}
    listed = json.loads((tmp_path / "ann" / "comingle_export.json").read_text())
    assert listed == {"written": sorted(names - {"comingle_export.json"})}
    for older in (None, "{", "[]", '{"written": [[]]}', '{"written": null}'):  # without a list, or with a damaged one
        ann.export(tmp_path / "ann", format=format, force=True)
        (tmp_path / "ann" / "comingle_export.json").unlink()
        if older is not None:
            (tmp_path / "ann" / "comingle_export.json").write_text(older)
    ann.export(tmp_path / "ann", force=True)


def test_shards_and_folders_of_an_export_are_its_own(tmp_path: Path) -> None:
    """Such as transformers writes of large networks, and of tokenizers with several templates."""
    target, more = tmp_path / "bob", "additional_chat_templates"

    def write(*names: str) -> None:
        with replace_folder(target, force=True) as draft:
            for name in names:
                (draft / name).parent.mkdir(exist_ok=True)
                (draft / name).write_text(CARD)

    for _ in range(2):
        write("README.md", f"{more}/tools.jinja")
    (target / more / "mine.jinja").write_text("mine")
    with pytest.raises(RunError, match=f"'{more}/mine.jinja'"):
        write()
    shutil.rmtree(target)
    for name in ("model-00001-of-00002.safetensors", "model-mine.safetensors"):
        write("README.md", name)
        (target / "comingle_export.json").unlink()
    with pytest.raises(RunError, match=r"'model-mine\.safetensors'"):
        write()


def test_an_export_is_in_its_place_until_the_new_one_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is deleted before; if the new one cannot be put there, the old one is there again."""
    target, delete, seen = tmp_path / "bob", shutil.rmtree, []

    def write(text: str) -> None:
        with replace_folder(target, force=True) as draft:
            (draft / "README.md").write_text(CARD + text)

    def observed_delete(path: Path, **options: Any) -> None:
        seen.append((target / "README.md").read_text())
        delete(path, **options)

    write("old")
    monkeypatch.setattr(shutil, "rmtree", observed_delete)
    write("new")
    assert {text.removeprefix(CARD) for text in seen} == {"new"}
    rename = Path.rename

    def failing_rename(path: Path, to: Path) -> Path:
        if path.name.endswith(DRAFT):
            raise OSError(28, "no space left")
        return rename(path, to)

    monkeypatch.setattr(Path, "rename", failing_rename)
    with pytest.raises(RunError):
        write("newer")
    assert {path.name for path in tmp_path.iterdir()} == {"bob"}
    assert (target / "README.md").read_text() == CARD + "new"


@pytest.mark.parametrize("force", [True, False])
def test_what_is_put_there_while_an_export_is_written_is_left_alone(tmp_path: Path, force: bool) -> None:
    def write() -> None:
        with replace_folder(tmp_path / "bob", force=force):
            (tmp_path / "bob").mkdir()
            (tmp_path / "bob" / "notes.txt").write_text("mine")

    with pytest.raises(RunError, match="not an exported model" if force else "bob: exists"):
        write()
    assert everything(tmp_path) == {"bob": None, "bob/notes.txt": b"mine"}


def test_an_empty_folder_is_taken_and_a_file_is_not(bob: Any, tmp_path: Path) -> None:
    (tmp_path / "bob").mkdir()
    bob.export(tmp_path / "bob")
    (tmp_path / "file").write_text("mine")
    for target in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(RunError, match="is a file"):
            bob.export(target)


@pytest.mark.parametrize("format", ["transformers", "gguf"])
def test_a_disk_that_is_full_is_one_line_and_leaves_the_old_export(bob: Any, tmp_path: Path, format: str) -> None:
    import resource
    import signal

    bob.export(tmp_path / "bob", format=format)
    before = tree(tmp_path)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (9_000, hard))
    try:
        with pytest.raises(RunError, match="bob: "):
            bob.export(tmp_path / "bob", format=format, force=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)
    assert tree(tmp_path) == before
    assert os.listdir(tmp_path) == ["bob"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"format": "transformer"},
            r"--format: got 'transformer'; allowed: .* Did you mean 'transformers'",
        ),
        ({"dtype": "q8_0"}, r"--dtype: got 'q8_0'; allowed for transformers: bfloat16, float16, float32, float64"),
        ({"format": "gguf", "dtype": "float64"}, r"--dtype: got 'float64'; allowed for gguf: float32, bfloat16, q8_0"),
    ],
)
def test_settings_that_do_not_apply_are_one_line(bob: Any, tmp_path: Path, options: Any, said: str) -> None:
    with pytest.raises(ComingleError, match=said):
        bob.export(tmp_path / "bob", **options)
    assert not list(tmp_path.iterdir())


# -------------------------------------------------------------------- the card


def test_the_card_says_what_it_is_and_nothing_of_others(bob: Any, tmp_path: Path) -> None:
    counts, scores = {"train_tokens": 1234, "valid_tokens": 60}, {"test_perplexity": 12.345}
    model_info = replace(bob.model_info, counts=counts, scores=scores, users=3)
    replace(bob, model_info=model_info).export(tmp_path / "bob", format="merged-approximately")
    text = (tmp_path / "bob" / "README.md").read_text()
    front = yaml.safe_load(text.split("---")[1])
    assert front == {"library_name": "transformers", "tags": ["comingle", "federated-learning"]}
    for said in (
        "# bob",
        "random:llama?layers=1",
        "the method comigs-1g1s, in a federation of 3 users",
        "1,234 train tokens, 60 valid tokens",
        "| test perplexity | 12.35 |",
        "| validation perplexity of this model | 2",
        'from_pretrained("bob")',
    ):
        assert said in text
    assert "ann" not in text
    assert "cem" not in text


def test_the_licence_and_the_name_are_those_of_the_base(tmp_path: Path) -> None:
    base = load_base("random:llama", dtype="float32", device="cpu")
    assert licence_of(base) == ""
    (tmp_path / "README.md").write_text("---\nlanguage: en\nlicense: apache-2.0\n---\n# A model\nlicense: mit\n")
    there = replace(base, origin=tmp_path, name=str(tmp_path))
    assert licence_of(there) == "apache-2.0"
    assert name_of(there) == tmp_path.name
    packaged = replace(there, name="some_package/model.Q4_1.gguf")  # not a name of the hub's
    hub = replace(there, name="owner/model")
    model_info = ModelInfo(
        method="fedit", kind="text", users=1, counts={}, scores={}, validate=lambda losses, gates: None
    )
    text = Card(name="bob", base=hub, library="peft", form="One LoRA.", usage="...", model_info=model_info).text()
    front = yaml.safe_load(text.split("---")[1])
    assert (
        "base_model"
        not in Card(name="bob", base=packaged, library="peft", form="", usage="", model_info=model_info).text()
    )
    assert (front["base_model"], front["license"]) == ("owner/model", "apache-2.0")
    assert ": apache-2.0." in text
    assert (
        str(tmp_path)
        not in Card(name="bob", base=there, library="peft", form="", usage="", model_info=model_info).text()
    )


@pytest.mark.parametrize(
    ("name", "called"),
    [
        ("owner/model", "owner/model"),
        ("gpt2", "gpt2"),
        ("/home/alice/models/mine", "mine"),
        ("../models/mine/", "mine"),
        ("{folder}", "folder"),
        ("{folder}/hub/models--owner--model--v2/snapshots/0123abc", "owner/model--v2"),
        ("given", "a LlamaForCausalLM without a name"),
    ],
)
def test_a_base_is_named_without_its_place(tmp_path: Path, name: str, called: str) -> None:
    base = load_base("random:llama?layers=1&dim=32", dtype="float32", device="cpu")
    folder = tmp_path / "folder"
    place = Path(name.format(folder=folder))
    if place.is_relative_to(tmp_path):
        place.mkdir(parents=True)
    assert name_of(replace(base, name=name.format(folder=folder))) == called


def test_a_base_in_the_working_folder_has_that_folders_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = load_base("random:llama?layers=1&dim=32", dtype="float32", device="cpu")
    (tmp_path / "mine").mkdir()
    monkeypatch.chdir(tmp_path / "mine")
    for name in (".", "./", "../mine"):
        assert name_of(replace(base, name=name)) == "mine"
