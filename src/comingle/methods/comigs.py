"""CoMiGS: a mixture of generalists and specialists; the router is trained on the user's validation text.

Source: Fan et al. 2025, "On-Device Collaborative Language Modeling via a Mixture of Generalists and Specialists",
arXiv:2409.13931, Algorithm 1 and App. B.1.

``accumulate_gradients`` follows the public code; the paper does not mention it. Only the optimiser that stepped has its
gradients zeroed, so the validation text of the routers' steps also trains the experts (papers/docs/results.md).
"""

from __future__ import annotations

from collections.abc import Mapping

from comingle.methods.base import Client, Method, Phase, Placement, Stream, alternating
from comingle.methods.server import Mean, Server
from comingle.methods.settings import Count, Experts, ExpertsOfUsers
from comingle.utils.trees import ATTENTION, GENERALIST


def comigs(
    *,
    generalists: Experts = 1,
    specialists: ExpertsOfUsers = 1,
    router_every: Count = 30,
    router_steps: Count = 10,
    router_stream: Stream = "valid",
    accumulate_gradients: bool = False,
    name: str = "comigs",
) -> Method:
    """CoMiGS with any numbers of experts: generalists are averaged, specialists and routers never leave their user.

    Source: CoMiGS (Fan et al. 2025, arXiv:2409.13931), Algorithm 1.
    Shared: attention, generalists.  Local: specialists, routers.  Frozen: the base.
    Client: alternating; after every ``router_every`` steps on attention and experts on training text,
    ``router_steps`` steps on the routers alone on validation text.
    Server: mean of the shared tensors over users.
    Differs from the paper: ``router_every`` counts a user's local steps (App. B.1), not rounds (Algorithm 1).  The
    load-balancing penalty is computed from the router's input, where the public code takes the output of the
    transformer block.  A user with a single expert has no router.

    Args:
        generalists: Shared experts in each MLP; with 0 nothing is shared, not even attention.
        specialists: Local experts in each MLP: one number, a mapping such as ``{ada: 3, ben: 0}``, a list with one for
            each user in the recipe's order, or ``auto``: as many, up to 3, as fit into each device's memory and
            ``training.max_seconds_per_round``.
        router_every: Local steps on experts from one phase on the routers to the next. A run with fewer local steps
            trains no router and warns.
        router_steps: Optimiser steps in each phase on the routers, each on a fresh batch.
        router_stream: Text for router steps: ``valid`` or ``train``.
        accumulate_gradients: Let the routers' steps also add to the gradients of the experts, and vice versa, as in
            CoMiGS's public code; the experts then learn from validation text too.
        name: Name that the returned method has in results.
    """
    phases = alternating(router_stream, router_every, router_steps, accumulate=accumulate_gradients)
    return _comigs_method(name, phases, generalists, specialists)


def _comigs_method(
    name: str, phases: tuple[Phase, ...], generalists: int = 1, specialists: ExpertsOfUsers = 1
) -> Method:
    """Return a variant of CoMiGS; without generalists nothing is shared, not even attention.

    Args:
        name: Name of the method.
        phases: Phases of a round, on experts and on routers.
        generalists: Shared experts per MLP.
        specialists: Local experts per MLP: ``3``, ``[3, 0, 2]`` or ``{"ada": 3, "ben": 0}``; "auto" counts as 1 until
            the run has chosen a number for each user.
    """
    if specialists == "auto":
        specialists = 1
    elif not isinstance(specialists, int | Mapping):
        specialists = tuple(specialists)
    if generalists > 0:
        shared, server = frozenset({ATTENTION, GENERALIST}), Mean()
    else:
        shared, server = frozenset(), Server()
    return Method(
        name=name,
        placement=Placement(generalists=generalists, specialists=specialists, routed=True, shared=shared),
        client=Client(phases=phases),
        server=server,
    )


def comigs_1g1s(*, router_every: Count = 30, router_steps: Count = 10, accumulate_gradients: bool = False) -> Method:
    """CoMiGS with one generalist and one specialist: the paper's main setting.

    Source: CoMiGS (Fan et al. 2025, arXiv:2409.13931), section 4.2.
    Shared: attention, 1 generalist per MLP.  Local: 1 specialist per MLP, routers.  Frozen: the base.
    Client: alternating steps on experts, on training text, and on routers, on validation text.
    Server: mean over users.
    Differs from the paper: ``router_every`` counts a user's local steps, not rounds.  The load-balancing penalty is
    computed from the router's input, where the public code takes the output of the transformer block.

    Args:
        router_every: Local steps on experts from one phase on the routers to the next. A run with fewer local steps
            trains no router and warns.
        router_steps: Optimiser steps in each phase on the routers, each on a fresh batch.
        accumulate_gradients: Let the routers' steps also add to the gradients of the experts, and vice versa, as in
            CoMiGS's public code; the experts then learn from validation text too.
    """
    phases = alternating("valid", router_every, router_steps, accumulate=accumulate_gradients)
    return _comigs_method("comigs-1g1s", phases)


