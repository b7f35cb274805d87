"""Memory, perplexity and time with 8-bit or 4-bit base weights and with gradient checkpointing.

    python benchmarks/small_gpu.py --base smollm2-135m --text FILE [--tokens 2048] [--batch 4] [--dtype float32]

Prints one JSON line per number of bits: megabytes of all weights; perplexity of the untrained base on the first tokens
of the file, in windows of 128; and for one step of one user of ``comigs-1g1s`` on the CPU, with and without
checkpointing, the peak megabytes beside weights and adapters and the seconds of processor time (median of three steps
after one to warm up).
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from pathlib import Path
from typing import Any

import comingle  # noqa: F401 (before torch, which reads GOMP_SPINCOUNT)

# isort: split
import torch

from comingle.config.settings import AdaptersSection, RuntimeSection, TrainingSection
from comingle.cost.memory import LiveBytes
from comingle.data.text.streams import UserData
from comingle.methods import make
from comingle.models.adapted import adapt
from comingle.models.base import Base
from comingle.models.injection import ExpertCounts
from comingle.models.loading import load_base
from comingle.training.client import Clients, batch_size, train
from comingle.training.kinds.text import TextBatchSource
from comingle.training.settings import RunPlan

WINDOW = 128


def perplexity(base: Base, tokens: torch.Tensor) -> float:
    """Return the perplexity over separate windows, without the first token of each."""
    windows, losses = tokens[: len(tokens) // WINDOW * WINDOW].view(-1, WINDOW), []
    with torch.no_grad():
        for batch in windows.split(4):
            logits = base.model(input_ids=batch.to(base.device)).logits[:, :-1].float()
            losses.append(
                torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten().to(base.device))
            )
    return math.exp(statistics.fmean(float(loss) for loss in losses))


def measure_step(base: Base, tokens: torch.Tensor, batch: int, *, checkpointed: bool) -> dict[str, Any]:
    """Return the peak megabytes and the median seconds of one user's step.

    Args:
        base: The base model.
        tokens: Tokens of the user.
        batch: Sequences per step.
        checkpointed: Whether gradients are checkpointed.
    """
    method = make("comigs-1g1s")
    counts = ExpertCounts(generalists=1, specialists=(1,))
    model = adapt(base, AdaptersSection(), counts, routed=True, compiled=False, checkpointed=checkpointed)
    user = UserData(name="one", train=tokens.int(), valid=tokens.int(), test=tokens.int())
    plan = RunPlan(
        method=method,
        training=TrainingSection(rounds=9, local_steps=1, batch_size=batch, context=WINDOW),
        runtime=RuntimeSection(micro_batch=batch),
    )
    batch_source = TextBatchSource([user], plan, batch_size(plan, 1))
    clients = Clients(model, plan, trainers=[user], users=[user], batch_source=batch_source)
    with LiveBytes() as live:
        train(clients, [0], 0)
    times = []
    for number in range(1, 4):
        began = time.process_time()
        train(clients, [0], number)
        times.append(time.process_time() - began)
    return {"pass_mb": round(live.peak / 1e6, 1), "step_s": round(statistics.median(times), 3)}


def main() -> None:
    """Measure each number of bits and print a line of JSON for it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", default="smollm2-135m")
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--dtype", default="float32")
    args = parser.parse_args()
    torch.set_num_threads(1)
    all_bits: tuple[Any, ...] = ("none", "8bit", "4bit")
    for bits in all_bits:
        base = load_base(args.base, dtype=args.dtype, device="cpu", quantise=bits)
        assert base.tokenizer is not None
        ids = base.tokenizer(args.text.read_text(encoding="utf-8"), add_special_tokens=False)["input_ids"]
        tokens = torch.tensor(ids[: args.tokens], dtype=torch.int64)
        weight_bytes = {id(t): t.nbytes for t in (*base.model.parameters(), *base.model.buffers())}
        line = {
            "base": base.name,
            "quantise": bits,
            "dtype": args.dtype,
            "weights_mb": round(sum(weight_bytes.values()) / 1e6, 1),
        }
        line["perplexity"] = round(perplexity(base, tokens), 3)
        for checkpointed in (False, True):
            measured = measure_step(base, tokens, args.batch, checkpointed=checkpointed)
            line |= {f"{key}_checkpointed" if checkpointed else key: value for key, value in measured.items()}
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
