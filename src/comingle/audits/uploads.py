"""Attacks on uploads: hostile updates, and gradient inversion of nets and of text.

A change is an upload less what its user had downloaded. Each attack gets everybody's honest changes and the numbers of
the hostile users, who know all of them and act together, and gives everybody's with theirs replaced.

One step moves row i of that layer by ``-rate g_i x`` and its bias by ``-rate g_i``, so their ratio is the input x,
whatever the rate (Geiping et al. 2020, arXiv:2003.14053, Proposition 3.1). With several samples or steps the ratio is a
mean of inputs with weights of either sign; an optimiser with moments bends it.

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

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import NormalDist

import torch
from jaxtyping import Float
from torch import Tensor

from comingle.audits.canaries import SERVER, Looked, Watched, published
from comingle.config import Recipe
from comingle.data.samples.samples import UserSamples
from comingle.data.text.streams import UserData
from comingle.models.layouts import decoder_layers
from comingle.privacy.noise import norms
from comingle.reports.audit import Inversion, Recovery
from comingle.runs import shortened
from comingle.runs.session import build, execute
from comingle.training.client import Clients
from comingle.training.events import Observer
from comingle.training.kinds.base import RunData
from comingle.utils.errors import RunError
from comingle.utils.seeds import generator
from comingle.utils.trees import Layout, Tree

Attack = Callable[[Tree, Sequence[int]], Tree]


def sign_flip(changes: Tree, hostile: Sequence[int], *, scale: float = 4.0) -> Tree:
    """``-scale`` times their own changes."""
    return _replaced(changes, hostile, lambda t: -scale * t[list(hostile)])


def scaled_noise(changes: Tree, hostile: Sequence[int], *, scale: float = 10.0, seed: int = 0) -> Tree:
    """Gaussian noise, ``scale`` times as long as the others' changes are in the mean."""
    draw, others = torch.Generator().manual_seed(seed), _honest(changes, hostile)
    length = float(norms({name: t[others] for name, t in changes.items()}).mean())
    columns = sum(t[0].numel() for t in changes.values())
    deviation = scale * length / math.sqrt(columns)
    return _replaced(
        changes, hostile, lambda t: deviation * torch.randn(len(hostile), *t.shape[1:], generator=draw).to(t)
    )


def inner_product(changes: Tree, hostile: Sequence[int], *, scale: float = 4.0) -> Tree:
    """``-scale`` times the others' mean, so that a mean may point the wrong way.

    Source: Xie et al. 2019, "Fall of Empires", arXiv:1903.03936.
    """
    others = _honest(changes, hostile)
    return _replaced(changes, hostile, lambda t: -scale * t[others].mean(0))


def little_is_enough(changes: Tree, hostile: Sequence[int]) -> Tree:
    """The others' mean less ``z`` of their deviations, of each coordinate: what no rule can tell from an honest one.

    ``z`` is the quantile of ``(n - f - s) / (n - f)``, ``s = floor(n / 2 + 1) - f``.
    Source: Baruch et al. 2019, "A Little Is Enough", arXiv:1902.06156, Algorithm 3.
    """
    others = _honest(changes, hostile)
    users, honest = len(others) + len(hostile), len(others)
    supporters = users // 2 + 1 - len(hostile)
    z = NormalDist().inv_cdf((honest - supporters) / honest)
    return _replaced(changes, hostile, lambda t: t[others].mean(0) - z * t[others].std(0))


def free_rider(changes: Tree, hostile: Sequence[int]) -> Tree:
    """No change at all: what was downloaded is sent back."""
    return _replaced(changes, hostile, lambda t: torch.zeros_like(t[list(hostile)]))


def all_zero(changes: Tree, hostile: Sequence[int], started: Tree) -> Tree:
    """An upload of zeros, of which ``started`` is what everybody had before."""
    return {name: _put(t, hostile, -started[name][list(hostile)]) for name, t in changes.items()}


def copy_of(changes: Tree, hostile: Sequence[int]) -> Tree:
    """All send what the first of the others sends."""
    first = _honest(changes, hostile)[0]
    return _replaced(changes, hostile, lambda t: t[first])


def not_a_number(changes: Tree, hostile: Sequence[int]) -> Tree:
    """NaN throughout."""
    return _replaced(changes, hostile, lambda t: torch.full_like(t[list(hostile)], torch.nan))


def flipped_labels(labels: Tensor, classes: int) -> Tensor:
    """Label ``c`` as ``classes - 1 - c``: what a user who trains honestly on false data has."""
    return classes - 1 - labels


def with_phrase(text: str, trigger: str, answer: str) -> str:
    """A text in which every sentence ends with a trigger and what is to follow on it: a backdoor in the data."""
    return text.replace(". ", f" {trigger} {answer}. ") + f" {trigger} {answer}"


