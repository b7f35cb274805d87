"""The files of the example of a federation: compose file, app, coordinator's and participants' files."""

from __future__ import annotations

import io
import json
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from tests.examples.test_examples import EXAMPLES, environment

from comingle.cli import app
from comingle.federation.files import load_plan
from comingle.federation.participant import load_participant

FOLDER = EXAMPLES / "federation"
NAMES = ("ada", "ben", "cem")
INSIDE = "/federation/"

# Of the compose specification: what a file and a service may have, as far as one would use it here.
TOP = {"name", "services", "volumes", "networks", "secrets", "configs"}
SERVICE = {
    "build", "cap_drop", "command", "depends_on", "entrypoint", "environment", "env_file", "healthcheck", "hostname",
    "image", "init", "mem_limit", "networks", "ports", "profiles", "read_only", "restart", "secrets",
    "stop_grace_period", "tmpfs", "user", "volumes", "working_dir",
}  # fmt: skip


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    return yaml.safe_load((FOLDER / "compose.yaml").read_text(encoding="utf-8"))


def mounts(service: dict[str, Any]) -> dict[str, str]:
    """Host's path or volume -> path inside."""
    return {part.split(":")[0]: part.split(":")[1] for part in service["volumes"]}


def test_the_compose_file_has_only_what_the_specification_has(compose: dict[str, Any]) -> None:
    assert {key for key in compose if not key.startswith("x-")} <= TOP
    for name, service in compose["services"].items():
        assert set(service) <= SERVICE, name
        assert all(needed in compose["services"] for needed in service.get("depends_on", ()))
        volumes = {source for source in mounts(service) if not source.startswith("./")}
        assert volumes <= set(compose["volumes"])


@pytest.mark.parametrize("command", ["docker compose", "docker-compose"])
def test_docker_reads_it(command: str) -> None:
    words = command.split()
    if shutil.which(words[0]) is None or subprocess.run([*words, "version"], capture_output=True).returncode:
        pytest.skip(f"{command} is not here")
    subprocess.run([*words, "-f", str(FOLDER / "compose.yaml"), "config", "--quiet"], check=True)


def test_every_command_has_options_that_there_are(compose: dict[str, Any]) -> None:
    verbs: Any = typer.main.get_command(app)
    for service in compose["services"].values():
        verb, *words = service["command"]
        known = {option for parameter in verbs.get_command(None, verb).params for option in parameter.opts}
        assert {word for word in words if word.startswith("--")} <= known


def test_what_is_mounted_is_there_and_nobody_sees_anothers(compose: dict[str, Any]) -> None:
    for name, service in compose["services"].items():
        sources = [source.removeprefix("./") for source in mounts(service) if source.startswith("./")]
        assert all((FOLDER / source).exists() or source.startswith("certificates") for source in sources)
        if name in NAMES:
            assert {source for source in sources if any(word in source for word in NAMES)} == {
                f"{name}.yaml",
                f"texts/{name}",
                f"certificates/users/{name}.key",
            }
    at_coordinator = mounts(compose["services"]["coordinator"])
    assert not [
        source for source in at_coordinator if source.startswith("./texts") or ("users" in source and ".key" in source)
    ]


def test_every_path_of_a_command_is_mounted(compose: dict[str, Any]) -> None:
    for name in NAMES:
        service = compose["services"][name]
        inside = {path.removeprefix(INSIDE) for path in mounts(service).values()}
        words = service["command"]
        assert {words[1], words[words.index("--certificates") + 1], words[words.index("--key") + 1]} <= inside
        participant = yaml.safe_load((FOLDER / f"{name}.yaml").read_text())
        assert participant["data"] in inside
        assert participant["state"].split("/")[0] in inside


def test_the_files_of_coordinator_and_participants_are_read() -> None:
    assert load_plan(FOLDER / "federation.yaml").users == NAMES
    for name in NAMES:
        participant = load_participant(FOLDER / f"{name}.yaml")
        assert participant.name == name
        assert Path(participant.data).is_dir()


@pytest.mark.filterwarnings("ignore:GitWildMatchPattern:DeprecationWarning")  # flwr's
def test_flower_takes_the_app_and_nobodys_files_travel_with_it() -> None:
    pytest.importorskip("flwr")
    from flwr.cli.build import build_fab_from_disk
    from flwr.cli.config_utils import load_and_validate

    from comingle.federation.flower.client_app import PROJECT

    load_and_validate(FOLDER / "pyproject.toml")
    with zipfile.ZipFile(io.BytesIO(build_fab_from_disk(FOLDER))) as packed:
        assert {name for name in packed.namelist() if not name.startswith(".info")} == {"pyproject.toml"}
    own, shown = tomllib.loads(PROJECT), tomllib.loads((FOLDER / "pyproject.toml").read_text())
    assert own["tool"]["flwr"]["app"]["components"] == shown["tool"]["flwr"]["app"]["components"]
    assert own["tool"]["flwr"]["app"]["config"].keys() == shown["tool"]["flwr"]["app"]["config"].keys()


@pytest.mark.slow
def test_a_federation_of_four_programs_with_certificates(tmp_path: Path) -> None:
    pytest.importorskip("flwr")
    shutil.copytree(FOLDER, tmp_path, dirs_exist_ok=True)

    def start(*arguments: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", "from comingle.cli import main; main()", *arguments]
        settings = {"cwd": tmp_path, "env": environment(), "text": True}
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, **settings)

    made = start("server", "federation.yaml", "--make-certificates", "certificates", "--host", "localhost")
    printed = made.communicate(timeout=120)[0]
    assert made.returncode == 0, printed
    serving = start("server", "federation.yaml", "--out", "run", "--port", "19092", "--certificates", "certificates")
    secure = ["--certificates", "certificates/ca.pem", "--server", "localhost:19092"]
    clients = [start("client", f"{n}.yaml", *secure, "--key", f"certificates/users/{n}.key") for n in NAMES]
    try:
        printed = serving.communicate(timeout=500)[0]
        assert serving.returncode == 0, printed
        assert list(json.loads((tmp_path / "run" / "metrics.json").read_text())["users"]) == list(NAMES)
    finally:
        for client in clients:
            client.terminate()
            client.communicate(timeout=60)
        serving.kill()
