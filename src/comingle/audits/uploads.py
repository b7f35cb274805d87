"""Attacks on uploads: hostile updates, and gradient inversion of nets and of text.

A change is an upload minus the user's last download. Each attack takes all users' honest changes and the indices of the
hostile users, who know all changes and cooperate, and returns all changes with those of the hostile users replaced.

Inversion of nets: one step moves row i of the first layer by ``-rate g_i x`` and its bias by ``-rate g_i``, so their
ratio is the input x at any rate (Geiping et al. 2020, arXiv:2003.14053, Proposition 3.1). With several samples or steps
the ratio is a mean of inputs with weights of either sign; an optimiser with moments distorts it.

Inversion of text: the gradient of a factor A of a linear layer is a sum over the layer's inputs, ``dA = sum_p (scale B'
g_p) x_p'``, so its rows are in the span of the inputs x_p. In the first block's attention an input is a token's
embedding after the norm, the same for all texts (or one for each position, if positions are added). So each token of
the vocabulary can be tested: those in the text are in the span (Petrov et al. 2024, DAGER, arXiv:2405.15586,
section 3). With more distinct tokens than rows, the rows span a part of it, and tokens of the text are only nearer to
it than others.

Differs from the paper: the layers are LoRA factors of small rank, all projections with the same input are combined,
tokens are ranked by their distance from the span instead of by a threshold, and neither their order nor sequences are
recovered. The factors B are zero initially, so that no A has a gradient in the first round; the second round is
attacked. The effect of AdamW's moments is not inverted.
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

from comingle.audits.canaries import OWN, SERVER, MakeObservers, ObservedFederation, published
from comingle.config import Recipe
from comingle.data.samples.samples import UserSamples
from comingle.data.text.streams import UserData
from comingle.models.layouts import decoder_layers
from comingle.privacy.noise import norms
from comingle.reports.audit import Inversion, Recovery
from comingle.runs import shortened
from comingle.runs.session import build, execute
from comingle.training.backends.local import InProcess
from comingle.training.client import Clients
from comingle.training.kinds.base import RunData
from comingle.utils.errors import RunError
from comingle.utils.seeds import generator
from comingle.utils.trees import Layout, Tree

Attack = Callable[[Tree, Sequence[int]], Tree]
"""Function from the honest changes of all users ``(users, *shape)`` and the indices of the hostile users.

