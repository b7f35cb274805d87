"""Alternating schemes beside their bounds, and the figures of ``comingle theory``."""

from __future__ import annotations

import dataclasses
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

    CoMiGS minimises over blocks of variables in turn; FLoRAL is local SGD in clusters of clients. Each random problem
    ("instance") has its own random stream.

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

    A curve has the distance from the solution before every step. The mismatch says how much the training objective
    differs from the validation objective. A pair ("instance") has the same random stream, and so the same validation
    objective and start, for all mismatches.

    Args:
        seed: Seed of the random streams.
        settings: Settings of the quadratics.
    """
    for mismatch in settings.mismatches:
        objectives = "f_valid = f_train" if mismatch == 0 else f"f_valid ≠ f_train, mismatch {mismatch:g}"
        for instance in range(settings.instances):
            rng = np.random.default_rng([seed, 0, instance])  # 0: the random streams of quadratics
            sizes = settings.experts_size, settings.router_size, settings.condition
            valid, other = quadratics.draw_quadratic(rng, *sizes), quadratics.draw_quadratic(rng, *sizes)
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

    The theorem bounds the factor by which a step multiplies distances from the fixed point, in the norms of the two
    objectives' curvatures. The curve's residual is the experts' distance in the norm of the training objective. If both
    objectives are one function, Example 1 bounds the same factor. Wielandt's inequality bounds the factor more tightly.
    As printed, Example 1 also bounds the spectral norm of a step's matrix.

    Args:
        scheme: Name of the kind of problem.
        instance: Number of the random problem.
        valid: The validation objective.
        train: The training objective.
        start: The initial experts.
        steps: Number of steps.
    """
    bounds = quadratics.quadratic_constants(valid, train)
    thetas, phis = quadratics.alternate(valid, train, start, steps)
    experts, router = quadratics.fixed_point(valid, train)
    expert_distances = quadratics.energy_norms(thetas - experts, train.experts_block)
    router_distances = quadratics.energy_norms(phis - router, valid.router_block)
    rate = bounds.rate if bounds.rate < 1 else None  # Theorem F.1 is about contractions, whose factor is below 1
    measured = largest_step_ratio(expert_distances)
    claims = [
        Claim(statement=f"{F1}, experts", measured=measured, bound=rate),
        Claim(statement=f"{F1}, router", measured=largest_step_ratio(router_distances), bound=rate),
    ]
    if bounds.same_function:
        spectral_norm = float(linalg.norm(quadratics.composition(valid, train), 2))
        claims += [
            Claim(statement=WIELANDT, measured=measured, bound=bounds.wielandt_rate),
            Claim(statement=EXAMPLE, measured=measured, bound=bounds.example_rate),
            Claim(statement=EUCLIDEAN, measured=spectral_norm, bound=bounds.example_rate),
        ]
    rates = {F1: rate, EXAMPLE: bounds.example_rate}
    return Curve(
        scheme=scheme,
        instance=instance,
        residuals=tuple(map(float, expert_distances)),
        claims=tuple(claims),
        rates={name: value for name, value in rates.items() if value is not None},
        notes={"lambda_1": bounds.router_lipschitz, "lambda_2": bounds.experts_lipschitz},
    )


# ---------------------------------------------------------------- linear experts


