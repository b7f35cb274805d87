"""CoMiGS-1G1S against FedAvg: what Table 3 of the paper says, the same way of counting on another model, and the whole.

Table 3 is for GPT2-124M in bfloat16, 128 tokens. Its figures are those of the routers (18,432 entries: 4.7 MFLOPs,
0.035 MiB) and of one expert's LoRA on the MLPs (737,280 entries: 1.41 MiB); its percentages are shares of the LoRA of
two such experts. So its MB are MiB, and the attention's LoRA is in none of them.
"""

from __future__ import annotations

from dataclasses import dataclass

PAPER_BYTES = 2  # bfloat16


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Entries of one user's attention LoRA, of one expert's LoRA on all MLPs, and of its routers."""

    attention: int
    expert: int
    router: int


@dataclass(frozen=True, kw_only=True)
class Account:
    """What one of the two methods really takes: of one user, in one round, with one pass of ``context`` tokens."""

    forward_flops: float
    round_flops: float
    state_bytes: int
    upload_bytes: int


@dataclass(frozen=True, kw_only=True)
class Difference:
    """One column of Table 3: the paper's words, its way of counting on this model, what is true, and why they differ.

    Values are CoMiGS-1G1S minus FedAvg; shares are fractions. ``theirs`` is None where the paper does not count it.
    """

    what: str
    unit: str
    paper: str
    theirs: float | None
    theirs_share: float | None
    true: float
    true_share: float
    why: str


def table3(sizes: Sizes, context: int, fedavg: Account, comigs: Account) -> list[Difference]:
    """The columns of Table 3 for another model, and training, which it leaves out.

    Values are in FLOPs and bytes; ``theirs`` counts bytes as bfloat16.
    """
    share = sizes.router / (2 * sizes.expert)
    lora = sizes.attention + 2 * sizes.expert
    return [
        Difference(
            what="compute of a forward pass",
            unit="FLOPs",
            paper="+5 MFLOPs (+1.25%)",
            theirs=2.0 * sizes.router * context,
            theirs_share=share,
            **_true(comigs.forward_flops, fedavg.forward_flops),
            why="The paper divides the routers' products by those of the experts' LoRA on the MLPs; against the whole "
            "pass, the base included, the share is far smaller.",
        ),
        Difference(
            what="compute of a round's training",
            unit="FLOPs",
            paper="not counted",
            theirs=None,
            theirs_share=None,
            **_true(comigs.round_flops, fedavg.round_flops),
            why="Routers are trained in passes of their own, which FedAvg does not have.",
        ),
        Difference(
            what="memory for what is trained",
            unit="bytes",
            paper="+0.035 MB (+1.25%)",
            theirs=float(sizes.router * PAPER_BYTES),
            theirs_share=share,
            **_true(comigs.state_bytes, fedavg.state_bytes),
            why="Here routers are float32 and have two moments of the optimiser each; the share is of all LoRA, the "
            "attention's included. The paper's MB are MiB of bfloat16.",
        ),
        Difference(
            what="upload of a round",
            unit="bytes",
            paper="-1.41 MB (-50%)",
            theirs=-float(sizes.expert * PAPER_BYTES),
            theirs_share=-0.5,
            **_true(comigs.upload_bytes, fedavg.upload_bytes),
            why=f"The attention's LoRA travels too: {_millions(sizes.attention + sizes.expert)} of {_millions(lora)} "
            "LoRA parameters, as float32. The paper counts the experts of the MLPs alone, as MiB of bfloat16.",
        ),
    ]


def _true(comigs: float, fedavg: float) -> dict[str, float]:
    return {"true": float(comigs - fedavg), "true_share": comigs / fedavg - 1}


def _millions(count: int) -> str:
    return f"{count / 1e6:.3f}M"
