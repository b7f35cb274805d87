"""Messages between clients and server, and their wire format: the only way in which anything leaves a user."""

from __future__ import annotations

from typing import Literal

Format = Literal["float32", "bfloat16", "int8"]
"""Number formats of uploaded tensors. Defined here so that recipes are read without importing torch."""
