"""Alternating schemes beside their bounds, and the figures of ``comingle theory``."""

from __future__ import annotations

import dataclasses
import math
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Float
from scipy import linalg
from threadpoolctl import threadpool_limits

from comingle.utils.errors import RunError
from comingle.utils.records import write_json, write_text
from comingle_papers.theory import linear, quadratics
from comingle_papers.theory.claims import VALUE_FLOOR, Claim, Curve, largest_step_ratio, summarise
from comingle_papers.theory.clusters import ClusterSettings, cluster_curves
from comingle_papers.theory.linear import LOSSES
from comingle_papers.theory.quadratics import P2, CoupledSettings, coupled_curves

if TYPE_CHECKING:
    from matplotlib.axes import Axes


F1, EXAMPLE, WIELANDT = "Theorem F.1", "Example 1", "Example 1 by Wielandt's inequality"
EUCLIDEAN = "Example 1 as printed, spectral norm of T"
BLOCK_RATE, JOINT_RATE = "Theorem F.2, by blocks", "Theorem F.2, joint constants"
LOCAL_RATE = "Example 2, slope near the solution"
EIGENVALUE = "Proposition 1, smallest eigenvalue"
UNIFORM = "largest share at the solution: 1 / (N + 1)"


@dataclass(frozen=True, kw_only=True)
class QuadraticSettings:
    """Settings of the quadratics. ``mismatches``: share of the training objective that is drawn anew, from 0 to 1."""

    instances: int
    experts_size: int
    router_size: int
    condition: float
    mismatches: Sequence[float]
    steps: int


@dataclass(frozen=True, kw_only=True)
class LinearSettings:
    """Settings of the linear experts. ``decays`` are multiples of the smallest alpha that satisfies eq. 27."""

    instances: int
    samples: int
    features: int
    specialists: int
    coupling: float
    losses: Sequence[str]
    decays: Sequence[float]
    steps: int


def check_all(
    seed: int,
    quadratic: QuadraticSettings,
    linears: LinearSettings,
    coupled: CoupledSettings,
    clusters: ClusterSettings,
) -> list[Curve]:
    """Run the papers' algorithms on small random problems, and compare their convergence with the papers' bounds.

    CoMiGS minimises over blocks of variables in turn; FLoRAL is local SGD in clusters of clients.

    Args:
        seed: Seed of the random streams.
        quadratic: Settings of the quadratics (CoMiGS).
        linears: Settings of the linear experts (CoMiGS).
        coupled: Settings of the coupled functions (an earlier version of CoMiGS).
        clusters: Settings of the clusters (FLoRAL).

    Raises:
        DivergenceError: scipy did not find a minimum.
    """
    with threadpool_limits(1):  # matrices are so small that waiting for a second thread takes most of the time
        return [
            *_quadratic_curves(seed, quadratic),
            *_linear_curves(seed, linears),
            *coupled_curves(seed, coupled),
            *cluster_curves(seed, clusters),
        ]


def as_json(seed: int, curves: list[Curve]) -> dict[str, object]:
    """Return the content of ``theory.json``: the seed, a summary row for each statement, and all curves.

    Args:
        seed: Seed of the random streams.
        curves: The curves of all problems.
    """
    return {
        "seed": seed,
        "rows": [asdict(row) for row in summarise(curves)],
        "curves": [asdict(curve) for curve in curves],
    }


# ---------------------------------------------------------------- quadratics


def _quadratic_curves(seed: int, settings: QuadraticSettings) -> Iterator[Curve]:
    """Minimise random pairs of quadratics in turn, and yield the curve of each pair and mismatch.

    The mismatch says how much the training objective differs from the validation objective. A pair ("instance") has the
    same validation objective and start for all mismatches.

    Args:
        seed: Seed of the random streams.
        settings: Settings of the quadratics.
    """
    for mismatch in settings.mismatches:
        objectives = "f_valid = f_train" if mismatch == 0 else f"f_valid ≠ f_train, mismatch {mismatch:g}"
        for instance in range(settings.instances):
            rng = np.random.default_rng([seed, 0, instance])  # 0: the random streams of quadratics
            sizes = settings.experts_size, settings.router_size
            valid = quadratics.draw_quadratic(rng, *sizes, settings.condition)
            other = quadratics.draw_quadratic(rng, *sizes, settings.condition)
            train = quadratics.interpolate(valid, other, mismatch)
            start = 3 * rng.standard_normal(settings.experts_size)
            yield quadratic_curve(f"quadratic, {objectives}", instance, valid, train, start, settings.steps)


