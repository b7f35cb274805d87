"""A server's folder and port are its own, and another one is refused at once; so is a participant without its files."""

from __future__ import annotations

import re
import socket
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr")

from tests.federation.test_federate import recipe_of

from comingle.federation import launch
from comingle.federation.files import split_recipe
from comingle.federation.flower.app_status import FOLDER
from comingle.federation.launch import take_part
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
    given = {"name": "ann", "data": str(tmp_path / "text.txt"), "server": "127.0.0.1:9"} | {what: str(tmp_path / "no")}
    with pytest.raises(RecipeError, match=rf"user 'ann': {what}: .*no does not exist"):
        take_part(None, given, default=tmp_path / "state" / "participant.yaml", say=lambda _: None)
