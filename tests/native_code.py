"""Fixtures for tests of native code: compiled once for all processes and runs, with equal draws on one thread.

Code for 64-bit ARM runs in an emulator.
"""

from __future__ import annotations

import ctypes
import shutil
import struct
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from filelock import FileLock
from torch import Tensor

from comingle.models.kernels import convolutions, cpu, expert_mlp
from comingle.utils.files import cache_folder

AARCH64 = "aarch64"
PROCESSORS = ["native", pytest.param(AARCH64, marks=pytest.mark.slow)]
"""Parameters of fixtures: the native code for this machine, or for 64-bit ARM."""
CROSS_COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"
SYSTEM = Path("/usr/aarch64-linux-gnu")
"""Where Debian has the libraries of 64-bit ARM."""
CALLER = Path(__file__).parent / "models" / "kernels" / "caller.cpp"


@pytest.fixture(autouse=True)
def seeded_on_one_thread() -> Iterator[None]:
    """Equal draws in every run; one thread, fastest for tiny tensors."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield
    torch.set_num_threads(threads)


def compile_once(library: str, enable: Callable[[Path], bool]) -> Path:
    """Return the folder of native libraries in the user's cache, after ``enable`` has compiled one in it if need be."""
    cache = cache_folder() / "native"
    cache.mkdir(mode=0o700, parents=True, exist_ok=True)
    with FileLock(cache / f"{library}.lock"):  # the second process finds what the first has compiled
        if not enable(cache):
            pytest.skip("no C++ compiler that makes the native code")
    return cache


def cross_compile(source: Path, target: Path, *options: str) -> Path:
    """Compile for 64-bit ARM without extensions, with the options of comingle and these; skip without a compiler."""
    if shutil.which(CROSS_COMPILER) is None:
        pytest.skip(f"{CROSS_COMPILER}: no such compiler; apt-get install g++-aarch64-linux-gnu")
    flags = ["-march=armv8-a" if flag == "-march=native" else flag for flag in expert_mlp.FLAGS]
    command = [CROSS_COMPILER, *flags, *options, str(source), "-o", str(target)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return target


@pytest.fixture(scope="session")
def emulated(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., EmulatedLibrary]:
    """A function as ``load_library`` that returns the library for 64-bit ARM."""
    folder = tmp_path_factory.mktemp(AARCH64)
    if shutil.which(EMULATOR) is None or not SYSTEM.is_dir():
        pytest.skip(f"{EMULATOR}: no such emulator; apt-get install qemu-user g++-aarch64-linux-gnu")
    caller = cross_compile(CALLER, folder / "caller", "-fPIE", "-pie", "-ldl")

    def load(cache: Path, name: str, sources: Sequence[Path]) -> EmulatedLibrary:
        library = folder / f"{name}.so"
        return EmulatedLibrary(caller, library if library.is_file() else cross_compile(sources[0], library))

    return load


@pytest.fixture(params=PROCESSORS)
def processor(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The processor for which the next ``enable`` of each module of kernels loads its library."""
    if request.param == AARCH64:
        use_emulated(request.getfixturevalue("emulated"), monkeypatch)
    return request.param


def use_emulated(load: Callable[..., EmulatedLibrary], monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the next ``enable`` of each module of kernels load its library for 64-bit ARM."""
    for module in (expert_mlp, cpu, convolutions):
        monkeypatch.setattr(module, "load_library", load)
        monkeypatch.setattr(module, "_library", None)
    monkeypatch.setattr(expert_mlp, "_loaded", None)
    EmulatedLibrary.memory.clear()
    data_ptr = Tensor.data_ptr

    def recorded(tensor: Tensor) -> int:
        if address := data_ptr(tensor):
            EmulatedLibrary.memory[address] = tensor.untyped_storage()
        return address

    monkeypatch.setattr(Tensor, "data_ptr", recorded)


class EmulatedLibrary:
    """A native library for another processor; each call is a process in an emulator, which gets and returns memory."""

    memory: dict[int, torch.UntypedStorage] = {}  # noqa: RUF012 (of all libraries)
    """Memory behind each address that the test has asked for; a struct may keep addresses for later calls."""

    def __init__(self, caller: Path, library: Path) -> None:
        # A processor without any extension, such as that of a Raspberry Pi 4.
        self._command = [EMULATOR, "-cpu", "cortex-a72", "-L", str(SYSTEM), str(caller), str(library)]

    def __getattr__(self, name: str) -> EmulatedFunction:
        function = EmulatedFunction([*self._command, name])
        setattr(self, name, function)
        return function


class EmulatedFunction:
    """A function of such a library, with the result types of ctypes."""

    def __init__(self, command: Sequence[str]) -> None:
        self.restype: Any = ctypes.c_int
        self.argtypes: Any = None
        self._command = command

    def __call__(self, reference: Any) -> Any:
        argument, memory = reference._obj, EmulatedLibrary.memory
        content = bytes(argument)
        given = {at: struct.unpack_from("q", content, at)[0] for at in pointers_of(type(argument))}
        given = {at: address for at, address in given.items() if address}
        blocks = {(storage := memory[address]).data_ptr(): storage.nbytes() for address in given.values()}
        firsts, sizes, pointers = list(blocks), list(blocks.values()), []
        for at, address in given.items():
            first = memory[address].data_ptr()
            pointers += [at, firsts.index(first), address - first]
        header = [len(content), len(blocks), len(given), *sizes, *pointers]
        request = b"".join([struct.pack(f"{len(header)}q", *header), content, *map(ctypes.string_at, firsts, sizes)])
        done = subprocess.run(self._command, input=request, capture_output=True)
        assert done.returncode == 0, done.stderr
        (result,) = struct.unpack_from("q", done.stdout)
        at = struct.calcsize("q")
        for first, size in zip(firsts, sizes, strict=True):
            ctypes.memmove(first, done.stdout[at : at + size], size)
            at += size
        assert at == len(done.stdout)
        if self.restype is ctypes.c_bool:
            return bool(result & 0xFF)  # the other bits of the register mean nothing
        return None if self.restype is None else self.restype(result).value


def pointers_of(kind: Any, offset: int = 0) -> Iterator[int]:
    """Offsets of all pointers in a struct, and in the structs and arrays in it."""
    for name, field, *_ in kind._fields_:
        is_array = issubclass(field, ctypes.Array)
        item, count = (field._type_, field._length_) if is_array else (field, 1)
        for number in range(count):
            at = offset + getattr(kind, name).offset + number * ctypes.sizeof(item)
            if item is ctypes.c_void_p:
                yield at
            elif issubclass(item, ctypes.Structure):
                yield from pointers_of(item, at)
