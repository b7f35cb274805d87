"""``comingle bundle``: wheels, base model and recipe in one archive, for a site without internet."""

from __future__ import annotations

import base64
import email
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from io import BufferedIOBase, BytesIO
from pathlib import Path
from typing import TYPE_CHECKING

from comingle.utils.errors import BaseModelError, ComingleError
from comingle.utils.files import SUMS
from comingle.utils.records import DRAFT, JsonObject, to_disk

if TYPE_CHECKING:
    import tarfile

    from packaging.requirements import Requirement

    from comingle.config import Recipe

INSTALLER, README, REQUIREMENTS = "install.sh", "README.md", "requirements.txt"

_CLIENT = "device"
"""The extra with the packages that ``comingle client`` needs beside flwr itself."""

_GPU_PACKAGES = ("nvidia-", "cuda-", "triton")
"""Starts of the names of packages that only a GPU needs."""

_MODIFIED = 1580601600
"""Modification time of all files in an archive, as of files in a wheel, so that equal contents give equal archives."""

_PLATFORM = re.compile(r"(manylinux\d+|manylinux_2_\d+|musllinux_\d+_\d+|linux|macosx_\d+_\d+)_([a-z]\w*)")

_TOKENIZER_FILES = (
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "merges.txt",
    "sentencepiece.bpe.model",
    "special_tokens_map.json",
    "spiece.model",
    "tekken.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
    "vocab.txt",
)
"""Files of tokenizers; nothing else but configuration and weights is copied, as a folder may also hold users' text."""


@dataclass(frozen=True, kw_only=True)
class Bundle:
    """An archive that was written.

    Attributes:
        megabytes: Its size.
        digest: Its SHA-256, in hexadecimal.
        num_wheels: Number of wheels in it.
        num_base_files: Number of files of the base model in it.
        gpu_megabytes: Size of the wheels that only a GPU needs.
        left_out: Lines on what it lacks, such as the data.
    """

    megabytes: float
    digest: str
    num_wheels: int
    num_base_files: int
    gpu_megabytes: float
    left_out: tuple[str, ...]


def write_bundle(
    recipe: Path, out: Path, extras: Sequence[str], platforms: Sequence[str], say: Callable[[str], None]
) -> Bundle:
    """Write an archive with comingle, its packages, the base model and a recipe.

    Args:
        recipe: A recipe, or the federation file of a server.
        out: The archive to write; a file there is replaced.
        extras: Extras of comingle whose packages are included; those for ``comingle client`` if there are none.
        platforms: Platform tags of the wheels; none for this machine.
        say: Prints a line of progress.

    Raises:
        ComingleError: A platform or an extra is unknown, or wheels cannot be had.
        RecipeError: The recipe is missing or wrong.
        BaseModelError: The base model is not found, or lacks files.
    """
    target = Target.of(platforms)
    plan = read_plan(recipe)
    chosen = tuple(dict.fromkeys(extras or [_CLIENT]))
    with _workspace(out) as folder:
        say("building and downloading the wheels")
        wheels = collect_wheels(folder / "wheels", plan, chosen, target)
        pinned = "".join(f"{wheel.name}=={wheel.version}\n" for wheel in wheels)
        contents: dict[str, Path | bytes] = {
            INSTALLER: _fill_template(_INSTALL, target).encode(),
            README: _describe(plan, chosen, target).encode(),
            REQUIREMENTS: pinned.encode(),
            plan.file: plan.text.encode(),
            **plan.base,
            **{f"wheels/{wheel.path.name}": wheel.path for wheel in wheels},
        }
        say(f"writing {out}")
        digest = write_archive(folder / "archive", out.stem, contents)
        gpu_bytes = sum(wheel.path.stat().st_size for wheel in wheels if wheel.name.startswith(_GPU_PACKAGES))
        os.replace(folder / "archive", out)
        to_disk(out.parent)
    return Bundle(
        megabytes=out.stat().st_size / 1e6,
        digest=digest,
        num_wheels=len(wheels),
        num_base_files=len(plan.base),
        gpu_megabytes=gpu_bytes / 1e6,
        left_out=plan.left_out,
    )


# ---------------------------------------------------------------- recipe and base model


