"""One process of a run of several, each on a GPU of its own; or pretended ones, which speak through gloo."""

from __future__ import annotations

import json
import os
import sys
import warnings
from contextlib import nullcontext
from pathlib import Path

import torch
from pretend import pretending

import comingle


def main() -> None:
    recipe, out, pretends = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")), sys.argv[2], sys.argv[3] == "yes"
    warnings.simplefilter("error")
    with pretending(int(os.environ["WORLD_SIZE"])) if pretends else nullcontext():
        comingle.run(recipe, out=out)
        if recipe["runtime"]["device"] == "cuda" and not pretends:
            assert torch.cuda.current_device() == int(os.environ["LOCAL_RANK"])
            assert torch.cuda.max_memory_allocated() > 0


if __name__ == "__main__":
    main()
