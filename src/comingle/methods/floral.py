"""FLoRAL: a shared base, and a client-level mixture of federated adapters."""

from __future__ import annotations

from dataclasses import replace

from comingle.methods.base import ROUTERS, Method, Phase
from comingle.methods.mixtures import TRAINED, ClusterSteps, Entropic, WarmUp, client_mixture
from comingle.methods.server import Mean
from comingle.methods.settings import CountOrNone, Models, NotNegative, Positive
from comingle.models.routers import ClientMixture
from comingle.utils.errors import RecipeError

ROUTER_RATE = 0.1
"""Default learning rate of the router: that of the public code; with 2e-3, 20 rounds leave mixtures uniform."""


def floral(
    *,
    clusters: Models = 4,
    temperature: Positive = 1.0,
    noise: NotNegative = 0.0,
    precondition: bool = True,
    centre: bool = False,
    stateless: bool = False,
    warmup_steps: CountOrNone = 0,
    base_server_rate: NotNegative = 1.0,
    adaptor_server_rate: NotNegative = 1.0,
    server_adam_rate: NotNegative = 0.0,
    report_mixture: bool = True,
    per_layer: bool = False,
) -> Method:
    """FLoRAL: all users train a base and C adapter sets, and each user learns its own weights to mix the sets.

    Source: FLoRAL (Almansoori et al. 2024, arXiv:2410.03497), (FML) and Algorithm 1.
    Shared: the base where it is trained, with its running statistics, and C adapters a layer.  Local: one logit for
    each adapter set, and the running statistics of batch norms' adapters.  Frozen: a language model's base.
    Client: local steps on training data, which train base, adapters and router together, the router with its own
    learning rate (``training.router.learning_rate``, 0.1 by default).
    Server: means over users k, of the base with weights p(k), of adapter set c with weights p(k|c) ~ pi_c p(k) (eq. 2),
    where pi are the mixture weights of user k.
    Differs from the paper: users upload their mixture weights (C numbers), which the server needs for p(k|c).  p(k) is
    ``training.weighting``: equal by default, N_k of Algorithm 1 with ``samples`` (or ``tokens``), as in the published
    recipes.  The adapters' factor on the input side starts random and the output side zero, as in LoRA (Hu et al. 2021)
    and the public code; section 3.2 says the reverse.  The paper has no noise; the public code adds uniform noise in
    [0, 1) to the logits in training by default, ours is Gaussian and off.  That code keeps pi_c above 0.01, which stops
    its gradient; we do not.  It reuses the adapters' client learning rate as ``adaptor_server_rate``.  Its server also
    takes steps on routers, which are local here.

    Args:
        clusters: Number C of adapter sets that users mix.
        temperature: Divisor of the router's logits, above 0.
        noise: Standard deviation of Gaussian noise on the router's logits in training.
        precondition: Precondition the adapters' gradients (FLoRAL eq. 36).
        centre: Move the adapters' mean, weighted by how much all users together use each set (p(c)), into the base
            after each exchange (FLoRAL eq. 37).
        stateless: Reset each user's router at the start of each round.
        warmup_steps: Router steps at the start of each round, before the joint ones.
        base_server_rate: Size of the server's step towards the mean of the base; 1 takes the mean.
        adaptor_server_rate: Size of the server's step towards the means of the adapters; 1 takes the means.
        server_adam_rate: Learning rate of Adam on the server, with its model minus the mean of the uploads as gradient;
            0 takes that mean. Betas are 0.9 and 0.999 and epsilon is 1e-8, as in the public code on CIFAR-100. Not with
            ``centre`` or with other server rates than 1.
        report_mixture: Upload how the user mixes the adapters. With ``false`` the server takes plain means of them: not
            in the paper, but what privacy mechanisms and secure sums need.
        per_layer: Use one router for each adapted layer, whose mixture is reported and weighs the means of that layer.
            FLoRAL's section 7 suggests it without details.

    Raises:
        RecipeError: The settings exclude each other.
    """
    server_rates = (base_server_rate, adaptor_server_rate)
    _check_combinations(
        server_rates,
        centre=centre,
        per_layer=per_layer,
        server_adam_rate=server_adam_rate,
        report_mixture=report_mixture,
    )
    mixture = ClientMixture(
        clusters=clusters,
        temperature=temperature,
        noise=noise,
        precondition=precondition,
        centre=centre,
        per_layer=per_layer,
    )
    hooks = (WarmUp(steps=warmup_steps, resets=stateless),) if stateless or warmup_steps else ()
    if report_mixture:
        server = ClusterSteps(
            base_rate=base_server_rate, component_rate=adaptor_server_rate, centre=centre, adam_rate=server_adam_rate
        )
    else:
        server = Mean(adam_rate=server_adam_rate)
    joint_phase = Phase(roles=TRAINED | ROUTERS, optimizer="both")
    method = client_mixture(
        "floral", mixture, phases=(joint_phase,), parts=hooks, server=server, reports=report_mixture
    )
    return replace(method, router_rate=ROUTER_RATE)