@dataclass(frozen=True, kw_only=True)
class BundlePlan:
    """The recipe or federation file of an archive, and the files of its base model.

    Attributes:
        file: Name of the recipe or federation file in the archive.
        text: Its content, without data sources and with the base's path in the archive.
        base: Files of the base model by their name in the archive.
        base_name: The base's path in the archive, or its name if it has no files.
        method: Name of the method.
        left_out: Lines on what the archive lacks.
    """

    file: str
    text: str
    base: Mapping[str, Path]
    base_name: str
    method: str
    left_out: tuple[str, ...]

    @property
    def is_federation(self) -> bool:
        """True if the file is that of a federation's server."""
        return self.file == "federation.yaml"


def read_plan(path: Path) -> BundlePlan:
    """Read a recipe or federation file, and find the files of its base model.

    Raises:
        RecipeError: The file is missing or wrong.
        BaseModelError: The base model is not found, or lacks files.
    """
    import yaml

    from comingle.config import load_recipe
    from comingle.federation.files import load_plan
    from comingle.federation.participant import read_mapping

    content = read_mapping(path)
    is_federation = "participants" in content
    recipe = load_plan(path).recipe if is_federation else load_recipe(path)
    base, base_name, left_out = _find_base(recipe)
    content = {"base": base_name, **content, **({"base": base_name} if base else {})}
    left_out += [*_remove_sources(content, recipe), *_name_plugins(recipe)]
    header = "".join(f"# Left out of the archive: {line}\n" for line in left_out)
    return BundlePlan(
        file="federation.yaml" if is_federation else "recipe.yaml",
        text=header + yaml.safe_dump(content, sort_keys=False, allow_unicode=True),
        base=base,
        base_name=base_name,
        method=recipe.method.name,
        left_out=tuple(left_out),
    )


def _remove_sources(content: JsonObject, recipe: Recipe) -> list[str]:
    """Remove the data sources and the earlier run from the content of a recipe; return a line on each.

    Args:
        content: The content, which is changed.
        recipe: Settings of the run.
    """
    lines = []
    data = content.get("data")
    if isinstance(data, Mapping):
        sources = {"users", "dataset", *recipe.data.resolve_paths(lambda source: source)}
        for key in sorted(sources & data.keys()):
            count = f" ({len(data[key])} users)" if key == "users" else ""
            lines.append(f"data.{key}{count}: an archive has no data; add sources at the site")
        content["data"] = {"kind": recipe.data.kind} | {key: data[key] for key in data if key not in sources}
    if content.pop("continue_from", None) is not None:
        lines.append("continue_from: an archive has no run of users; give --continue-from at the site")
    return lines


def _name_plugins(recipe: Recipe) -> list[str]:
    """Return a line for each part of a recipe that is not comingle's own: its method, and its kind of data."""
    from comingle.methods.user_files import file_of
    from comingle.utils.registry import find_plugins

    lines = []
    for key, group, name in (
        ("method", "comingle.methods", recipe.method.name),
        ("data.kind", "comingle.kinds", recipe.data.kind),
    ):
        plugin = find_plugins(group).get(name)
        if plugin is not None:
            lines.append(f"{key} {name}: install {plugin.distributions} at the site")
        elif key == "method" and (file := file_of(name)) is not None:
            lines.append(f"{key} {name}: copy {file.name} to the site, and give it with --plugin")
    return lines


def _find_base(recipe: Recipe) -> tuple[dict[str, Path], str, list[str]]:
    """Find the files of a recipe's base model.

    Returns:
        The files by name in the archive, the value of ``base`` in the archive, and a line on files that are left out.

    Raises:
        BaseModelError: The base is not found, lacks files, or is no plain causal language model.
    """
    from comingle.models.loading import find_files
    from comingle.models.random_bases import RANDOM_BASE_PREFIX
    from comingle.training.kinds.base import kind_of

    if not kind_of(recipe).needs_base or recipe.base.startswith(RANDOM_BASE_PREFIX):
        return {}, recipe.base, []
    source = find_files(recipe.base).path
    if source.is_file():
        with source.open("rb") as file:
            if file.read(4) != b"GGUF":
                raise BaseModelError(f"base model {source}: not a GGUF file")
        name = f"base/{source.name}"
        return {name: source}, name, []
    files = _files_of_folder(source)
    others = len(list(source.iterdir())) - len(files)
    lines = [f"base: {others} other files of its folder, which are not files of a model"] if others else []
    return {f"base/{path.name}": path for path in files}, "base", lines