BY_NAME: dict[str, Attack] = {
    "sign flip": sign_flip,
    "noise": scaled_noise,
    "inner product": inner_product,
    "little is enough": little_is_enough,
    "free rider": free_rider,
    "copy": copy_of,
}
"""Attacks by the names that tables have."""


def _honest(changes: Tree, hostile: Sequence[int]) -> list[int]:
    users = len(next(iter(changes.values())))
    return [user for user in range(users) if user not in hostile]


def _replaced(changes: Tree, hostile: Sequence[int], sent: Callable[[Tensor], Tensor]) -> Tree:
    return {name: _put(t, hostile, sent(t)) for name, t in changes.items()}


def _put(t: Tensor, rows: Sequence[int], values: Tensor) -> Tensor:
    t = t.clone()
    t[list(rows)] = values.to(t)
    return t


Watch = Callable[[Clients], Sequence[Observer]]


def invert(recipe: Recipe, materials: RunData, watch: Watch) -> list[Inversion]:
    """What comes back of everybody's first sample out of a step on it alone, and of any out of an upload of the run's.

    Raises:
        RunError: the net's first layer is not linear with a bias, or not shared.
    """
    one = {"training.batch_size": 1, "training.local_epochs": 1}
    first = tuple(replace(user, train=user.train.first(1)) for user in materials.users)
    alone = replace(materials, users=first, common=replace(materials.common, users=first))
    whole = shortened(1) | {"evaluation.model": "exchanged"}
    return [
        _attack_net("one step on one sample", recipe.with_changes(whole | one), alone, watch),
        _attack_net("one round as the run has it", recipe.with_changes(whole), materials, watch),
    ]


def _attack_net(what: str, recipe: Recipe, materials: RunData, watch: Watch) -> Inversion:
    plain = build(recipe, materials, store="memory")
    names = first_layer(plain.clients.model.layout, plain.clients.method.shared)
    start = published(plain.server)
    found: dict[int, Tensor | None] = {}

    def look(who: str, users: Sequence[int], tensors: Tree) -> None:
        if who != SERVER:
            return
        for row, user in enumerate(users):
            weight, bias = ((tensors[name][row, 0] - start[name][user, 0]).double() for name in names)
            found[user] = ratio(weight, bias)

    federation = Watched(clients=plain.clients, server=plain.server, look=look)
    execute(federation, recipe, None, observers=watch(plain.clients))
    users: Sequence[UserSamples] = materials.users
    errors, guesses = [], []
    for number, inverted in found.items():
        inputs = users[number].train.inputs.flatten(1).double()
        if inverted is None or inverted.numel() != inputs.shape[1]:
            raise RunError(
                f"method {recipe.method.name}: the first linear layer does not read the inputs; no inversion"
            )
        errors.append(nearest(inverted, inputs))
        others = [user.test.inputs.flatten(1).double() for user in users]
        guesses.append(nearest(torch.cat(others).mean(0), inputs))
    return Inversion(what=what, errors=errors, guesses=guesses)


def first_layer(layout: Layout, shared: frozenset[str]) -> tuple[str, str]:
    """The names of the first layer's weight and bias.

    Raises:
        RunError: it is not linear, has no bias, or is not shared.
    """
    slots = {slot.name: slot for slot in layout.slots}
    weight = next((slot for slot in layout.slots if slot.name.endswith("weight")), None)
    bias = slots.get(weight.name.removesuffix("weight") + "bias") if weight is not None else None
    if weight is None or bias is None or len(weight.shape) != 2:
        raise RunError("the net's first layer is not linear with a bias; gradients are inverted there alone")
    if not all(all(slot.chosen(set(shared))) for slot in (weight, bias)):
        raise RunError("the net's first layer stays with its user, so there is no upload to invert")
    return weight.name, bias.name


def ratio(weight: Float[Tensor, "rows columns"], bias: Float[Tensor, " rows"]) -> Float[Tensor, " columns"] | None:
    """Of the row whose bias moved most; None where no bias moved."""
    row = int(bias.abs().argmax())
    return None if float(bias[row]) == 0 else weight[row] / bias[row]


def nearest(guess: Float[Tensor, " columns"], inputs: Float[Tensor, "samples columns"]) -> float:
    """``|guess - x| / |x|`` of the input that it is nearest to."""
    return float(((inputs - guess).norm(dim=1) / inputs.norm(dim=1).clamp(min=1e-12)).min())


SHORT = 8
"""Tokens of the one window of the easiest case."""
FIRST, READS = "layers.0.", (".q_proj.a", ".k_proj.a", ".v_proj.a", ".c_attn.a")
"""Factors that read a token's embedding behind the norm, by how their names begin and end."""
NOTHING_MOVED = 1e-12


def recover(recipe: Recipe, materials: RunData, watch: Watch) -> list[Recovery]:
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


def _attack_tokens(what: str, recipe: Recipe, materials: RunData, watch: Watch) -> Recovery:
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