def quadratic_curve(
    scheme: str,
    instance: int,
    valid: quadratics.Quadratic,
    train: quadratics.Quadratic,
    start: Float[np.ndarray, " experts"],
    steps: int,
) -> Curve:
    """Minimise two quadratics by router and experts in turn, and check Theorem F.1 and Example 1 of CoMiGS.

    The theorem bounds the factor by which a step multiplies distances from the fixed point. Example 1 and Wielandt's
    inequality bound the same factor if both objectives are one function.

    Args:
        scheme: Name of the kind of problem, by which curves are grouped.
        instance: Index of the random problem among those of its kind.
        valid: The validation objective, which the router minimises.
        train: The training objective, which the experts minimise.
        start: The initial experts.
        steps: Number of steps.
    """
    bounds = quadratics.quadratic_constants(valid, train)
    thetas, phis = quadratics.alternate(valid, train, start, steps)
    fixed_experts, fixed_router = quadratics.fixed_point(valid, train)
    # Theorem F.1 measures distances in the norms of the objectives' curvatures.
    experts_distances = quadratics.energy_norms(thetas - fixed_experts, train.experts_block)
    router_distances = quadratics.energy_norms(phis - fixed_router, valid.router_block)
    experts_ratio = largest_step_ratio(experts_distances)
    router_ratio = largest_step_ratio(router_distances)
    is_contraction = bounds.rate < 1  # as Theorem F.1 requires
    theorem_rate = bounds.rate if is_contraction else None
    claims = [
        Claim(statement=f"{F1}, experts", measured=experts_ratio, bound=theorem_rate),
        Claim(statement=f"{F1}, router", measured=router_ratio, bound=theorem_rate),
    ]
    if bounds.same_function:
        # The printed Example 1 bounds the factor in the Euclidean norm: the spectral norm of the step's matrix.
        spectral_norm = float(linalg.norm(quadratics.step_matrix(valid, train), 2))
        claims += [
            Claim(statement=WIELANDT, measured=experts_ratio, bound=bounds.wielandt_rate),
            Claim(statement=EXAMPLE, measured=experts_ratio, bound=bounds.example_rate),
            Claim(statement=EUCLIDEAN, measured=spectral_norm, bound=bounds.example_rate),
        ]
    rates = {F1: theorem_rate, EXAMPLE: bounds.example_rate}
    return Curve(
        scheme=scheme,
        instance=instance,
        residuals=tuple(map(float, experts_distances)),
        claims=tuple(claims),
        rates={statement: rate for statement, rate in rates.items() if rate is not None},
        notes={"lambda_1": bounds.router_lipschitz, "lambda_2": bounds.experts_lipschitz},
    )


# ---------------------------------------------------------------- linear experts


def _linear_curves(seed: int, settings: LinearSettings) -> Iterator[Curve]:
    """Run CoMiGS's alternation on random problems with linear experts; yield a curve for each loss, decay and problem.

    Args:
        seed: Seed of the random streams.
        settings: Settings of the linear experts. ``decays`` are multiples of the smallest weight decay that CoMiGS's
            Proposition 1 allows (eq. 27) for the problem drawn.
    """
    num_experts = settings.specialists + 1
    for loss_name in settings.losses:
        for multiple in settings.decays:
            for instance in range(settings.instances):
                rng = np.random.default_rng([seed, 1, instance])  # 1: the random streams of linear experts
                problem = linear.draw_linear(
                    rng,
                    samples=settings.samples,
                    features=settings.features,
                    num_experts=num_experts,
                    loss=LOSSES[loss_name],
                    decay=1.0,  # replaced below
                    coupling=settings.coupling,
                )
                experts, router = rng.standard_normal((2, settings.features, num_experts))
                decay = multiple * linear.threshold_decay(problem, experts, router)
                problem = dataclasses.replace(problem, decay=decay)
                scheme = f"linear, {loss_name}, α = {multiple:g} × eq. 27"
                yield linear_curve(scheme, instance, problem, experts, router, settings.steps)