def _files_of_folder(folder: Path) -> list[Path]:
    """Return the configuration, weights and tokenizer in a folder.

    Raises:
        BaseModelError: The configuration or weights are missing, or the model is no plain causal language model.
    """
    from comingle.models.folders import check_config, read_json, weight_files

    check_config(folder, read_json(folder / "config.json"))
    weights = weight_files(folder)
    for path in weights:
        if not path.is_file():
            raise BaseModelError(f"base model {folder}: no {path.name}; copy the folder again")
    optional = ("generation_config.json", "model.safetensors.index.json", *_TOKENIZER_FILES)
    return [folder / "config.json", *weights, *(folder / name for name in optional if (folder / name).is_file())]


# ---------------------------------------------------------------- wheels


@dataclass(frozen=True, kw_only=True)
class Target:
    """The machine for which wheels are collected; it has the Python version of this one.

    Attributes:
        tags: Platform tags for pip; empty for this machine.
        system: ``platform.system()`` there.
        machine: ``platform.machine()`` there.
    """

    tags: tuple[str, ...]
    system: str
    machine: str

    @classmethod
    def of(cls, platforms: Sequence[str]) -> Target:
        """Return the target of ``--platform``, with the older tags whose wheels also run there.

        Raises:
            ComingleError: A tag is not one of Linux or macOS, or tags are of different machines.
        """
        if not platforms:
            return cls(tags=(), system=platform.system(), machine=platform.machine())
        tags: list[str] = []
        machines = set()
        for text in platforms:
            match = _PLATFORM.fullmatch(text)
            if match is None:
                raise ComingleError(
                    f"--platform: got {text!r}; allowed: a tag of Linux or macOS, such as manylinux_2_28_aarch64 or "
                    "macosx_14_0_arm64"
                )
            kind, machine = match.groups()
            machines.add(("Darwin" if kind.startswith("macosx") else "Linux", machine))
            tags += [f"{older}_{machine}" for older in _older_tags(kind)]
        if len(machines) > 1:
            raise ComingleError(f"--platform: got {', '.join(platforms)}; allowed: tags of one machine")
        ((system, machine),) = machines
        return cls(tags=tuple(dict.fromkeys(tags)), system=system, machine=machine)

    def marker_environment(self) -> dict[str, str]:
        """Return the values of a requirement's environment markers on the target."""
        from packaging.markers import default_environment

        environment: dict[str, str] = {**default_environment()}  # type: ignore[dict-item]
        environment.update(platform_system=self.system, platform_machine=self.machine)
        environment.update(sys_platform="darwin" if self.system == "Darwin" else "linux")
        return environment if self.tags else {**default_environment()}  # type: ignore[dict-item]


def _older_tags(kind: str) -> list[str]:
    """Return a platform tag without its machine, and those of older glibc: ``manylinux_2_18`` runs ``manylinux2014``.

    Tags of other kinds are returned alone.
    """
    glibc = {"manylinux2014": 17}.get(kind)
    if match := re.fullmatch(r"manylinux_2_(\d+)", kind):
        glibc = int(match[1])
    if glibc is None or glibc < 17:
        return [kind]
    return [*(f"manylinux_2_{minor}" for minor in range(glibc, 16, -1)), "manylinux2014"]


@dataclass(frozen=True, kw_only=True)
class Wheel:
    """A wheel and the part of its metadata that decides on further ones."""

    path: Path
    name: str
    version: str
    requires: tuple[str, ...]
    extras: tuple[str, ...]


def read_wheel(path: Path) -> Wheel:
    """Read the metadata of a wheel."""
    from packaging.utils import canonicalize_name

    with zipfile.ZipFile(path) as archive:
        (name,) = (name for name in archive.namelist() if re.fullmatch(r"[^/]+\.dist-info/METADATA", name))
        metadata = email.message_from_bytes(archive.read(name))
    return Wheel(
        path=path,
        name=canonicalize_name(str(metadata["Name"])),
        version=str(metadata["Version"]),
        requires=tuple(map(str, metadata.get_all("Requires-Dist", []))),
        extras=tuple(map(str, metadata.get_all("Provides-Extra", []))),
    )