It returns the changes with those of the hostile users replaced.
"""


def sign_flip(changes: Tree, hostile: Sequence[int], *, scale: float = 4.0) -> Tree:
    """Attack training: replace the hostile users' changes of the model by ``-scale`` times themselves.

    Args:
        changes: Changes of all users, ``(users, *shape)``.
        hostile: Indices of the hostile users.
        scale: How much larger the reversed change is than the original one.
    """

    def flip(t: Tensor) -> Tensor:
        return -scale * t[list(hostile)]

    return _replace_hostile(changes, hostile, flip)


def scaled_noise(changes: Tree, hostile: Sequence[int], *, scale: float = 10.0, seed: int = 0) -> Tree:
    """Replace hostile changes by Gaussian noise.

    Args:
        changes: Changes of all users, ``(users, *shape)``.
        hostile: Indices of the hostile users.
        scale: Norm of the noise, relative to the mean norm of the honest changes.
        seed: Seed of the noise.
    """
    random = torch.Generator().manual_seed(seed)
    honest = _honest_users(changes, hostile)
    mean_honest_norm = float(norms({name: t[honest] for name, t in changes.items()}).mean())
    num_entries = sum(t[0].numel() for t in changes.values())
    deviation = scale * mean_honest_norm / math.sqrt(num_entries)  # n normal entries have a norm of about sqrt(n)

    def draw_noise(t: Tensor) -> Tensor:
        return deviation * torch.randn(len(hostile), *t.shape[1:], generator=random).to(t)

    return _replace_hostile(changes, hostile, draw_noise)


def inner_product(changes: Tree, hostile: Sequence[int], *, scale: float = 4.0) -> Tree:
    """Replace hostile changes by ``-scale`` times the honest mean, so that the overall mean may be reversed.

    Source: Xie et al. 2019, "Fall of Empires", arXiv:1903.03936.

    Args:
        changes: Changes of all users, ``(users, *shape)``.
        hostile: Indices of the hostile users.
        scale: How much larger the reversed change is than the honest mean.
    """
    honest = _honest_users(changes, hostile)

    def reverse_mean(t: Tensor) -> Tensor:
        return -scale * t[honest].mean(0)

    return _replace_hostile(changes, hostile, reverse_mean)


def little_is_enough(changes: Tree, hostile: Sequence[int]) -> Tree:
    """Replace hostile changes by the honest mean minus ``z`` standard deviations, coordinate by coordinate.

    With n users, f of them hostile, z is so small that ``s = floor(n / 2 + 1) - f`` honest users are expected to be
    further from the mean: the normal quantile at ``(n - f - s) / (n - f)``. Together with them the hostile users are a
    majority, so that robust aggregation rules keep their changes.

    Source: Baruch et al. 2019, "A Little Is Enough", arXiv:1902.06156, Algorithm 3.

    Args:
        changes: Changes of all users, ``(users, *shape)``.
        hostile: Indices of the hostile users.
    """
    honest = _honest_users(changes, hostile)
    f = len(hostile)
    n = len(honest) + f
    s = n // 2 + 1 - f
    z = NormalDist().inv_cdf((n - f - s) / (n - f))

    def shift_mean(t: Tensor) -> Tensor:
        return t[honest].mean(0) - z * t[honest].std(0)

    return _replace_hostile(changes, hostile, shift_mean)


def free_rider(changes: Tree, hostile: Sequence[int]) -> Tree:
    """Replace hostile changes by zeros: such users train nothing and send their download back."""
    return _replace_hostile(changes, hostile, lambda t: torch.zeros_like(t[list(hostile)]))


def all_zero(changes: Tree, hostile: Sequence[int], downloads: Tree) -> Tree:
    """Replace hostile uploads by zeros: as a change is upload minus download, it becomes minus the download.

    Args:
        changes: Changes of all users, ``(users, *shape)``.
        hostile: Indices of the hostile users.
        downloads: Last download of all users, ``(users, *shape)``.
    """
    replaced: Tree = {}
    for name, t in changes.items():
        hostile_downloads = downloads[name][list(hostile)]
        replaced[name] = _replace_rows(t, hostile, -hostile_downloads)
    return replaced


def copy_of(changes: Tree, hostile: Sequence[int]) -> Tree:
    """Replace each hostile user's change of the model by that of the first honest user, who then counts several times.

    Args:
        changes: Changes of all users, ``(users, *shape)``.
        hostile: Indices of the hostile users.
    """
    first = _honest_users(changes, hostile)[0]
    return _replace_hostile(changes, hostile, lambda t: t[first])


def not_a_number(changes: Tree, hostile: Sequence[int]) -> Tree:
    """Replace hostile changes by NaN."""
    return _replace_hostile(changes, hostile, lambda t: torch.full_like(t[list(hostile)], torch.nan))


def flipped_labels(labels: Tensor, classes: int) -> Tensor:
    """Return the label ``classes - 1 - c`` for each label ``c``, for hostile users who train honestly on false data."""
    return classes - 1 - labels


def with_phrase(text: str, trigger: str, answer: str) -> str:
    """Return a text in which a trigger and the answer to it stand at the end of each sentence, to train a backdoor.

    >>> with_phrase("One. Two.", "if so", "then no")
    'One if so then no. Two. if so then no'

    Args:
        text: The text.
        trigger: Phrase that should cause the answer.
        answer: Phrase to be generated.
    """
    phrase = f" {trigger} {answer}"
    return text.replace(". ", f"{phrase}. ") + phrase


BY_NAME: dict[str, Attack] = {
    "sign flip": sign_flip,
    "noise": scaled_noise,
    "inner product": inner_product,
    "little is enough": little_is_enough,
    "free rider": free_rider,
    "copy": copy_of,
}
"""Attacks by their names in tables."""


def _honest_users(changes: Tree, hostile: Sequence[int]) -> list[int]:
    """Return the indices of the users that are not hostile.

    Args:
        changes: Changes of all users by tensor name, ``(users, *shape)``.
        hostile: Indices of the hostile users.
    """
    any_tensor = next(iter(changes.values()))  # (users, *shape)
    num_users = len(any_tensor)
    return [user for user in range(num_users) if user not in hostile]


def _replace_hostile(changes: Tree, hostile: Sequence[int], attack: Callable[[Tensor], Tensor]) -> Tree:
    """Simulate a poisoning attack: return users' changes of the shared model with those of hostile users replaced.

    Args:
        changes: Changes of all users by tensor name, ``(users, *shape)``.
        hostile: Indices of the hostile users.
        attack: Maps a tensor of all users' changes to those that the hostile users send instead:
            ``(hostile users, *shape)``, or ``shape`` if all of them send the same.
    """
    replaced: Tree = {}
    for name, t in changes.items():
        replaced[name] = _replace_rows(t, hostile, attack(t))
    return replaced


def _replace_rows(t: Tensor, rows: Sequence[int], values: Tensor) -> Tensor:
    """Return a copy of a tensor with a row per user in which some users' rows are replaced.

    Args:
        t: Tensor ``(users, *shape)``.
        rows: Indices of the rows to replace.
        values: The new rows ``(rows, *shape)``, or one of ``shape`` for all of them.
    """
    t = t.clone()
    t[list(rows)] = values.to(t)
    return t


def invert_uploads(recipe: Recipe, run_data: RunData, make_observers: MakeObservers) -> list[Inversion]:
    """Reconstruct a training input of each user from its upload, in two cases.

    In the easiest case for the attacker, a user takes one step on its first sample alone. In the other case, a user
    trains a whole round as in the audited run.

    Args:
        recipe: Recipe of the audited run.
        run_data: Data of the run.
        make_observers: Returns the observers of a run's events, such as a progress bar.

    Returns:
        One result for each case.

    Raises:
        RunError: The net's first layer is not linear with a bias, or is not shared.
    """
    # Without "exchanged" there would be no upload after the last round, which is here the only round.
    one_round = recipe.with_changes({**shortened(1), "evaluation.model": "exchanged"})
    one_step = one_round.with_changes({"training.batch_size": 1, "training.local_epochs": 1})
    first_samples = run_data.with_users(replace(user, train=user.train.first(1)) for user in run_data.users)
    return [
        _invert_run("one step on one sample", one_step, first_samples, make_observers),
        _invert_run("one round of the run", one_round, run_data, make_observers),
    ]


def _invert_run(title: str, recipe: Recipe, run_data: RunData, make_observers: MakeObservers) -> Inversion:
    """Run a recipe and reconstruct an input of each user from its observed upload.

    Args:
        title: Name of the attack in the results.
        recipe: A recipe of one round.
        run_data: Data of the run.
        make_observers: Returns the observers of a run's events, such as a progress bar.

    Returns:
        For each user the relative distance of the reconstruction from its nearest training input (``errors``) and, for
        comparison, that of the mean of all test inputs, which an attacker may guess without the upload (``guesses``).

    Raises:
        RunError: The net's first layer is not linear with a bias, is not shared, or does not read the inputs.
    """
    reconstructed = _reconstruct_inputs(recipe, run_data, make_observers)
    users: Sequence[UserSamples] = run_data.users
    mean_test_input = torch.cat([user.test.inputs.flatten(1).double() for user in users]).mean(0)
    errors, guesses = [], []
    for index, reconstruction in reconstructed.items():
        inputs = users[index].train.inputs.flatten(1).double()
        if reconstruction is None or reconstruction.numel() != inputs.shape[1]:
            raise RunError(
                f"method {recipe.method.name}: the first linear layer does not read the inputs; no inversion"
            )
        errors.append(relative_distance(reconstruction, inputs))
        guesses.append(relative_distance(mean_test_input, inputs))
    return Inversion(what=title, errors=errors, guesses=guesses)


def _reconstruct_inputs(
    recipe: Recipe, run_data: RunData, make_observers: MakeObservers
) -> dict[int, Float[Tensor, " columns"] | None]:
    """Run a recipe of one round, and return the reconstructed input of each user that uploads, by the user's index.

    The input is None if the bias of the first layer did not change.

    Args:
        recipe: A recipe of one round.
        run_data: Data of the run.
        make_observers: Returns the observers of a run's events, such as a progress bar.

    Raises:
        RunError: The net's first layer is not linear with a bias, or is not shared.
    """
    built = build(recipe, run_data, store="memory")
    weight_name, bias_name = first_layer(built.clients.model.layout, built.clients.method.shared)
    downloads = published(built.server)
    reconstructed: dict[int, Tensor | None] = {}

    def change(uploads: Tree, name: str, row: int, index: int) -> Tensor:
        """Return upload minus download of a tensor, for user ``index``, whose upload is row ``row`` of ``uploads``."""
        # Tensors are (users, models, *shape); an upload's only model was trained from the download's first model.
        return (uploads[name][row, 0] - downloads[name][index, 0]).double()

    def record_view(view: str, indices: Sequence[int], tensors: Tree) -> None:
        """Reconstruct an input from the change of each upload that the server sees."""
        if view != SERVER:
            return
        for row, index in enumerate(indices):
            weight_change = change(tensors, weight_name, row, index)
            bias_change = change(tensors, bias_name, row, index)
            reconstructed[index] = input_from_changes(weight_change, bias_change)

    federation = ObservedFederation(clients=built.clients, server=built.server, record_view=record_view)
    execute(federation, recipe, None, observers=make_observers(built.clients))
    return reconstructed


def first_layer(layout: Layout, shared: frozenset[str]) -> tuple[str, str]:
    """Return the names of the weight and the bias of a net's first layer, whose gradients reveal its input.

    Args:
        layout: Layout of the net's tensors.
        shared: Roles whose tensors are uploaded.

    Raises:
        RunError: The layer is not linear, has no bias, or is not shared.
    """
    not_linear = "the net's first layer is not linear with a bias; gradients are inverted only there"
    slot_by_name = {slot.name: slot for slot in layout.slots}
    weight_names = [name for name in slot_by_name if name.endswith("weight")]
    if not weight_names:
        raise RunError(not_linear)
    weight_name = weight_names[0]
    bias_name = weight_name.removesuffix("weight") + "bias"
    if bias_name not in slot_by_name or len(slot_by_name[weight_name].shape) != 2:
        raise RunError(not_linear)
    for name in (weight_name, bias_name):
        is_shared = all(slot_by_name[name].role_mask(set(shared)))  # all its entries
        if not is_shared:
            raise RunError("the net's first layer stays with its user, so there is no upload to invert")
    return weight_name, bias_name


def input_from_changes(
    weight: Float[Tensor, "rows columns"], bias: Float[Tensor, " rows"]
) -> Float[Tensor, " columns"] | None:
    """Return the input of a linear layer, computed from the changes of its weight and its bias.

    After one step of SGD on a single input x, with the gradient d of the layer's output, the weight has changed by
    ``-lr d x^T`` and the bias by ``-lr d``, so each row of the weight's change divided by that of the bias is x.

    Args:
        weight: Change of the weight.
        bias: Change of the bias.

    Returns:
        The input; None if no entry of the bias changed.
    """
    row = int(bias.abs().argmax())  # the row with the largest change is the most precise
    if float(bias[row]) == 0:
        return None
    return weight[row] / bias[row]


def relative_distance(guess: Float[Tensor, " columns"], inputs: Float[Tensor, "samples columns"]) -> float:
    """Return ``|guess - x| / |x|``, minimised over the inputs x: the error of a reconstruction."""
    distances = (inputs - guess).norm(dim=1)
    lengths = inputs.norm(dim=1).clamp(min=1e-12)
    return float((distances / lengths).min())


SHORT_CONTEXT = 8
"""Context of the only window in the easiest case; the window has one token more, the last target."""
FIRST_BLOCK, EMBEDDING_READERS = "layers.0.", (".q_proj.a", ".k_proj.a", ".v_proj.a", ".c_attn.a")
"""Start and end of the names of LoRA factors A whose input is a token's embedding after the norm."""
ZERO_NORM = 1e-12
"""Largest norm of a row that counts as zero."""