def linear_curve(
    scheme: str,
    instance: int,
    problem: linear.LinearProblem,
    experts: linear.Weights,
    router: linear.Weights,
    steps: int,
) -> Curve:
    """Run CoMiGS's alternation on one problem, and check the paper's Theorem F.2 and Proposition 1.

    The residual is ``F - F*``, the objective F (CoMiGS, eq. 25) minus its minimum. The claims are:

    - Theorem F.2: a step multiplies the residual by at most a rate. ``BLOCK_RATE`` is computed from the curvatures of F
      in each block of variables, ``JOINT_RATE`` from those in all variables.
    - Proposition 1: F is strongly convex, so no eigenvalue of its Hessian is below the modulus.
    - At the minimum all N + 1 experts are equal, so all shares are ``1 / (N + 1)``.

    Args:
        scheme: Name of the kind of problem, by which curves are grouped.
        instance: Index of the random problem among those of its kind.
        problem: The samples, the loss, and the weights ``decay`` (alpha) and ``coupling`` (mu) of F.
        experts: The initial experts.
        router: The initial router.
        steps: Number of steps.

    Raises:
        DivergenceError: scipy found no minimum.
    """
    bounds = linear.constants(problem, experts, router)
    descent = linear.alternate(problem, experts, router, steps)
    solution = linear.minimum(problem, near=descent.points[-1])
    minimum = linear.decoupled_objective(problem, solution)  # F*
    residuals = np.array(descent.values) - minimum
    rounding_floor = VALUE_FLOOR * max(1.0, abs(minimum))
    measured_rate = largest_step_ratio(residuals, floor=rounding_floor)
    smallest_eigenvalue = _smallest_eigenvalue(problem, descent.points)
    largest_share = float(solution.shares.max())

    # Claims whose bound is None are not checked: strong convexity is proved only if a modulus is positive.
    is_strongly_convex = bounds.modulus > 0
    modulus = bounds.modulus if is_strongly_convex else None
    is_strongly_convex_in_weights = bounds.modulus_weights > 0  # in experts and router
    uniform_share = 1 / problem.num_experts if is_strongly_convex_in_weights else None
    claims = (
        Claim(statement=BLOCK_RATE, measured=measured_rate, bound=bounds.block_rate),
        Claim(statement=JOINT_RATE, measured=measured_rate, bound=bounds.theorem_rate),
        Claim(statement=EIGENVALUE, measured=smallest_eigenvalue, bound=modulus, at_least=True),
        Claim(statement=UNIFORM, measured=largest_share, bound=uniform_share),
    )
    rates = {
        BLOCK_RATE: bounds.block_rate,
        JOINT_RATE: bounds.theorem_rate,
        LOCAL_RATE: linear.local_rate(problem, solution),  # not a bound: the rate near the solution
    }
    largest_difference_of_experts = float(np.ptp(solution.experts, axis=1).max())
    return Curve(
        scheme=scheme,
        instance=instance,
        residuals=tuple(map(float, residuals)),
        claims=claims,
        rates={statement: rate for statement, rate in rates.items() if rate is not None},
        notes={"alpha": problem.decay, "rho": bounds.rho, "experts_apart": largest_difference_of_experts},
    )


def _smallest_eigenvalue(problem: linear.LinearProblem, points: list[linear.Point]) -> float:
    """Return the smallest eigenvalue of the objective's Hessian (with shares in the simplex) at five points of a run.

    Args:
        problem: The samples, the loss, and the weights ``decay`` (alpha) and ``coupling`` (mu) of the objective F.
        points: Experts, router and shares after each step of the run.
    """
    num_checked = 5  # evenly spaced
    indices = {round(i) for i in np.linspace(0, len(points) - 1, num_checked)}
    hessians = [linear.tangent_hessian(problem, points[i]) for i in indices]
    return min(float(linalg.eigvalsh(hessian).min()) for hessian in hessians)