def collect_wheels(folder: Path, plan: BundlePlan, extras: Sequence[str], target: Target) -> list[Wheel]:
    """Collect the Python packages (wheels) with which comingle runs on a machine without internet, sorted by name.

    comingle's own wheel is built, those of all packages that it needs are downloaded. pip evaluates markers such as
    ``platform_machine == "x86_64"`` for this machine. For another one PyTorch, whose markers ask for GPU libraries, is
    downloaded alone, and the requirements of all wheels are followed here.

    Args:
        folder: New folder for the wheels.
        plan: The recipe or federation that is to run.
        extras: Extras of comingle, such as "flower".
        target: The machine on which it is to run.

    Raises:
        ComingleError: comingle has no such extra, or pip fails.
    """
    folder.mkdir()
    own = read_wheel(build_wheel(folder))
    requirements, alone = choose_requirements(own, plan, extras, target)
    if target.tags:
        alone += [requirement for requirement in requirements if requirement.name == "torch"]
    options = ["--only-binary=:all:", f"--dest={folder}", *(f"--platform={tag}" for tag in target.tags)]
    constraints = _source_tree() / "constraints.txt"
    if constraints.is_file():
        options.append(f"--constraint={constraints}")
    if alone:
        _pip("download", *options, "--no-deps", *map(str, alone))
    flower = {requirement.name for requirement in alone} - {"torch"}  # not all that it requires is needed
    if flower:
        limits = folder.parent / "limits.txt"  # of those that are needed, the versions that it works with
        limits.write_text(_limit_versions(_read_wheels(folder)["flwr"], target), encoding="utf-8")
        options.append(f"--constraint={limits}")
    while True:
        wheels = {own.name: own} | _read_wheels(folder)
        needed, missing = follow_requirements(requirements, wheels, target, without_dependencies=flower)
        if not missing:
            return [wheels[name] for name in sorted({own.name, *needed, *flower})]
        _pip("download", *options, *missing)


def _limit_versions(wheel: Wheel, target: Target) -> str:
    """Return the versions that a wheel requires of other packages, as constraints for pip."""
    from packaging.requirements import Requirement

    environment = {**target.marker_environment(), "extra": ""}
    requirements = list(map(Requirement, wheel.requires))
    applying = [found for found in requirements if found.marker is None or found.marker.evaluate(environment)]
    return "".join(f"{requirement.name}{requirement.specifier}\n" for requirement in applying)


def choose_requirements(
    own: Wheel, plan: BundlePlan, extras: Sequence[str], target: Target
) -> tuple[list[Requirement], list[Requirement]]:
    """Return what comingle needs for a plan: requirements with their dependencies, and requirements without.

    Flower is among the latter if only ``comingle client`` is used, which then does without scipy, too.

    Args:
        own: Wheel of comingle itself.
        plan: The recipe or federation file, and its base model.
        extras: Extras of comingle whose packages are included.
        target: The machine at the site.

    Raises:
        ComingleError: comingle has no such extra.
    """
    from packaging.requirements import Requirement

    for extra in extras:
        if extra not in own.extras:
            raise ComingleError(f"--extra: got {extra!r}; allowed: {', '.join(own.extras)}")
    environment = target.marker_environment()
    needed, flower = [], []
    for requirement in map(Requirement, own.requires):
        marker = requirement.marker
        of_extra = {extra for extra in own.extras if marker and marker.evaluate({**environment, "extra": extra})}
        is_always = marker is None or marker.evaluate({**environment, "extra": ""})
        is_reader = requirement.name == "gguf" and plan.base_name.endswith(".gguf")
        requirement.marker = None
        if is_always or is_reader or of_extra & set(extras):
            needed.append(requirement)
        elif requirement.name == "flwr" and _CLIENT in extras:
            flower.append(requirement)
    only_client = plan.is_federation and list(extras) == [_CLIENT]
    if only_client and plan.method != "fdlora":  # the only method with which a client uses scipy
        needed = [requirement for requirement in needed if requirement.name != "scipy"]
    return needed, flower


def follow_requirements(
    requirements: Sequence[Requirement],
    wheels: Mapping[str, Wheel],
    target: Target,
    *,
    without_dependencies: set[str],
) -> tuple[set[str], list[str]]:
    """Return the names of the wheels that requirements lead to on the target, and requirements that no wheel meets.

    Args:
        requirements: Where to start.
        wheels: The wheels by name.
        target: The machine on which markers are evaluated.
        without_dependencies: Names of wheels whose requirements are ignored.
    """
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    environment = target.marker_environment()
    seen: set[tuple[str, str]] = set()
    missing: list[str] = []
    left = list(requirements)
    while left:
        requirement = left.pop()
        name = canonicalize_name(requirement.name)
        if name not in wheels:
            requirement.marker = None
            missing.append(str(requirement))
            continue
        for extra in ("", *requirement.extras):
            if (name, extra) in seen or name in without_dependencies:
                continue
            seen.add((name, extra))
            for further in map(Requirement, wheels[name].requires):
                if further.marker is None or further.marker.evaluate({**environment, "extra": extra}):
                    left.append(further)
    return {name for name, _ in seen}, sorted(set(missing))