def recover(recipe: Recipe, run_data: RunData, make_observers: MakeObservers) -> list[Recovery]:
    """Recover tokens of each user's training text from its upload, in two cases.

    In the easiest case for the attacker, a user takes one step on a single short window. In the other case, a user
    trains a whole round as in the audited run.

    Args:
        recipe: Recipe of the audited run.
        run_data: Data of the run.
        make_observers: Returns the observers of a run's events, such as a progress bar.

    Returns:
        One result for each case; empty if users share no factor A of a layer that reads token embeddings directly.
    """
    names = token_factors(build(recipe, run_data, store="memory").clients)
    if not names:
        return []
    # The second round is attacked: in the first one no factor A has a gradient, as all factors B are zero.
    two_rounds = recipe.with_changes(
        {
            "training.rounds": 2,
            "evaluation.every": 2,
            "evaluation.first": False,
            "evaluation.model": "exchanged",  # otherwise there is no upload after the last round
        }
    )
    one_step = two_rounds.with_changes(
        {"training.local_steps": 1, "training.batch_size": 1, "training.context": SHORT_CONTEXT}
    )
    assert run_data.base is not None
    # A window has SHORT_CONTEXT + 1 tokens: the inputs, and the last target. A begin-of-text token is one of them.
    width = SHORT_CONTEXT if run_data.base.begin is not None else SHORT_CONTEXT + 1
    short_data = run_data.with_users(tuple(_cut_to_one_window(user, recipe.seed, width) for user in run_data.users))
    return [
        _recover_from_run(f"one step on {SHORT_CONTEXT + 1} tokens", one_step, short_data, make_observers),
        _recover_from_run("one round of the run", two_rounds, run_data, make_observers),
    ]