def _check_combinations(
    server_rates: tuple[float, float],
    *,
    centre: bool,
    per_layer: bool,
    server_adam_rate: float,
    report_mixture: bool,
) -> None:
    """Check that settings of :func:`floral` do not exclude each other.

    Args:
        server_rates: Sizes of the server's steps towards the means of the base and of the adapters.
        centre: Whether the server moves the adapters' mean into the base.
        per_layer: Whether each adapted layer has its own router.
        server_adam_rate: Learning rate of Adam on the server; 0 for no Adam.
        report_mixture: Whether users upload their mixture weights.

    Raises:
        RecipeError: Two settings exclude each other.
    """
    has_other_rates = server_rates != (1.0, 1.0)
    if centre and per_layer:
        raise RecipeError("method floral: centre: got true with per_layer; allowed: per_layer false")
    if centre and has_other_rates:
        raise RecipeError(f"method floral: centre: got true with server rates {server_rates}; allowed: rates of 1")
    if server_adam_rate and (centre or has_other_rates):
        raise RecipeError(
            f"method floral: server_adam_rate: got {server_adam_rate} with centre {str(centre).lower()} and server "
            f"rates {server_rates}; allowed: centre false and server rates of 1, as Adam has one rate and its step is "
            "not linear in the mean"
        )
    if not report_mixture and (centre or has_other_rates):
        raise RecipeError(
            f"method floral: report_mixture: got false with centre {str(centre).lower()} and server rates "
            f"{server_rates}; allowed: centre false and server rates of 1, as the server takes a plain mean"
        )


def floral_optimal(
    *, clusters: Models = 4, precondition: bool = True, centre: bool = False, server_adam_rate: NotNegative = 0.0
) -> Method:
    """FLoRAL with one adapter set for each true cluster of users, an upper bound for learned routers.

    Source: FLoRAL (Almansoori et al. 2024, arXiv:2410.03497), Table 1, optimal routing.
    Shared: the base where it is trained, with its running statistics, and C adapters a layer.  Local: only adapters'
    running statistics.  Frozen: routers, one-hot; a language model's base.
    Client: steps on the base and on the adapter set of the user's cluster.
    Server: the mean of the base over all users, and of an adapter set over the users of its cluster, or a step of Adam
    towards these means.
    Differs from the paper: means are weighted by ``training.weighting``.  The adapters' factor on the input side starts
    random and the output side zero, where section 3.2 says the reverse.

    Args:
        clusters: Number of true clusters, hence of adapter sets.
        precondition: Precondition the adapters' gradients (FLoRAL eq. 36).
        centre: Move the adapters' mean, weighted by how much all users together use each set (p(c)), into the base
            after each exchange (FLoRAL eq. 37).
        server_adam_rate: Learning rate of Adam on the server, with its model minus the mean of the uploads as gradient;
            0 takes that mean. Not with ``centre``.

    Raises:
        RecipeError: ``server_adam_rate`` is given with ``centre``.
    """
    mixture = ClientMixture(clusters=clusters, optimal=True, precondition=precondition, centre=centre)
    if server_adam_rate and centre:
        raise RecipeError(
            f"method floral-optimal: server_adam_rate: got {server_adam_rate} with centre true; allowed: centre false, "
            "as Adam's step is not linear in the mean"
        )
    server = ClusterSteps(centre=centre, adam_rate=server_adam_rate)
    return client_mixture("floral-optimal", mixture, phases=(Phase(roles=TRAINED),), server=server)


def floral_mfl(*, clusters: Models = 4, precondition: bool = True, centre: bool = False) -> Method:
    """FLoRAL that mixes the losses of C adapter sets instead of the sets, with weights computed from these losses.

    Source: FLoRAL (Almansoori et al. 2024, arXiv:2410.03497), (MFL-WS), eq. 4, 5, 25 and 34.
    Shared: the base where it is trained, with its running statistics, and C adapters a layer.  Local: one logit for
    each adapter set, adapters' running statistics.  Frozen: a language model's base.
    Client: mixture weights pi_c ~ exp(-eta f_c), where f_c is the loss of the downloaded base with adapter set c on all
    of the user's training data and eta the router's learning rate; in the first round pi_c = 1/C.  Then steps of each
    adapter set on its own f_c and of the base on sum_c pi_c f_c, with C passes for each step.
    Server: means over users k, of the base with weights p(k), of adapter set c with weights p(k|c) ~ pi_c p(k), where
    pi are the mixture weights of user k at the start of the round.
    Differs from the paper: for predictions a user mixes the adapters in the weights, as in (FML).  p(k) is
    ``training.weighting``.  The adapters' factor on the input side starts random and the output side zero, where
    section 3.2 says the reverse.  In eq. 5 f_c is the mean loss over a cluster; here, as in C.1, it is the user's own.

    Args:
        clusters: Number C of adapter sets that users mix.
        precondition: Precondition the adapters' gradients (FLoRAL eq. 36).
        centre: Move the adapters' mean, weighted by how much all users together use each set (p(c)), into the base
            after each exchange (FLoRAL eq. 37).
    """
    mixture = ClientMixture(clusters=clusters, at="losses", precondition=precondition, centre=centre)
    return client_mixture("floral-mfl", mixture, phases=(Phase(roles=TRAINED),), parts=(Entropic(),))