def _read_wheels(folder: Path) -> dict[str, Wheel]:
    """Return the wheels in a folder by name.

    Raises:
        ComingleError: There are two versions of a package.
    """
    wheels: dict[str, Wheel] = {}
    for path in sorted(folder.glob("*.whl")):
        wheel = read_wheel(path)
        if wheel.name in wheels:
            versions = f"{wheels[wheel.name].version} and {wheel.version}"
            raise ComingleError(
                f"bundle: {wheel.name}: packages need {versions}; allowed: one version; pin it with PIP_CONSTRAINT"
            )
        wheels[wheel.name] = wheel
    return wheels


def _pip(*arguments: str) -> None:
    """Run pip with its usual settings.

    Raises:
        ComingleError: pip is not installed, or fails; the message has its first line of error.
    """
    if find_spec("pip") is None:
        raise ComingleError("bundle: pip is not installed in this environment; `python -m ensurepip` installs it")
    command = [sys.executable, "-m", "pip", arguments[0], "--quiet", "--disable-pip-version-check", *arguments[1:]]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")]
        told = [line for line in errors if not line.startswith("ResolutionImpossible")] or lines
        reason = told[-1].rstrip(".")  # such as "No matching distribution found for torch>=2.6"
        hint = "; give also a newer --platform, such as manylinux_2_28_aarch64" if "--platform" in str(command) else ""
        raise ComingleError(f"bundle: pip {arguments[0]}: {reason}{hint}")


def _source_tree() -> Path:
    """Return the folder with ``pyproject.toml`` if comingle runs from a checkout; otherwise a folder without it."""
    return Path(__file__).parents[3]


def build_wheel(folder: Path) -> Path:
    """Write comingle's own wheel to a folder: built from the checkout, or from the files that a wheel has installed.

    Raises:
        ComingleError: comingle was installed in another way, or its files have changed since.
    """
    tree = _source_tree()
    if (tree / "pyproject.toml").is_file() and (tree / "src" / "comingle").is_dir():
        _pip("wheel", "--no-deps", f"--wheel-dir={folder}", str(tree))
    else:
        _repack_wheel(folder)
    (wheel,) = folder.glob("comingle-*.whl")
    return wheel


def _repack_wheel(folder: Path) -> None:
    """Write comingle's wheel from its installed files, with ``RECORD`` as a list of them.

    Raises:
        ComingleError: There is no such list, a file is missing, or a file has changed since it was installed.
    """
    import hashlib
    from importlib.metadata import PackageNotFoundError, distribution

    other = "run bundle from a checkout, or from an environment in which pip has installed comingle's wheel"
    try:
        package = distribution("comingle")
    except PackageNotFoundError:
        raise ComingleError(f"bundle: comingle is not an installed package; {other}") from None
    files = {path.as_posix(): path for path in package.files or () if path.hash is not None}
    if "comingle/__init__.py" not in files:
        raise ComingleError(f"bundle: comingle has no list of its installed files (RECORD); {other}")
    names = [name for name in sorted(files) if not name.startswith("..") and not name.endswith(".pyc")]
    names = [name for name in names if Path(name).name not in ("INSTALLER", "REQUESTED", "direct_url.json")]
    (info,) = {Path(name).parent.as_posix() for name in names if name.endswith(".dist-info/METADATA")}
    record = ""
    with zipfile.ZipFile(folder / f"{info.removesuffix('.dist-info')}-py3-none-any.whl", "x") as wheel:
        for name in names:
            try:
                content = Path(str(files[name].locate())).read_bytes()
            except OSError as error:
                raise ComingleError(f"bundle: {name}: {error.strerror}; {other}") from None
            digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
            recorded = files[name].hash
            if recorded is not None and recorded.mode == "sha256" and recorded.value != digest:
                raise ComingleError(f"bundle: {name}: has changed since comingle was installed; {other}")
            record += f"{name},sha256={digest},{len(content)}\n"
            wheel.writestr(_zip_entry(name), content)
        wheel.writestr(_zip_entry(f"{info}/RECORD"), f"{record}{info}/RECORD,,\n")