def comigs_2g(*, router_every: Count = 30, router_steps: Count = 10, accumulate_gradients: bool = False) -> Method:
    """CoMiGS with two generalists: everything but the routers is shared.

    Source: CoMiGS (Fan et al. 2025, arXiv:2409.13931), section 4.2, ablation.
    Shared: attention, 2 generalists per MLP.  Local: routers.  Frozen: the base.
    Client: alternating steps on experts, on training text, and on routers, on validation text.
    Server: mean over users.
    Differs from the paper: ``router_every`` counts a user's local steps, not rounds.  The load-balancing penalty is
    computed from the router's input, where the public code takes the output of the transformer block.

    Args:
        router_every: Local steps on experts from one phase on the routers to the next. A run with fewer local steps
            trains no router and warns.
        router_steps: Optimiser steps in each phase on the routers, each on a fresh batch.
        accumulate_gradients: Let the routers' steps also add to the gradients of the experts, and vice versa, as in
            CoMiGS's public code; the experts then learn from validation text too.
    """
    phases = alternating("valid", router_every, router_steps, accumulate=accumulate_gradients)
    return _comigs_method("comigs-2g", phases, generalists=2, specialists=0)


def comigs_2s(*, router_every: Count = 30, router_steps: Count = 10, accumulate_gradients: bool = False) -> Method:
    """CoMiGS with two specialists: nothing is shared.

    Source: CoMiGS (Fan et al. 2025, arXiv:2409.13931), section 4.2, ablation.
    Shared: nothing.  Local: attention, 2 specialists per MLP, routers.  Frozen: the base.
    Client: alternating steps on experts, on training text, and on routers, on validation text.  Server: none.
    Differs from the paper: ``router_every`` counts a user's local steps, not rounds.  The load-balancing penalty is
    computed from the router's input, where the public code takes the output of the transformer block.

    Args:
        router_every: Local steps on experts from one phase on the routers to the next. A run with fewer local steps
            trains no router and warns.
        router_steps: Optimiser steps in each phase on the routers, each on a fresh batch.
        accumulate_gradients: Let the routers' steps also add to the gradients of the experts, and vice versa, as in
            CoMiGS's public code; the experts then learn from validation text too.
    """
    phases = alternating("valid", router_every, router_steps, accumulate=accumulate_gradients)
    return _comigs_method("comigs-2s", phases, generalists=0, specialists=2)


def comigs_1gxs(
    *,
    specialists: ExpertsOfUsers = 3,
    router_every: Count = 30,
    router_steps: Count = 10,
    accumulate_gradients: bool = False,
) -> Method:
    """CoMiGS with one generalist and as many specialists as each user can afford.

    Source: CoMiGS (Fan et al. 2025, arXiv:2409.13931), section 4.3.
    Shared: attention, 1 generalist per MLP.  Local: each user's specialists, routers.  Frozen: the base.
    Client: alternating steps on experts, on training text, and on routers, on validation text.
    Server: mean over users.
    Differs from the paper: ``router_every`` counts a user's local steps, not rounds.  The load-balancing penalty is
    computed from the router's input, where the public code takes the output of the transformer block.

    Args:
        specialists: Local experts in each MLP: one number, a mapping such as ``{ada: 3, ben: 0}``, a list with one for
            each user in the recipe's order, or ``auto``: as many, up to 3, as fit into each device's memory and
            ``training.max_seconds_per_round``. The paper's ``n_i`` counts the generalist too.
        router_every: Local steps on experts from one phase on the routers to the next. A run with fewer local steps
            trains no router and warns.
        router_steps: Optimiser steps in each phase on the routers, each on a fresh batch.
        accumulate_gradients: Let the routers' steps also add to the gradients of the experts, and vice versa, as in
            CoMiGS's public code; the experts then learn from validation text too.
    """
    phases = alternating("valid", router_every, router_steps, accumulate=accumulate_gradients)
    return _comigs_method("comigs-1gxs", phases, specialists=specialists)


def comigs_tr(*, router_every: Count = 30, router_steps: Count = 10, accumulate_gradients: bool = False) -> Method:
    """CoMiGS with one generalist and one specialist, for users without validation text.

    Source: CoMiGS (Fan et al. 2025, arXiv:2409.13931), App. C.2, Table 5 part iii.
    Shared: attention, 1 generalist per MLP.  Local: 1 specialist per MLP, routers.  Frozen: the base.
    Client: alternating steps on experts and on routers, on separate training batches.  Server: mean over users.
    Differs from the paper: ``router_every`` counts a user's local steps, not rounds.  The load-balancing penalty is
    computed from the router's input, where the public code takes the output of the transformer block.

    Args:
        router_every: Local steps on experts from one phase on the routers to the next. A run with fewer local steps
            trains no router and warns.
        router_steps: Optimiser steps in each phase on the routers, each on a fresh batch.
        accumulate_gradients: Let the routers' steps also add to the gradients of the experts, and vice versa, as in
            CoMiGS's public code; the experts then learn from the routers' batches too.
    """
    phases = alternating("train", router_every, router_steps, accumulate=accumulate_gradients)
    return _comigs_method("comigs-tr", phases)