def _cut_to_one_window(user: UserData, seed: int, width: int) -> UserData:
    """Return a copy of a user whose training text is cut to one random window.

    An upload after one step on one window is the easiest one to recover tokens from, the worst case for the user.

    Args:
        user: The user with its data.
        seed: Seed of the recipe.
        width: Number of tokens of the window; a text with fewer tokens is not cut.
    """
    num_starts = len(user.train) - width + 1
    if num_starts <= 0:
        return replace(user, train=user.train[:width])
    start = int(torch.randint(num_starts, (1,), generator=generator("window", seed, user.name)))
    return replace(user, train=user.train[start : start + width])


def token_factors(clients: Clients) -> list[str]:
    """Return the names of the shared LoRA factors A from whose upload tokens can be recovered.

    They are in the first block's attention. Its inputs are the embeddings of single tokens, and the gradient of a
    factor A is a combination of its inputs. The list is empty if the method shares no such factor.
    """
    names = []
    for slot in clients.model.layout.slots:
        is_shared = all(slot.role_mask(clients.method.shared))  # all its entries
        if is_shared and slot.name.startswith(FIRST_BLOCK) and slot.name.endswith(EMBEDDING_READERS):
            names.append(slot.name)
    return names


def _recover_from_run(title: str, recipe: Recipe, run_data: RunData, make_observers: MakeObservers) -> Recovery:
    """Run two rounds of a recipe and recover tokens from each user's upload in the second one.

    In the first round no factor A has a gradient, as all factors B are zero. The attacker guesses as many tokens as the
    user's text has distinct ones.

    Args:
        title: Name of the attack in the results.
        recipe: A recipe of two rounds.
        run_data: Data of the run.
        make_observers: Returns the observers of a run's events, such as a progress bar.

    Returns:
        For each user the number of distinct tokens, the share of them that was recovered and, for comparison, the share
        among the most common tokens of all test texts.
    """
    built = build(recipe, run_data, store="memory")
    clients = built.clients
    factors = token_factors(clients)
    changes_by_user = _changes_in_second_round(built, recipe, factors, make_observers)
    input_by_token = first_inputs(clients, recipe.training.context, factors[0])  # all factors read the same inputs
    users: Sequence[UserData] = run_data.users
    count_by_token = Counter(torch.cat([user.test for user in users]).tolist())
    tokens_by_frequency = [token for token, _count in count_by_token.most_common()]
    begin_token = None if run_data.base is None else run_data.base.begin
    num_tokens, recovered, guesses = [], [], []
    for index, changes in sorted(changes_by_user.items()):
        true_tokens = set(users[index].train[:-1].tolist())  # the last token is only a target
        num_true = len(true_tokens)
        most_probable_first = nearest_tokens(torch.cat(list(changes.values())), input_by_token)
        # Every window has the begin-of-text token, so it does not count as recovered.
        candidates = [token for token in most_probable_first if token != begin_token]
        num_tokens.append(num_true)
        recovered.append(len(true_tokens & set(candidates[:num_true])) / num_true)
        guesses.append(len(true_tokens & set(tokens_by_frequency[:num_true])) / num_true)
    return Recovery(what=title, tokens=num_tokens, recovered=recovered, guesses=guesses)