def _zip_entry(name: str) -> zipfile.ZipInfo:
    """Return the entry of a compressed file in a wheel, with a fixed time."""
    entry = zipfile.ZipInfo(name, date_time=(2020, 2, 2, 0, 0, 0))
    entry.compress_type = zipfile.ZIP_DEFLATED
    entry.external_attr = 0o644 << 16
    return entry


# ---------------------------------------------------------------- the archive


class _HashedFile:
    """A file whose bytes are added to a SHA-256 digest as they are read or written."""

    def __init__(self, file: BufferedIOBase):
        """Wrap an open file and start with an empty digest."""
        import hashlib  # slow to import

        self._file, self.digest = file, hashlib.sha256()

    def read(self, size: int = -1) -> bytes:
        """Read bytes and add them to the digest."""
        data = self._file.read(size)
        self.digest.update(data)
        return data

    def write(self, data: bytes) -> int:
        """Write bytes and add them to the digest."""
        self.digest.update(data)
        return self._file.write(data)


@contextmanager
def _workspace(out: Path) -> Iterator[Path]:
    """Create a folder beside an archive for its wheels and its draft; delete it at the end, also after SIGTERM.

    Folders of processes that were killed are deleted, too.
    """
    import glob

    import psutil

    for old in out.parent.glob(f".{glob.escape(out.name)}.*{DRAFT}"):
        process = old.name.removesuffix(DRAFT).rpartition(".")[2]
        if process.isdigit() and not psutil.pid_exists(int(process)):
            shutil.rmtree(old, ignore_errors=True)

    def stop(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    folder = out.with_name(f".{out.name}.{os.getpid()}{DRAFT}")
    previous = signal.signal(signal.SIGTERM, stop)
    try:
        folder.mkdir()
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        signal.signal(signal.SIGTERM, previous)


def write_archive(path: Path, folder: str, contents: Mapping[str, Path | bytes]) -> str:
    """Write files and ``SHA256SUMS``, their digests as they were written, to a tar archive; return its own SHA-256.

    Names are sorted, and owners, times and modes are the same on each machine.

    Args:
        path: The new archive, which is flushed to the disk.
        folder: Folder in the archive that holds all files.
        contents: Files or bytes by name in that folder.

    Raises:
        ComingleError: A file changes while it is read.
    """
    import tarfile

    sums = ""
    with path.open("xb") as file:
        whole = _HashedFile(file)
        with tarfile.open(fileobj=whole, mode="w|", format=tarfile.PAX_FORMAT) as archive:  # type: ignore[call-overload]
            for name in sorted(contents):
                digest = _add(archive, f"{folder}/{name}", contents[name])
                sums += f"{digest}  {name}\n"
            _add(archive, f"{folder}/{SUMS}", sums.encode())
        file.flush()
        os.fsync(file.fileno())
    return whole.digest.hexdigest()


def _add(archive: tarfile.TarFile, name: str, content: Path | bytes) -> str:
    """Add a file to an archive and return its SHA-256 in hexadecimal.

    Args:
        archive: The archive.
        name: Name of the file in it.
        content: The file, or its bytes.

    Raises:
        ComingleError: The file becomes shorter while it is read.
    """
    import tarfile

    entry = tarfile.TarInfo(name)
    entry.mtime, entry.mode = _MODIFIED, 0o755 if name.endswith(".sh") else 0o644
    with BytesIO(content) if isinstance(content, bytes) else content.open("rb") as file:
        entry.size = file.seek(0, os.SEEK_END)
        file.seek(0)
        source = _HashedFile(file)
        try:
            archive.addfile(entry, source)  # type: ignore[arg-type]
        except OSError as error:
            if error.errno is not None:  # of the disk
                raise
            raise ComingleError(f"{content}: changes while it is read; try again when it is complete") from None
    return source.digest.hexdigest()


def _describe(plan: BundlePlan, extras: Sequence[str], target: Target) -> str:
    """Return the text of the archive's README."""
    has_server = "flower" in extras
    commands = []
    if plan.is_federation:
        if has_server:
            commands.append(f"venv/bin/comingle server {plan.file}")
        base = f" --base {plan.base_name}" if plan.base else ""
        commands.append(f"venv/bin/comingle client --name NAME --data FOLDER{base} --server HOST:PORT")
    else:
        commands.append(f"venv/bin/comingle {'federate' if has_server else 'run'} {plan.file}")
    text = _fill_template(_README, target).replace("@FILE@", plan.file)
    text = text.replace("@COMMANDS@", "".join(f"    {command}\n" for command in commands).rstrip())
    left_out = "".join(f"- {line}\n" for line in plan.left_out)
    return text + (f"\nLeft out of the archive:\n\n{left_out}" if left_out else "")


def _fill_template(text: str, target: Target) -> str:
    """Return a text with the version of Python and the target's system and machine in place of their marks."""
    values = {"PYTHON": f"{sys.version_info[0]}.{sys.version_info[1]}", "SYSTEM": target.system, "ARCH": target.machine}
    for mark, value in values.items():
        text = text.replace(f"@{mark}@", value)
    return text


_README = """\
# comingle for a site without internet

For @SYSTEM@ on @ARCH@ with Python @PYTHON@. Nothing here uses the network except to reach the federation's server.

    sh install.sh

verifies all files against SHA256SUMS, makes the virtual environment `venv` and installs the packages in `wheels`.
`sh install.sh FOLDER` makes it elsewhere; `PYTHON=/path/to/python3 sh install.sh` uses another Python. Then:

    export HF_HUB_OFFLINE=1
@COMMANDS@

`@FILE@` names the base model by its path in this folder. Edit it after the installation, as its digest is verified.
"""


_INSTALL = """\
#!/bin/sh
# Verify the digests of all files, make a virtual environment and install the wheels. No network is used.
#
#     sh install.sh [FOLDER]       FOLDER: the environment (default: venv beside this file)
#     PYTHON=FILE sh install.sh    use this Python @PYTHON@
set -eu
stop() { echo "install.sh: $1" >&2; exit 2; }

here=$(CDPATH= cd -- "$(dirname -- "$0")" && pwd)
venv=${1:-$here/venv}
case $venv in /*) ;; *) venv=$PWD/$venv ;; esac
python=${PYTHON:-$(command -v python@PYTHON@ || command -v python3 || echo python@PYTHON@)}
command -v "$python" >/dev/null || stop "$python: not found; set PYTHON to a Python @PYTHON@"
[ ! -e "$venv" ] || stop "$venv: exists; remove it, or give another folder"
cd "$here"

"$python" -I - <<'END' || exit 2
import hashlib, pathlib, platform, sys

def stop(line):
    print(f"install.sh: {line}", file=sys.stderr)
    sys.exit(2)

version = ".".join(map(str, sys.version_info[:2]))
if version != "@PYTHON@":
    stop(f"{sys.executable}: got Python {version}; allowed: @PYTHON@, for which the wheels are; set PYTHON")
if (platform.system(), platform.machine()) != ("@SYSTEM@", "@ARCH@"):
    stop(f"this machine: got {platform.system()} {platform.machine()}; allowed: @SYSTEM@ @ARCH@")
again = "copy and unpack the archive again"
try:
    lines = pathlib.Path("SHA256SUMS").read_text("utf-8", "replace").splitlines()
except OSError as error:
    stop(f"SHA256SUMS: {error.strerror}; {again}")
listed = set()
for line in lines:
    digest, _, name = line.partition("  ")
    listed.add(name)
    try:
        with open(name, "rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
    except (OSError, ValueError) as error:
        stop(f"{name!a}: {getattr(error, 'strerror', None) or error}; {again}")
    if found != digest:
        stop(f"{name}: got SHA-256 {found[:16]}...; allowed: {digest[:16]}... of SHA256SUMS; {again}")
present = ["install.sh", "requirements.txt"]
present += [path.as_posix() for folder in ("base", "wheels") for path in pathlib.Path(folder).rglob("*")]
for name in present:
    if name not in listed:
        stop(f"{name!a}: not in SHA256SUMS; {again}")
END

trap 'rm -rf "$venv"' EXIT
trap 'exit 130' INT TERM
"$python" -m venv "$venv" || stop "$python -m venv failed; install the package of your system with venv and ensurepip"
PIP_CONFIG_FILE=/dev/null "$venv/bin/python" -I -m pip --isolated --disable-pip-version-check install --quiet \\
    --no-index --no-deps --find-links wheels --requirement requirements.txt || stop "pip failed; see above"
trap - EXIT
echo "$("$venv/bin/comingle" --version) is installed: $venv/bin/comingle"
"""