def _linear_curves(seed: int, settings: LinearSettings) -> Iterator[Curve]:
    """Yield the curve of a run on random problems with linear experts, for each loss, weight decay and problem.

    Settings give the decay as a multiple of the smallest decay that satisfies the condition of CoMiGS's Proposition 1
    (eq. 27). The smallest decay depends on the problem, so the decay is set after the problem is drawn.

    Args:
        seed: Seed of the random streams.
        settings: Settings of the linear experts.
    """
    for name in settings.losses:
        for multiple in settings.decays:
            for instance in range(settings.instances):
                rng = np.random.default_rng([seed, 1, instance])  # 1: the random streams of linear experts
                problem = linear.draw_linear(
                    rng,
                    samples=settings.samples,
                    features=settings.features,
                    num_experts=settings.specialists + 1,
                    loss=LOSSES[name],
                    decay=1.0,  # replaced below
                    coupling=settings.coupling,
                )
                experts, router = rng.standard_normal((2, settings.features, settings.specialists + 1))
                decay = multiple * linear.threshold_decay(problem, experts, router)
                problem = dataclasses.replace(problem, decay=decay)
                scheme = f"linear, {name}, α = {multiple:g} × eq. 27"
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

    A step optimises the router and the experts, then the shares. The residual is ``F - F*``, the objective F (CoMiGS,
    eq. 25) minus its minimum. The claims are:

    - Theorem F.2: a step multiplies the residual by at most a rate. There are two such bounds, one from constants of
      each block of variables (``BLOCK_RATE``), one from constants of all variables (``JOINT_RATE``).
    - Proposition 1: F is strongly convex, so no eigenvalue of its Hessian is below the modulus.
    - At the minimum all N + 1 experts are equal, so all shares are ``1 / (N + 1)``.

    Args:
        scheme: Name of the kind of problem.
        instance: Number of the random problem.
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
    # F is proved to be strongly convex only if a lower bound on its curvature is positive.
    modulus = bounds.modulus if bounds.modulus > 0 else None
    is_convex_in_experts_and_router = bounds.modulus_weights > 0
    uniform_share = 1 / problem.num_experts if is_convex_in_experts_and_router else None
    largest_share = float(solution.shares.max())
    rates = {
        BLOCK_RATE: bounds.block_rate,
        JOINT_RATE: bounds.theorem_rate,
        LOCAL_RATE: linear.local_rate(problem, solution),  # not a bound: the rate near the solution
    }
    rho = bounds.rho  # largest slope of the loss
    largest_difference_of_experts = float(np.ptp(solution.experts, axis=1).max())
    return Curve(
        scheme=scheme,
        instance=instance,
        residuals=tuple(map(float, residuals)),
        claims=(
            Claim(statement=BLOCK_RATE, measured=measured_rate, bound=bounds.block_rate),
            Claim(statement=JOINT_RATE, measured=measured_rate, bound=bounds.theorem_rate),
            Claim(statement=EIGENVALUE, measured=smallest_eigenvalue, bound=modulus, at_least=True),
            Claim(statement=UNIFORM, measured=largest_share, bound=uniform_share),
        ),
        rates={name: rate for name, rate in rates.items() if rate is not None},
        notes={"alpha": problem.decay, "rho": rho, "experts_apart": largest_difference_of_experts},
    )


def _smallest_eigenvalue(problem: linear.LinearProblem, points: list[linear.Point]) -> float:
    """Return the smallest eigenvalue of the objective's Hessian at the points of a descent.

    The shares are restricted to the simplex. Only five evenly spaced points are checked, as eigenvalues take long.

    Args:
        problem: The samples, the loss, and the weights ``decay`` (alpha) and ``coupling`` (mu) of the objective F.
        points: Experts, router and shares after each step of the descent.
    """
    indices = {round(i) for i in np.linspace(0, len(points) - 1, 5)}
    eigenvalues_of_points = [linalg.eigvalsh(linear.tangent_hessian(problem, points[i])) for i in indices]
    return min(float(eigenvalues[0]) for eigenvalues in eigenvalues_of_points)  # in ascending order


# Okabe and Ito's colours, which colour-blind readers can tell apart; dashes say the same once more.
STYLES: dict[str, tuple[str, Any]] = {
    F1: ("#D55E00", "--"),
    EXAMPLE: ("#009E73", "-."),
    BLOCK_RATE: ("#E69F00", (0, (5, 1.5))),
    JOINT_RATE: ("#000000", (0, (4, 1, 1, 1, 1, 1))),
    LOCAL_RATE: ("#CC79A7", ":"),
    P2: ("#56B4E9", "--"),
}
MEASURED, OTHERS = "#0072B2", "#B0B0B0"
TOUCHES = 1e-11
"""Threshold of the last residual through which the slope near the solution is drawn; rounding distorts smaller ones."""
FLOOR = 1e-15
"""Share of the first residual below which everything is rounding."""
SETTINGS: dict[Any, Any] = {"svg.hashsalt": "comingle", "svg.fonttype": "none", "font.size": 9, "axes.titlesize": 9}