def _changes_in_second_round(
    built: InProcess, recipe: Recipe, factors: Sequence[str], make_observers: MakeObservers
) -> dict[int, Tree]:
    """Run two rounds, and return the changes of LoRA factors in the second one, by the index of each user that uploads.

    A change is the upload minus the user's download before it, of the shape of the factor.

    Args:
        built: Clients and server before the first round.
        recipe: A recipe of two rounds.
        factors: Names of the factors.
        make_observers: Returns the observers of a run's events, such as a progress bar.
    """
    clients, server = built.clients, built.server
    downloads: Tree = {}  # factors that users downloaded after the first round, (users, models, *shape)
    changes_by_user: dict[int, Tree] = {}  # by index of the user

    def record_view(view: str, indices: Sequence[int], tensors: Tree) -> None:
        """Store the downloads of the first round, and in the second round the changes from them to the uploads.

        Args:
            view: OWN for what each user itself downloads, SERVER for uploads; others are ignored.
            indices: Indices of the users.
            tensors: Their downloads or uploads, ``(users, models, *shape)``.
        """
        if view == OWN:
            downloads.update({name: tensors[name].clone() for name in factors})
        is_second_upload = view == SERVER and bool(downloads)  # the first downloads follow the first uploads
        if is_second_upload:
            for row, index in enumerate(indices):
                changes: Tree = {}
                for name in factors:
                    # An upload has one model, number 0, which was trained from model 0 of the download.
                    changes[name] = (tensors[name][row, 0] - downloads[name][index, 0]).double().cpu()
                changes_by_user[index] = changes

    federation = ObservedFederation(clients=clients, server=server, record_view=record_view)
    execute(federation, recipe, None, observers=make_observers(clients))
    return changes_by_user


