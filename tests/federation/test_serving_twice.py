"""A server's folder and port are its own, and another one is refused at once; so is a participant without its files."""

from __future__ import annotations

import re
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr")

from tests.federation.test_federate import recipe_of

from comingle.federation import launch
from comingle.federation.client_command import take_part
from comingle.federation.files import split_recipe
from comingle.federation.flower.processes import FOLDER
from comingle.federation.participant import load_participants, save_participant
from comingle.utils.errors import RecipeError, RunError
from comingle.utils.files import locked


def serve(tmp_path: Path, port: int, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is said; nothing may be started."""
    said: list[str] = []
    monkeypatch.setattr(launch, "supervise", lambda *_: pytest.fail("it was started"))
    monkeypatch.setattr(launch, "_PORT_SECONDS", 0.0)
    plan = split_recipe(recipe_of(tmp_path, "fedavg"))[0]
    options: dict[str, Any] = {"host": "127.0.0.1", "port": port, "certificates": None, "say": said.append}
    with pytest.raises(RunError) as caught:
        launch.serve(tmp_path / "server.yaml", plan, tmp_path / "run", **options)
    return [*said, str(caught.value)]


def test_a_folder_that_another_server_uses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    app = tmp_path / "run" / FOLDER / "app.json"
    app.parent.mkdir(parents=True)
    app.write_text("{}")
    with locked(app.parent):
        (line,) = serve(tmp_path, 0, monkeypatch)
    assert str(app.parent) in line
    assert app.read_text() == "{}"  # the other one's, which would be taken to have died without it


def test_a_port_where_somebody_listens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else all who have come to that one would be asked to train for this one."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        (line,) = serve(tmp_path, port, monkeypatch)
    assert re.match(rf"server: .*127.0.0.1:{port} \(Address already in use\).*--port", line)


@pytest.mark.parametrize("what", ["data", "key", "certificates"])
def test_a_participant_whose_file_is_missing(what: str, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("words")
    given = {"data": str(tmp_path / "text.txt"), "server": "127.0.0.1:9", "state": str(tmp_path / "state")}
    participants = load_participants((), ["ann"], given | {what: str(tmp_path / "no")})
    with pytest.raises(RecipeError, match=rf"user 'ann': {what}: .*no does not exist"):
        take_part(participants, say=lambda _: None)


def test_several_users_have_files_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("ann", "bob"):
        (tmp_path / f"{name}.yaml").write_text(f"name: {name}\ndata: {name}.txt\nstate: {name}\n")
    files = [tmp_path / "ann.yaml", tmp_path / "bob.yaml"]
    found = load_participants(files, (), {"server": "127.0.0.1:9"})
    assert [(one.name, one.server) for one in found] == [("ann", "127.0.0.1:9"), ("bob", "127.0.0.1:9")]
    for participant in found:
        save_participant(Path(participant.state) / "participant.yaml", participant)
    assert load_participants((), ["ann", "bob"], {}) == found


def test_what_is_told_is_set_before_the_first_contact_and_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (participant,) = load_participants((), ["ann"], {"data": "text.txt", "server": "127.0.0.1:9", "tells": "losses"})
    assert participant.own.tells == "losses"
    save_participant(tmp_path / "ann" / "participant.yaml", participant)
    assert [load_participants((), ["ann"], {"tells": new})[0].tells for new in (None, "nothing")] == [
        "losses",
        "nothing",
    ]


def test_settings_are_those_of_the_named_state_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for folder, key in (("ann", "a.key"), ("other", "b.key")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "participant.yaml").write_text(f"name: ann\ndata: text.txt\nkey: {key}\nstate: .\n")
    said: list[str] = []
    (found,) = load_participants((), ["ann"], {"state": "other"}, said.append)
    load_participants((), ["ann"], {}, said.append)
    assert said == [f"ann: settings from {folder}/participant.yaml" for folder in ("other", "ann")]
    with pytest.raises(RecipeError, match=r"user 'bob': .*'ann', other; use another --state"):
        load_participants((), ["bob"], {"state": "other"})
    assert (found.state, found.key) == (str(tmp_path / "other"), str(tmp_path / "other" / "b.key"))
    said.clear()
    (fresh,) = load_participants((), ["ann"], {"state": "empty", "data": "text.txt"}, said.append)
    assert said == []
    assert (fresh.state, fresh.key) == (str(tmp_path / "empty"), None)  # not the key in the folder ann


@pytest.mark.parametrize(
    ("files", "names", "options", "place"),
    [
        (0, (), {}, "client: no user"),
        (0, ("ann",), {}, "user 'ann': no data: .*ann/participant.yaml"),
        (0, ("ann",), {"data": "text.txt", "tells": "much"}, "user 'ann': tells: .*much"),
        (0, ("ann", "bob"), {"data": "text.txt"}, "client: got --data for 2 users"),
        (2, (), {"state": "here"}, "client: got --state for 2 users"),
        (2, ("ann", "bob"), {}, "client: got 2 files and 2 names"),
        (2, (), {}, "client: .*'ann'"),
    ],
)
def test_users_that_cannot_be_told_apart(
    files: int,
    names: Sequence[str],
    options: dict[str, Any],
    place: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ann.yaml").write_text("name: ann\ndata: ann.txt\nstate: ann\n")
    with pytest.raises(RecipeError, match=place):
        load_participants([tmp_path / "ann.yaml"] * files, names, options)