def draw_residuals(curves: list[Curve], folder: Path) -> list[Path]:
    """Write ``residuals.png`` and ``residuals.svg``, with one panel for each algorithm ("scheme").

    A panel has a curve for each random problem ("instance"). The curve shows the residual (distance from the solution,
    or excess of the objective) before every step, relative to the first residual. The first instance with a bound is
    drawn with its predicted rates, the others as thin lines.

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
    columns = min(3, len(schemes))
    rows = -(-len(schemes) // columns)  # rounded up
    with mpl.rc_context(SETTINGS):
        figure = Figure(figsize=(3.9 * columns, 2.9 * rows + 0.6), layout="constrained")
        FigureCanvasAgg(figure)
        grid = figure.subplots(rows, columns, squeeze=False)
        for axes, scheme in zip(grid.flat, schemes, strict=False):  # the last panels may have no scheme
            _draw_panel(axes, [curve for curve in curves if curve.scheme == scheme])
        for axes in list(grid.flat)[len(schemes) :]:
            axes.set_axis_off()
        lines = {label: line for axes in grid.flat for line, label in zip(*_legend_entries(axes), strict=True)}
        figure.legend(
            lines.values(),
            lines.keys(),
            loc="outside lower center",
            ncols=min(4, 2 * columns),  # two below each column of panels, but at most four
            frameon=False,
        )
        paths = [folder / f"residuals.{kind}" for kind in ("png", "svg")]
        for path in paths:  # without date, so that equal results give equal files
            figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else None)
    return paths


def _legend_entries(place: Axes) -> Any:
    """Return the lines of a panel and their labels; matplotlib does not annotate the type."""
    return place.get_legend_handles_labels()


def _draw_panel(axes: Axes, curves: list[Curve]) -> None:
    """Draw the measured residuals of one algorithm on random problems ("instances"), on a logarithmic axis.

    A residual is the distance from the solution, or the excess of the objective. The first instance with a proved rate
    of convergence is drawn with all its predicted rates, the others as thin grey lines. ``LOCAL_RATE`` is not a
    proved rate: it is the slope that curves approach near the solution.

    Args:
        axes: The panel.
        curves: One curve per instance.
    """
    chosen = next((curve for curve in curves if set(curve.rates) - {LOCAL_RATE}), curves[0])
    num_residuals = max(3, _count_visible(chosen))  # so that lines of predicted rates have some length
    for curve in curves:
        if curve is not chosen:
            num_thin = max(2, _count_visible(curve))  # a line needs two points
            axes.semilogy(
                range(num_thin),
                _relative_residuals(curve)[:num_thin],
                color=OTHERS,
                linewidth=0.8,
                label="other instances",
            )
    measured = _relative_residuals(chosen)[:num_residuals]
    for name, rate in chosen.rates.items():
        colour, dashes = STYLES[name]
        # The slope near the solution is drawn through the last residual that is large enough (above TOUCHES) not to be
        # distorted by rounding; other rates are drawn through the first residual.
        start = max(k for k, value in enumerate(measured) if value > TOUCHES) if name == LOCAL_RATE else 0
        prediction = [measured[start] * rate ** (k - start) for k in range(num_residuals)]
        axes.semilogy(range(num_residuals), prediction, linestyle=dashes, color=colour, linewidth=1.8, label=name)
    marker_interval = max(1, num_residuals // 12)
    style = {"color": MEASURED, "markersize": 4, "linewidth": 1.2, "markevery": marker_interval, "label": "measured"}
    axes.semilogy(range(len(measured)), measured, "o-", **style)
    _format_panel(axes, chosen, num_residuals)


def _format_panel(axes: Axes, curve: Curve, num_steps: int) -> None:
    """Set limits, labels and title of a panel that shows the residual before every step, relative to the first.

    Args:
        axes: The panel.
        curve: The curve that is drawn with its predictions; its scheme is the title.
        num_steps: Number of steps to show.
    """
    from matplotlib.ticker import MaxNLocator

    axes.set_ylim(FLOOR / 3, 5)  # a margin below the smallest residual drawn and above the first, which is 1
    axes.set_xlim(-0.02 * num_steps, num_steps - 1 + 0.02 * num_steps)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_title(curve.scheme.replace(", ", "\n", 1))
    axes.set_xlabel("step")
    # Quadratics and coupled functions measure the distance from the fixed point, other schemes the objective's excess.
    is_distance = curve.scheme.startswith(("quadratic", "coupled"))
    axes.set_ylabel("distance / first" if is_distance else "(F − F*) / first")
    axes.grid(visible=True, color="#E4E4E4", linewidth=0.6)


def _relative_residuals(curve: Curve) -> list[float]:
    """Return residuals relative to the first; non-positive ones are set to the floor."""
    return [max(value / curve.residuals[0], FLOOR) for value in curve.residuals]


def _count_visible(curve: Curve) -> int:
    """Return the number of residuals to draw: up to and including the first at the floor, where all is rounding."""
    relative = _relative_residuals(curve)
    return next((k + 1 for k, value in enumerate(relative) if value <= FLOOR), len(relative))


FILES = ("recipe.yaml", "theory.json", "residuals.png", "residuals.svg")


def check_folder(folder: Path, *, force: bool) -> None:
    """Check that results may be written to a folder; write nothing but a temporary file, to see if that is possible.

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
    strange = [name for name in names if name not in FILES]
    if strange:
        raise RunError(f"{folder}: contains {strange[0]!r}, which is not one of {', '.join(FILES)}; use another --out")
    if names and not force:
        raise RunError(f"{folder}: exists; --force replaces it, --out names another")
    existing = next(path for path in (folder, *folder.absolute().parents) if path.is_dir())
    try:  # now, not after the computation
        tempfile.TemporaryFile(dir=existing).close()
    except OSError as error:
        raise RunError(f"{folder}: cannot be written to: {error.strerror}") from None


def write_folder(folder: Path, recipe: str, results: Mapping[str, object], curves: list[Curve]) -> None:
    """Write recipe, results and figures; replace earlier ones.

    Args:
        folder: The folder to write to.
        recipe: The recipe as YAML.
        results: The results as plain data.
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