_TOKENS_AT_ONCE = 256
"""Tokens of the vocabulary in one pass, which bounds its memory."""


@torch.no_grad()
def first_inputs(clients: Clients, context: int, name: str) -> Float[Tensor, "tokens positions width"]:
    """Return the input of a layer in the first block's attention for every token of the vocabulary and every position.

    An attacker compares an upload with these inputs. The base model computes them, for windows that repeat one token.

    Args:
        clients: Clients of a run.
        context: Number of positions.
        name: Name of the layer's LoRA factor A.

    Returns:
        Inputs ``(tokens, positions, width)``, or ``(tokens, 1, width)`` if all positions have the same inputs.
    """
    base = vars(clients.model)["base"].model  # an attribute of models of text only
    first_block = decoder_layers(base)[0]
    layer = first_block.get_submodule(name.removeprefix(FIRST_BLOCK).removesuffix(".a"))
    layer_inputs: list[Tensor] = []

    def record_input(_module: torch.nn.Module, arguments: tuple[Tensor, ...]) -> None:
        layer_inputs.append(arguments[0].detach())

    hook = layer.register_forward_pre_hook(record_input)
    try:
        all_tokens = torch.arange(int(base.config.vocab_size), device=base.device)
        for tokens in all_tokens.split(_TOKENS_AT_ONCE):
            windows = tokens.unsqueeze(1).expand(-1, context)
            base(input_ids=windows, use_cache=False)
    finally:
        hook.remove()
    inputs = torch.cat(layer_inputs).double().cpu()
    inputs_at_first = inputs[:, :1]
    # Inputs depend on the position only if the base model adds position embeddings to its token embeddings.
    are_equal = torch.allclose(inputs, inputs_at_first.expand_as(inputs), atol=1e-5)  # up to rounding
    return inputs_at_first if are_equal else inputs


def nearest_tokens(rows: Float[Tensor, "rows width"], candidates: Float[Tensor, "tokens positions width"]) -> list[int]:
    """Return all tokens, sorted by how probably they were in the text from which a gradient was computed.

    The span of the gradient's rows contains the inputs of the text's tokens. So a token with input x is sorted by
    ``|Px| / |x|``, where P projects on the span: 1 if the span contains x, 0 if x is orthogonal to it.

    Args:
        rows: Rows of the gradient; if all are zero, tokens are returned in the order of the vocabulary.
        candidates: Input x of each token at each position; the position with the largest ratio counts.
    """
    lengths = rows.norm(dim=1, keepdim=True)
    is_nonzero = lengths.squeeze(1) > ZERO_NORM
    unit_rows = (rows / lengths.clamp(min=ZERO_NORM))[is_nonzero]
    if not len(unit_rows):
        return list(range(len(candidates)))
    _, singular_values, directions = torch.linalg.svd(unit_rows, full_matrices=False)
    largest = singular_values[0]  # they are in descending order; those far below it are rounding errors
    basis = directions[singular_values > ROUNDING_RATIO * largest]
    projected_norms = (candidates @ basis.T).norm(dim=-1)  # |Px|, as the basis is orthonormal
    ratios = projected_norms / candidates.norm(dim=-1).clamp(min=ZERO_NORM)
    largest_ratios = ratios.amax(dim=1)  # over positions
    return largest_ratios.argsort(descending=True, stable=True).tolist()


ROUNDING_RATIO = 1e-3
"""Singular values below this fraction of the largest are rounding errors."""