# Okabe and Ito's colours, which colour-blind readers can tell apart; dashes say the same once more.
STYLES: dict[str, tuple[str, Any]] = {
    F1: ("#D55E00", "--"),
    EXAMPLE: ("#009E73", "-."),
    BLOCK_RATE: ("#E69F00", (0, (5, 1.5))),
    JOINT_RATE: ("#000000", (0, (4, 1, 1, 1, 1, 1))),
    LOCAL_RATE: ("#CC79A7", ":"),
    P2: ("#56B4E9", "--"),
}
MEASURED_COLOUR, OTHER_COLOUR = "#0072B2", "#B0B0B0"
LEAST_ACCURATE = 1e-11
"""Smallest residual, relative to the first, that rounding errors do not distort."""
FLOOR = 1e-15
"""Smallest residual, relative to the first, that is drawn; smaller ones consist of rounding errors alone."""
SETTINGS: dict[Any, Any] = {"svg.hashsalt": "comingle", "svg.fonttype": "none", "font.size": 9, "axes.titlesize": 9}


def draw_residuals(curves: list[Curve], folder: Path) -> list[Path]:
    """Write ``residuals.png`` and ``residuals.svg``: a panel for each kind of problem ("scheme") with its curves.

    Args:
        curves: The curves of all problems.
        folder: The folder to write to.

    Returns:
        The paths of both files.
    """
    import matplotlib as mpl
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    schemes = list(dict.fromkeys(curve.scheme for curve in curves))
    num_columns = min(3, len(schemes))
    num_rows = math.ceil(len(schemes) / num_columns)
    with mpl.rc_context(SETTINGS):
        figure = Figure(figsize=(3.9 * num_columns, 2.9 * num_rows + 0.6), layout="constrained")
        FigureCanvasAgg(figure)
        panels = list(figure.subplots(num_rows, num_columns, squeeze=False).flat)
        for axes, scheme in zip(panels, schemes, strict=False):  # the last panels may have no scheme
            _draw_panel(axes, [curve for curve in curves if curve.scheme == scheme])
        for unused_axes in panels[len(schemes) :]:
            unused_axes.set_axis_off()
        line_by_label = {}
        for axes in panels:
            line_by_label.update(_legend_lines(axes))
        figure.legend(
            line_by_label.values(),
            line_by_label.keys(),
            loc="outside lower center",
            ncols=min(4, 2 * num_columns),
            frameon=False,
        )
        png, svg = folder / "residuals.png", folder / "residuals.svg"
        figure.savefig(png, dpi=150)
        figure.savefig(svg, dpi=150, metadata={"Date": None})  # without date, so that equal results give equal files
    return [png, svg]


def _legend_lines(axes: Axes) -> dict[str, Any]:
    """Return the lines of a panel by their label, for a legend of all panels in which each label occurs once."""
    lines, labels = axes.get_legend_handles_labels()
    return dict(zip(labels, lines, strict=True))


