"""The sources of native code for 64-bit ARM: they compile, and their vectors are those of the processor (NEON).

The fixture ``processor`` runs the other unit tests of native code with what is compiled.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from tests.native_code import CROSS_COMPILER, cross_compile

from comingle.models.kernels import convolutions, cpu, expert_mlp

SOURCES = {"mixture": expert_mlp.SOURCES, "cpu": cpu.SOURCES, "layers": convolutions.SOURCES}


@pytest.mark.slow
@pytest.mark.parametrize("name", SOURCES)
def test_all_sources_compile_to_vector_instructions(name: str, tmp_path: Path) -> None:
    library = cross_compile(SOURCES[name][0], tmp_path / f"{name}.so", "-Wall", "-Wextra", "-Werror")
    disassembler = shutil.which(CROSS_COMPILER.replace("g++", "objdump"))
    assert disassembler is not None  # it comes with the compiler
    code = subprocess.run([disassembler, "-d", library], capture_output=True, text=True, check=True).stdout
    assert code.count("fmla\tv") > 100  # multiplies and adds four floats, or two doubles
