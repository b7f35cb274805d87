"""CoMiGS: a mixture of generalists and specialists, its router trained on the user's validation text.

Source: Fan et al. 2025, "On-Device Collaborative Language Modeling via a Mixture of Generalists and Specialists",
arXiv:2409.13931, Algorithm 1 and App. B.1.

``accumulate_gradients`` is what the public code does, and the paper does not say: only the optimiser that stepped has
its gradients zeroed, so that the validation text of the routers' steps trains the experts too (docs/results.md).
"""

from __future__ import annotations

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
    Client: alternating; every ``router_every`` local iterations ``router_steps`` steps on the routers alone, on fresh
    batches of validation text.  Server: mean of the shared tensors over users.
    Without generalists nothing is shared, attention neither.  A user with a single expert needs no router.
    Differs from the paper: the routers' period counts a user's local iterations (App. B.1), not rounds (Algorithm 1);
    the load-balancing penalty is computed from the router's own input (the public code takes the block's output).
    """
    phases = alternating(router_stream, router_every, router_steps, accumulate=accumulate_gradients)
    return _mixture(name, phases, generalists, specialists)


def _mixture(name: str, phases: tuple[Phase, ...], generalists: int = 1, specialists: ExpertsOfUsers = 1) -> Method:
    return Method(
        name=name,
        placement=Placement(
            generalists=generalists,
            specialists=specialists if isinstance(specialists, int) else tuple(specialists),
            routed=True,
            shared=frozenset({ATTENTION, GENERALIST}) if generalists else frozenset(),
        ),
        client=Client(phases=phases),
        server=Mean() if generalists else Server(),
    )


def comigs_1g1s(*, router_every: Count = 30, router_steps: Count = 10, accumulate_gradients: bool = False) -> Method:
    """CoMiGS with one generalist and one specialist: the paper's main setting.

    Source: CoMiGS (Fan et al. 2025, arXiv:2409.13931), section 4.2.
    Shared: attention, 1 generalist per MLP.  Local: 1 specialist per MLP, routers.  Frozen: the base.
    Client: alternating; router steps on validation text.  Server: mean over users.
    Differs from the paper: as ``comigs``.
    """
    phases = alternating("valid", router_every, router_steps, accumulate=accumulate_gradients)
    return _mixture("comigs-1g1s", phases)


def comigs_2g(*, router_every: Count = 30, router_steps: Count = 10, accumulate_gradients: bool = False) -> Method:
    """CoMiGS with two generalists: everything but the routers is shared.

    Source: CoMiGS (Fan et al. 2025, arXiv:2409.13931), section 4.2, ablation.
    Shared: attention, 2 generalists per MLP.  Local: routers.  Frozen: the base.
    Client: alternating; router steps on validation text.  Server: mean over users.
    Differs from the paper: as ``comigs``.
    """
    phases = alternating("valid", router_every, router_steps, accumulate=accumulate_gradients)
    return _mixture("comigs-2g", phases, generalists=2, specialists=0)


def comigs_2s(*, router_every: Count = 30, router_steps: Count = 10, accumulate_gradients: bool = False) -> Method:
    """CoMiGS with two specialists: nothing is shared.

    Source: CoMiGS (Fan et al. 2025, arXiv:2409.13931), section 4.2, ablation.
    Shared: nothing.  Local: attention, 2 specialists per MLP, routers.  Frozen: the base.
    Client: alternating; router steps on validation text.  Server: none.
    Differs from the paper: as ``comigs``.
    """
    phases = alternating("valid", router_every, router_steps, accumulate=accumulate_gradients)
    return _mixture("comigs-2s", phases, generalists=0, specialists=2)


def comigs_1gxs(
    *,
    specialists: ExpertsOfUsers = 3,
    router_every: Count = 30,
    router_steps: Count = 10,
    accumulate_gradients: bool = False,
) -> Method:
    """CoMiGS with one generalist and a number of specialists that each user can afford.

    Source: CoMiGS (Fan et al. 2025, arXiv:2409.13931), section 4.3.
    Shared: attention, 1 generalist per MLP.  Local: each user's specialists, routers.  Frozen: the base.
    Client: alternating; router steps on validation text.  Server: mean over users.
    Differs from the paper: as ``comigs``.  ``specialists`` counts without the generalist: the paper's n_i minus 1.
    """
    phases = alternating("valid", router_every, router_steps, accumulate=accumulate_gradients)
    return _mixture("comigs-1gxs", phases, specialists=specialists)


def comigs_tr(*, router_every: Count = 30, router_steps: Count = 10, accumulate_gradients: bool = False) -> Method:
    """CoMiGS-1G1S for users without validation text: router steps on newly sampled training batches.

    Source: CoMiGS (Fan et al. 2025, arXiv:2409.13931), App. C.2, Table 5 part iii.
    Shared: attention, 1 generalist per MLP.  Local: 1 specialist per MLP, routers.  Frozen: the base.
    Client: alternating; router steps on fresh training batches.  Server: mean over users.
    Differs from the paper: as ``comigs``.
    """
    phases = alternating("train", router_every, router_steps, accumulate=accumulate_gradients)
    return _mixture("comigs-tr", phases)
