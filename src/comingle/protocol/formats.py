"""How numbers travel."""

from __future__ import annotations

from typing import Literal

Format = Literal["float32", "bfloat16", "int8"]
"""Of the tensors that users send."""
