"""Messages between clients and server, and their wire format: the only way in which data leaves a user."""

from __future__ import annotations

from typing import Literal

Format = Literal["float32", "bfloat16", "int8"]
"""Number formats of uploaded tensors. Defined here so that recipes can be read without importing torch."""
