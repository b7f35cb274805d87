"""Gradient inversion with text: which tokens one upload of LoRA factors was computed from.

The gradient of a factor A of a linear layer is a sum of the layer's inputs, ``dA = sum_p (scale B' g_p) x_p'``: its
rows lie in the space that the inputs x_p span. Below the first block's attention an input is a token's embedding after
the norm, the same for all texts (or one for each position, where positions are added), so every token of the
vocabulary can be tried: those that were there lie in the span (Petrov et al. 2024, DAGER, arXiv:2405.15586, section 3).
With more different tokens than rows the rows span a part of it, and tokens are only nearer to it than others are.

Differs from the paper: the layers are LoRA factors of small rank, all projections that read the same input are taken
together, tokens are ranked by their distance from the span instead of by a threshold, and neither their order nor
sequences are recovered. The factors B are zero at the start, and no A has a gradient then, so the second round is
attacked. What AdamW's moments make of a gradient is not undone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor

from comingle.audits.canaries import SERVER, Looked, Watched
from comingle.config import Recipe
from comingle.data.text.streams import UserData
from comingle.models.layouts import decoder_layers
from comingle.reports.audit import Recovery
from comingle.runs.session import build, execute
from comingle.training.client import Clients
from comingle.training.events import Observer
from comingle.training.kinds.base import Materials
from comingle.utils.seeds import generator
from comingle.utils.trees import Tree

Watch = Callable[[Clients], Sequence[Observer]]

SHORT = 8
"""Tokens of the one window of the easiest case."""
FIRST, READS = "layers.0.", (".q_proj.a", ".k_proj.a", ".v_proj.a", ".c_attn.a")
"""Factors that read a token's embedding behind the norm, by how their names begin and end."""
NOTHING_MOVED = 1e-12


def recover(recipe: Recipe, materials: Materials, watch: Watch) -> list[Recovery]:
    """How many tokens come back out of a step on one short window, and out of an upload as the run has it.

    Empty where no factor that reads tokens is shared.
    """
    names = token_factors(build(recipe, materials, store="memory").clients)
    if not names:
        return []
    second = {"training.rounds": 2, "evaluation.every": 2, "evaluation.first": False, "evaluation.model": "exchanged"}
    one = {"training.local_steps": 1, "training.batch_size": 1, "training.context": SHORT}
    assert materials.base is not None
    width = SHORT + (materials.base.begin is None)
    short = tuple(_of_one_window(user, recipe.seed, width) for user in materials.users)
    return [
        _attack_tokens(
            f"one step on {SHORT + 1} tokens", recipe.with_changes(second | one), replace(materials, users=short), watch
        ),
        _attack_tokens("one round as the run has it", recipe.with_changes(second), materials, watch),
    ]


def _of_one_window(user: UserData, seed: int, width: int) -> UserData:
    """Cut a user's training text to one short window of it, at a random place."""
    last = len(user.train) - width + 1
    at = int(torch.randint(last, (1,), generator=generator("window", seed, user.name))) if last > 0 else 0
    return replace(user, train=user.train[at : at + width])


def token_factors(clients: Clients) -> list[str]:
    """The shared factors A of the first block's attention that read tokens."""
    slots = [slot for slot in clients.model.layout.slots if all(slot.chosen(clients.method.shared))]
    return [slot.name for slot in slots if slot.name.startswith(FIRST) and slot.name.endswith(READS)]


def _attack_tokens(what: str, recipe: Recipe, materials: Materials, watch: Watch) -> Recovery:
    plain = build(recipe, materials, store="memory")
    names, seen, looked = token_factors(plain.clients), dict[int, Tree](), Looked()

    def look(who: str, users: Sequence[int], tensors: Tree) -> None:
        if who == SERVER and looked.last:  # behind the first round
            before = looked.before(who, users)
            for row, user in enumerate(users):
                seen[user] = {name: (tensors[name][row, 0] - before[name][row, 0]).double().cpu() for name in names}
        looked.remember(who, tensors)

    federation = Watched(clients=plain.clients, server=plain.server, look=look)
    execute(federation, recipe, None, observers=watch(plain.clients))
    candidates = first_inputs(plain.clients, recipe.training.context, names[0])
    users: Sequence[UserData] = materials.users
    common = [token for token, _ in Counter(torch.cat([user.test for user in users]).tolist()).most_common()]
    tokens, recovered, guesses = [], [], []
    begin = None if materials.base is None else materials.base.begin
    for number, changes in sorted(seen.items()):
        truth = set(users[number].train[:-1].tolist())
        ranked = nearest_tokens(torch.cat(list(changes.values())), candidates)
        ranked = [token for token in ranked if token != begin][: len(truth)]  # it is in every window
        tokens.append(len(truth))
        recovered.append(len(truth & set(ranked)) / len(truth))
        guesses.append(len(truth & set(common[: len(truth)])) / len(truth))
    return Recovery(what=what, tokens=tokens, recovered=recovered, guesses=guesses)


@torch.no_grad()
def first_inputs(clients: Clients, context: int, name: str) -> Float[Tensor, "tokens positions width"]:
    """What the layer of a factor reads for every token at every position; one position where they do not differ."""
    base = vars(clients.model)["base"].model
    layer = decoder_layers(base)[0].get_submodule(name.removeprefix(FIRST).removesuffix(".a"))
    found: list[Tensor] = []
    hook = layer.register_forward_pre_hook(lambda module, inputs: found.append(inputs[0].detach()))
    try:
        ids = torch.arange(int(base.config.vocab_size), device=base.device)
        for part in ids.split(256):
            base(input_ids=part.unsqueeze(1).expand(-1, context), use_cache=False)
    finally:
        hook.remove()
    inputs = torch.cat(found).double().cpu()
    same = torch.allclose(inputs, inputs[:, :1].expand_as(inputs), atol=1e-5)
    return inputs[:, :1] if same else inputs


def nearest_tokens(rows: Float[Tensor, "rows width"], candidates: Float[Tensor, "tokens positions width"]) -> list[int]:
    """All tokens by how far their input is from the span of the rows, relative to its length, nearest first."""
    lengths = rows.norm(dim=1, keepdim=True)
    kept = (rows / lengths.clamp(min=NOTHING_MOVED))[lengths.squeeze(1) > NOTHING_MOVED]
    if not len(kept):
        return torch.arange(len(candidates)).tolist()
    _, values, directions = torch.linalg.svd(kept, full_matrices=False)
    basis = directions[values > NOISE * values[0]]
    within = (candidates @ basis.T).norm(dim=-1) / candidates.norm(dim=-1).clamp(min=NOTHING_MOVED)
    return within.amax(1).argsort(descending=True, stable=True).tolist()


NOISE = 1e-3
"""Directions with less than this part of the largest singular value are rounding."""