def _draw_panel(axes: Axes, curves: list[Curve]) -> None:
    """Draw the residuals of one kind of problem, one curve for each random problem, on a logarithmic axis.

    The first curve with a proved rate of convergence is highlighted. The others are thin grey lines.

    For each of the highlighted curve's ``rates``, a line shows residuals that every step multiplies by the rate. Its
    label names the theorem or example of the paper that states the rate. ``LOCAL_RATE`` is not proved: it is the slope
    of curves near the solution.

    Args:
        axes: Axes of the panel.
        curves: One curve per random problem.
    """
    curves_with_proved_rate = [curve for curve in curves if set(curve.rates) - {LOCAL_RATE}]
    highlighted = curves_with_proved_rate[0] if curves_with_proved_rate else curves[0]
    for curve in curves:
        if curve is not highlighted:
            residuals = _relative_residuals(curve)[: max(2, _count_visible(curve))]  # a line needs two points
            axes.semilogy(range(len(residuals)), residuals, color=OTHER_COLOUR, linewidth=0.8, label="other instances")

    num_residuals = max(3, _count_visible(highlighted))  # so that lines of predicted rates have some length
    measured = _relative_residuals(highlighted)[:num_residuals]
    for statement, rate in highlighted.rates.items():
        anchor = 0  # step at which the line meets the measured curve
        if statement == LOCAL_RATE:  # as near the solution as rounding errors allow
            anchor = max(step for step, residual in enumerate(measured) if residual > LEAST_ACCURATE)
        prediction = [measured[anchor] * rate ** (step - anchor) for step in range(num_residuals)]
        colour, dashes = STYLES[statement]
        axes.semilogy(range(num_residuals), prediction, linestyle=dashes, color=colour, linewidth=1.8, label=statement)
    marker_interval = max(1, num_residuals // 12)
    style = {"color": MEASURED_COLOUR, "markersize": 4, "linewidth": 1.2, "markevery": marker_interval}
    axes.semilogy(range(len(measured)), measured, "o-", label="measured", **style)
    _format_panel(axes, highlighted, num_residuals)


def _format_panel(axes: Axes, curve: Curve, num_steps: int) -> None:
    """Set limits, labels and title of a panel that shows the residual before every step, relative to the first.

    Args:
        axes: Axes of the panel.
        curve: The highlighted curve; its scheme is the title.
        num_steps: Number of steps to show.
    """
    from matplotlib.ticker import MaxNLocator

    margin = 0.02 * num_steps
    axes.set_xlim(-margin, num_steps - 1 + margin)
    axes.set_ylim(FLOOR / 3, 5)  # a margin around the relative residuals, which fall from 1 to ``FLOOR`` at the least
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_title(curve.scheme.replace(", ", "\n", 1))
    axes.set_xlabel("step")
    # Residuals are distances in these two kinds of problems, and the objective's excess in the others.
    has_distances = curve.scheme.startswith(("quadratic", "coupled"))
    axes.set_ylabel("distance / first" if has_distances else "(F − F*) / first")
    axes.grid(visible=True, color="#E4E4E4", linewidth=0.6)


def _relative_residuals(curve: Curve) -> list[float]:
    """Return residuals divided by the first; values below ``FLOOR`` are set to it, since they are mere rounding."""
    first = curve.residuals[0]
    return [max(value / first, FLOOR) for value in curve.residuals]


def _count_visible(curve: Curve) -> int:
    """Return how many residuals to draw: all up to the first that is as small as rounding errors (``FLOOR``)."""
    relative = _relative_residuals(curve)
    for index, value in enumerate(relative):
        if value <= FLOOR:
            return index + 1
    return len(relative)


FILES = ("recipe.yaml", "theory.json", "residuals.png", "residuals.svg")


def check_folder(folder: Path, *, force: bool) -> None:
    """Check that results may be written to a folder, before they are computed.

    Args:
        folder: The folder to write to.
        force: Whether existing results may be replaced.

    Raises:
        RunError: The path is a file, or the folder holds results without ``force``, holds anything else, or cannot be
            written to.
    """
    if folder.exists() and not folder.is_dir():
        raise RunError(f"{folder}: is a file; --out names a folder")
    names = sorted(path.name for path in folder.iterdir()) if folder.exists() else []
    foreign_names = [name for name in names if name not in FILES]
    if foreign_names:
        raise RunError(
            f"{folder}: contains {foreign_names[0]!r}, which is not one of {', '.join(FILES)}; use another --out"
        )
    if names and not force:
        raise RunError(f"{folder}: exists; --force replaces it, --out names another")
    nearest_existing_folder = next(path for path in (folder, *folder.absolute().parents) if path.is_dir())
    try:
        tempfile.TemporaryFile(dir=nearest_existing_folder).close()
    except OSError as error:
        raise RunError(f"{folder}: cannot be written to: {error.strerror}") from None


def write_folder(folder: Path, recipe: str, results: Mapping[str, object], curves: list[Curve]) -> None:
    """Write ``recipe.yaml``, ``theory.json`` and the figures; replace earlier ones.

    Args:
        folder: The folder to write to.
        recipe: The recipe as YAML.
        results: The content of ``theory.json``.
        curves: The curves to draw.

    Raises:
        RunError: The folder cannot be written to.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_text(folder / "recipe.yaml", recipe)
        write_json(folder / "theory.json", results)
        draw_residuals(curves, folder)
    except OSError as error:
        raise RunError(f"{folder}: cannot be written to: {error.strerror}") from None
