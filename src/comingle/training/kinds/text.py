"""Text: users train on random windows, and models are scored by perplexity."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from jaxtyping import Int
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from comingle.config import Recipe
from comingle.data.populations import as_users
from comingle.data.row_files import BadRows
from comingle.data.sources import iterate_documents
from comingle.data.text.reading import ALLOWED_TEXT, TextReader, check_texts, may_be_user_text, require_rows
from comingle.data.text.section import TextSection, UsersRows
from comingle.data.text.streams import UserData, check, pool
from comingle.methods import make
from comingle.methods.base import Method, Phase
from comingle.models.hardware import require_bytes
from comingle.models.model import Model
from comingle.models.personal import LanguageModel, PersonalModel
from comingle.models.scoring import PAD, Gates, Score, evaluation_windows, fixed_windows, random_windows, score_streams
from comingle.training.batch_sources import SCORED_PER_SLOT, AnySplit, AnyUser, BatchSource, Predict
from comingle.training.client import Clients, batch_size
from comingle.training.kinds.base import (
    DataRequest,
    Kind,
    RunData,
    check_on_language,
    count_trainers,
    language_model,
    model_here,
    users_and_trainers,
    with_full_participation,
)
from comingle.training.settings import PassSize, RunPlan, pass_size
from comingle.utils.errors import DataError, RecipeError
from comingle.utils.seeds import generator
from comingle.utils.trees import Tree


class TextBatchSource(BatchSource):
    """Random windows of the token streams of trainers, the owners of the models that are trained.

    Args:
        trainers: Trainers with token streams: each user, or a single one if the method pools the data of all users.
        plan: Settings of the run, in the form that training uses.
        batch_size: Largest number of windows per trainer.
        begin: Token that begins each window; None without one.
    """

    unit = "tokens"

    def __init__(
        self, trainers: Sequence[UserData], plan: RunPlan, batch_size: int, *, begin: int | None = None
    ) -> None:
        """Store the trainers and how to draw windows from their text.

        Args:
            trainers: Owners of the text: the users, or one trainer with the text of all users.
            plan: Plan of the run, with the context length and numbers of local steps.
            batch_size: Largest number of windows of a trainer in one local step.
            begin: Begin-of-text token with which each window starts; None if the base model has none.

        Raises:
            ComingleError: A batch would not fit into memory.
        """
        self.trainers, self.plan, self.batch_size = as_users(trainers), plan, batch_size
        self.begin = begin
        width = plan.training.context + 1  # inputs, and their targets, which are shifted by one token
        batch_bytes = 8 * batch_size * width  # int64
        require_bytes(f"training.batch_size: {batch_size:,} windows of {width:,} tokens", batch_bytes)
        self._cached_windows: dict[int, Int[Tensor, "windows window"]] = {}
        """Cache: the text of a trainer, by number, cut into windows."""

    def pass_size(self, device: torch.device, columns: int) -> PassSize:
        """Return how many users and sequences one forward and backward pass takes, so that activations fit into memory.

        Args:
            device: Device of the model.
            columns: Not used, as activations need more memory than trained parameters.
        """
        return pass_size(self.plan, device, self.batch_size)

    def steps(self, trainer: int) -> int:
        """Return the number of local steps of a trainer in one round."""
        return self.plan.local_steps_of(self.trainers[trainer].name)

    @property
    def most_steps(self) -> int:
        """Largest number of local steps of any user of the run, on this machine or elsewhere."""
        return self.plan.training.most_local_steps

    def trained_amount(self, trainer: int) -> int:
        """Return the number of tokens that a trainer trains on in one round."""
        return self.steps(trainer) * self.size_of(trainer) * self.plan.training.context

    def draw(
        self, trainers: Sequence[int], phase: Phase, round_number: int, step: int, repeat: int
    ) -> Int[Tensor, "users batch window"]:
        """Return a batch of random windows for each trainer, ``context + 1`` tokens wide: inputs and their targets.

        Batches of trainers with a smaller batch size are padded with windows of ``PAD``.

        Args:
            trainers: Numbers of the users who train (a single number if one model is trained on all users' data).
            phase: Phase that the batches are for; decides whether windows come from training or validation text.
            round_number: The round, counted from 0.
            step: Local step within the round; -1 before the first one.
            repeat: Number of the optimizer step of the phase within the local step.
        """
        windows_by_trainer = []
        for number in trainers:
            trainer = self.trainers[number]
            random = generator(self.plan.seed, trainer.name, round_number, phase.purpose, step, repeat)
            windows = random_windows(
                trainer.valid if phase.stream == "valid" else trainer.train,
                count=self.size_of(number),
                context=self.plan.training.context,
                generator=random,
                begin=self.begin,
            )
            windows_by_trainer.append(windows)
        batch_sizes = {len(windows) for windows in windows_by_trainer}
        if len(batch_sizes) == 1:
            return torch.stack(windows_by_trainer)
        return pad_sequence(windows_by_trainer, batch_first=True, padding_value=PAD)

    def examples(self, trainer: int) -> int:
        """Return the number of a trainer's examples for example-level privacy: disjoint windows of its text."""
        return len(self._windows(trainer))

    def _windows(self, trainer: int) -> Int[Tensor, "windows window"]:
        """Return the training text of a trainer, cut into disjoint windows; cached."""
        if trainer not in self._cached_windows:
            stream, context = self.trainers[trainer].train, self.plan.training.context
            self._cached_windows[trainer] = fixed_windows(stream, context=context, begin=self.begin)
        return self._cached_windows[trainer]

    def examples_at(
        self, trainers: Sequence[int], indices: Int[Tensor, "users batch"], round_number: int
    ) -> Int[Tensor, "users batch window"]:
        """Return the windows at some indices of each trainer's text, which is cut into disjoint windows.

        Args:
            trainers: Numbers of the users who train (a single number if one model is trained on all users' data).
            indices: Indices of windows; ``PAD`` gives a window of ``PAD``.
            round_number: Not used, as text is not augmented.
        """
        windows_by_trainer = []
        for trainer, indices_of_trainer in zip(trainers, indices, strict=True):
            valid_indices = indices_of_trainer.clamp(min=0)  # ``PAD`` is negative
            windows_by_trainer.append(self._windows(trainer)[valid_indices])
        is_padding = (indices == PAD).unsqueeze(2)
        return torch.stack(windows_by_trainer).masked_fill(is_padding, PAD)

    def sweep(self, trainers: Sequence[int], round_number: int) -> Iterator[Int[Tensor, "users batch window"]]:
        """Yield a batch of random training windows for each local step of a round; they differ from those trained on.

        A trainer that takes fewer local steps than others gets windows of ``PAD`` after its last step.

        Args:
            trainers: Numbers of the users who train (a single number if one model is trained on all users' data).
            round_number: The round, counted from 0.
        """
        num_steps = torch.tensor([self.steps(trainer) for trainer in trainers])
        phase = Phase(roles=frozenset())  # reads training text and trains no roles
        for step in range(int(num_steps.max())):
            # Steps that train have repeats from 0, so -1 gives other random windows.
            windows = self.draw(trainers, phase, round_number, step, repeat=-1)
            has_ended = step >= num_steps  # (users,)
            yield windows.masked_fill(has_ended.view(-1, 1, 1), PAD)

    def held_out(self, trainers: Sequence[int]) -> Iterator[Int[Tensor, "users batch window"]]:
        """Yield batches of the windows of all validation texts; trainers with fewer windows get windows of ``PAD``."""
        context = self.plan.training.context
        windows_by_trainer = []
        for trainer in trainers:
            stream = self.trainers[trainer].valid
            windows_by_trainer.append(evaluation_windows(stream, context=context, begin=self.begin))
        most_windows = max(len(windows) for windows in windows_by_trainer)
        for start in range(0, most_windows, self.batch_size):
            batch = torch.full((len(trainers), self.batch_size, context + 1), PAD, dtype=torch.int64)
            for row, windows in enumerate(windows_by_trainer):
                next_windows = windows[start : start + self.batch_size]
                batch[row, : len(next_windows)] = next_windows
            yield batch

    def loss_counts(self, drawn: Int[Tensor, "users batch window"]) -> Int[Tensor, " users"]:
        """Return the number of targets of each user."""
        targets = drawn[..., 1:]
        return (targets >= 0).flatten(1).sum(1)  # hidden tokens and padding are negative

    def score(
        self,
        predict: Predict,
        splits: Sequence[AnySplit],
        model_numbers: Sequence[int],
        pass_size: PassSize,
        gates: Gates | None,
    ) -> list[Score]:
        """Return the losses of whole token streams, in which each token is scored once, in windows of the context.

        Args:
            predict: Returns the losses of a batch under several models; see ``Predict``.
            splits: Token streams to score.
            model_numbers: For each stream, the number of the model that scores it.
            pass_size: Number of users and sequences in one training pass; scoring passes have as many sequences.
            gates: Collects the gates of routers; None if there are none.
        """
        # A pass has ``slots`` slots of ``batch`` windows each; one model scores all windows of a slot.
        batch, slots = pass_size.slots(SCORED_PER_SLOT)
        context = self.plan.training.context
        return score_streams(
            predict, splits, model_numbers, batch=batch, slots=slots, gates=gates, context=context, begin=self.begin
        )


class LanguageKind(Kind):
    """Base of the kinds whose users train a language model."""

    def check(self, recipe: Recipe, method: Method) -> None:
        """Check that the method supports language models; mixtures of whole models are for nets."""
        check_on_language(recipe, method)

    def personal(self, name: str, model: Model, tensors: Tree, row: int) -> PersonalModel:
        """Return the trained model of one user, which generates text; see :meth:`Kind.personal`."""
        return PersonalModel(name=name, model=cast(LanguageModel, model), tensors=tensors, row=row)

    def known_names(
        self, recipe: Recipe, source: UsersRows | None, read_owners: Callable[[], Iterable[str]], unread: str
    ) -> tuple[str, ...]:
        """Return the names of the users, from the recipe or from the rows of its dataset.

        Args:
            recipe: Settings of the run.
            source: Dataset of the recipe, if it has one. Its ``users`` are names, or the number of users to read.
            read_owners: Yields the name of the user of each row; called only if nothing else has names.
            unread: What the error's advice calls the data that cannot be read: "text" or "rows".

        Raises:
            DataError: The rows cannot be read.
        """
        if source is None:
            return tuple(recipe.data.names)
        if isinstance(source.users, list):
            return tuple(source.users)
        try:
            names = tuple(dict.fromkeys(read_owners()))  # without duplicates
        except DataError as error:
            advice = f"to count costs without the {unread}, give the number of users: --users N"
            raise DataError(f"{error}; {advice}") from None
        return names[: source.users]


class TextKind(LanguageKind):
    """Text as token streams."""

    name, user, accepted_data = "text", UserData, ALLOWED_TEXT

    def check(self, recipe: Recipe, method: Method) -> None:
        """Check the method, and refuse to select the best round by validation text that is also trained on."""
        super().check(recipe, method)
        trains_on_validation_text = section(recipe).train_on_valid
        if trains_on_validation_text and recipe.evaluation.select == "best":
            why = "needs validation text that is not trained on, but data.train_on_valid trains on it"
            raise RecipeError(f"evaluation.select: best {why}; allowed: last")

    def reader(self, request: DataRequest) -> TextReader:
        """Return a reader of each user's documents, from the recipe's files or as a program passes them.

        Args:
            request: The recipe, the documents that a program passes (``given``), and whether the run needs validation
                data.
        """
        recipe = request.recipe
        return TextReader(
            section(recipe),
            recipe.data_seed,
            request.load_base,
            context=recipe.training.context,
            validates=request.validates,
            given=request.given,
        )

    def accepts(self, data: Any, options: Mapping[str, Any]) -> bool:
        """Return whether ``data`` is documents, a table with a column of them, a path, or splits of these."""
        return may_be_user_text(data)

    def model(self, recipe: Recipe, run_data: RunData, plan: RunPlan) -> Model:
        """Return the model that all users train; it is compiled only if the run has enough training tokens.

        Args:
            recipe: Settings of the run.
            run_data: Base model and users of the run.
            plan: Plan of the run, with its numbers of rounds and local steps.
        """
        assert run_data.base is not None
        num_trainers = count_trainers(run_data, plan.method)
        num_tokens = num_trainers * plan.iterations * plan.training.largest_batch_size * plan.training.context
        return language_model(recipe, run_data.base, plan.method, num_trainers, num_tokens)

    def clients(self, recipe: Recipe, run_data: RunData, plan: RunPlan) -> Clients:
        """Return the users on this machine with the model that they train, after checking the length of their text.

        Args:
            recipe: Settings of the run.
            run_data: Base model and users of the run.
            plan: Settings of the run, in the form that training uses.

        Raises:
            ComingleError: A split is too short for one window, or settings, data and base model do not fit each other.
        """
        assert run_data.base is not None
        plan = with_full_participation(plan)  # if data is pooled, its only trainer takes part in every round
        begin = run_data.base.begin  # the begin-of-text token, if the base model has one
        if not run_data.unread:  # text that is read on demand is checked when it is read
            check(
                run_data.present,
                context=plan.training.context,
                needs_validation=plan.method.client.needs_validation,
                begins=begin is not None,
            )
            for user in run_data.present:
                require_rows(run_data.base, user)  # an embedding row for each token
        # A trainer owns a model that is trained: each user, or a single one if the method pools the data of all users.
        users, trainers = users_and_trainers(self, run_data, plan.method)
        return Clients(
            model_here(self.model(recipe, run_data, plan), run_data),
            plan,
            trainers=trainers,
            users=users,
            batch_source=TextBatchSource(trainers, plan, batch_size(plan, len(users)), begin=begin),
            reads=run_data.checks_validation_data,
            skipped=run_data.skipped,
            skipped_rows=run_data.skipped_rows,
        )

    def pooled(self, users: Sequence[AnyUser]) -> UserData:
        """Return one user with the concatenated streams of all users."""
        return pool(users)

    def names_of(self, recipe: Recipe) -> tuple[str, ...]:
        """Return the names of the users; reads rows only if the recipe does not name them."""
        source = section(recipe).dataset

        def read_owners() -> Iterable[str]:
            """Yield the user of each row."""
            assert source is not None
            documents = iterate_documents(
                source.path,
                user=source.user,
                text=source.text,
                split=source.split,
                name=source.config,
                bad_rows=BadRows("skip"),  # wrong rows are reported when the data is read
            )
            for owner, _split, _document in documents:
                yield owner

        return self.known_names(recipe, source, read_owners, "text")

    def as_text(self, recipes: Sequence[Recipe], users: int | None) -> tuple[list[Recipe], set[str], str]:
        """Return the recipes, which need no conversion as they have text, and the users with too little text.

        Args:
            recipes: Recipes of several methods with the same data, whose costs are to be counted.
            users: Number of users, if it is given; then no text is read, and no user is found to have too little.

        Returns:
            The recipes, the names of the users that a run would leave out, and a message about these.
        """
        if users is not None:
            return list(recipes), set(), ""
        first = recipes[0]  # all recipes have the same data
        small_users, note = check_texts(first, section(first), anybody_validates(recipes))
        return list(recipes), small_users, note


def anybody_validates(recipes: Iterable[Recipe]) -> bool:
    """Return whether the method of one of the recipes needs validation data."""
    methods = (make(recipe.method.name, **recipe.method.settings) for recipe in recipes)
    return any(method.client.needs_validation for method in methods)


def section(recipe: Recipe) -> TextSection:
    """Return the data section of a recipe with text."""
    return cast(TextSection, recipe.data)


KIND = TextKind()
