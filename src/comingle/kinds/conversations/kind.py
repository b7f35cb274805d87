"""Users with conversations: read, put into the base's template, trained on in passes, scored on the responses."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import ceil
from typing import Any, cast

from comingle.config import Recipe
from comingle.config.settings import Training
from comingle.data.conversations.encoding import (
    UserAnswers,
    check_answers,
    check_small,
    count_here,
    encode_users,
    enough,
    pool_answers,
)
from comingle.data.conversations.messages import Columns
from comingle.data.conversations.reading import UserConversations, adopt_users, has_messages, owned_records, read_users
from comingle.data.conversations.section import ConversationsSection
from comingle.data.populations import Crowd
from comingle.data.row_files import BadRows
from comingle.data.samples.samples import SPLITS
from comingle.data.splits import UserText
from comingle.engines.client import Clients
from comingle.engines.users import batch_size
from comingle.kinds.base import LoadBase, Materials, always_there, count_trainers
from comingle.kinds.conversations.feed import AnswerFeed
from comingle.kinds.language import language_model, require_rows
from comingle.kinds.text.kind import LanguageKind, anybody_validates
from comingle.methods import make
from comingle.methods.base import Method
from comingle.models.base import tokenizer_of
from comingle.models.chat_templates import ChatTemplate
from comingle.models.model import Model
from comingle.models.windows import PAD
from comingle.utils.errors import DataError
from comingle.utils.inputs import DATE

NOTE = "Conversations count as long as the context, the most that training on them can cost."
ABSENT_NOTE = f"{NOTE} How many there are is not known, so a round has one batch ({{}})."


TAKEN = (
    "rows with messages, or with prompt and response or what data.prompt and data.response name "
    "(a list, a datasets.Dataset), or {train, valid, test} of these"
)


class AnswersKind(LanguageKind):
    """What kinds have in common whose users' loss is on responses."""

    user = UserAnswers

    def check_enough(self, users: Sequence[UserAnswers], method: Method) -> None:
        """Whether everybody has what the method will use.

        Raises:
            DataError: somebody has not.
        """
        for user in users:
            check_answers(user, needs_validation=method.client.needs_validation)

    def model(self, recipe: Recipe, materials: Materials, method: Method, training: Training) -> Model:
        """How much there is to train on is known of those who are here."""
        assert materials.base is not None
        if isinstance(materials.users, Crowd):
            tokens = training.rounds * training.local_epochs * materials.users.about.get("tokens", 0)
        else:
            read = not materials.unread and materials.present
            tokens = training_tokens(self.trainers(materials, method)[1], training) if read else 0
        return language_model(recipe, materials.base, method, count_trainers(materials, method), tokens)

    def clients(self, recipe: Recipe, materials: Materials, method: Method, training: Training) -> Clients:
        """Batches are as wide as their longest conversation, or all equally wide where tokens' routes are balanced."""
        training = always_there(method, training)
        assert materials.base is not None
        if not materials.unread:
            self.check_enough(materials.present, method)
            for user in materials.present:
                require_rows(materials.base, user)
        users, trainers = self.trainers(materials, method)
        size = batch_size(method, training, len(users))
        even = method.placement.routed and training.balance_weight > 0
        return Clients(
            self.model_here(recipe, materials, method, training),
            method,
            training,
            trainers=trainers,
            users=users,
            feed=AnswerFeed(trainers, training, size, tokenizer=tokenizer_of(materials.base), even=even),
            reads=materials.reads,
            skipped=materials.skipped,
            skipped_rows=materials.skipped_rows,
        )

    def pooled(self, users: Sequence[Any]) -> UserAnswers:
        """The conversations of all."""
        return pool_answers(users)

    def sample(self, user: Any) -> Any:
        """The first of the test set."""
        return user.test.tokens(0)


class ConversationsKind(AnswersKind):
    """Messages, or prompts with responses."""

    name, handed = "conversations", TAKEN

    def read(self, recipe: Recipe, load_base: LoadBase, *, validates: bool) -> Materials:
        """Conversations are read before the base is loaded, as more can be wrong with them."""
        bad = BadRows(section(recipe).on_bad_row)
        return self._encoded(recipe, read_users(section(recipe), recipe.data_seed, bad), load_base, validates, bad)

    def takes(self, data: Any, options: Mapping[str, Any]) -> bool:
        """Rows with messages, or with a prompt and a response, by the names that the section has for them."""
        return has_messages(data, Columns.read(options))

    def adopt(
        self, recipe: Recipe, given: Mapping[str, Any], load_base: LoadBase, *, validates: bool, net: Any = None
    ) -> Materials:
        """Lists of rows, data sets of ``datasets``, either of them by split, or paths of files."""
        bad = BadRows(section(recipe).on_bad_row)
        read = adopt_users(section(recipe), given, recipe.data_seed, bad)
        return self._encoded(recipe, read, load_base, validates, bad)

    def _encoded(
        self, recipe: Recipe, read: Sequence[UserConversations], load_base: LoadBase, validates: bool, bad: BadRows
    ) -> Materials:
        data, base = section(recipe), load_base()
        template = ChatTemplate(tokenizer_of(base), base.date)
        users = encode_users(data, read, template, recipe.training.context, bad)
        users, skipped = enough(data, users, validates)
        texts = tuple(as_text_of(user) for user in read if user.name not in skipped)
        return Materials(
            kind=self, base=base, users=tuple(users), texts=texts, skipped=skipped, skipped_rows=bad.skipped
        )

    def check_enough(self, users: Sequence[UserAnswers], method: Method) -> None:
        """All who have too few are named at once."""
        check_small(users, needs_validation=method.client.needs_validation)

    def settings(self, materials: Materials) -> dict[str, Any]:
        """The date in the base's chat template, where it writes today's."""
        date = None if materials.base is None else materials.base.date
        return {} if date is None else {DATE: date.isoformat()}

    def names_of(self, recipe: Recipe) -> tuple[str, ...]:
        """Rows of a data set are read where it alone knows its users."""
        source = section(recipe).dataset

        def owners() -> Iterator[str]:
            assert source is not None
            return (owner for owner, _ in owned_records(section(recipe), BadRows("skip")))

        return self.known_names(recipe, source, owners, "rows")

    def as_text(self, recipes: Sequence[Recipe], users: int | None) -> tuple[list[Recipe], set[str], str]:
        """Users with text as long as the context, and as many steps of it as the one with most conversations has.

        That is the most that conversations can cost: a batch is as wide as its longest, and none is wider than the
        context. Where their number is out of reach, one batch counts.
        """
        data, batch = section(recipes[0]), recipes[0].training.batch_size
        try:
            counts, small = count_here(recipes[0], data, anybody_validates(recipes))
        except DataError as error:
            if users is None:
                raise
            told = ABSENT_NOTE.format(error)
            return [as_steps(recipe, {"somebody": batch}) for recipe in recipes], set(), told
        return [as_steps(recipe, counts) for recipe in recipes], small, NOTE


def as_steps(recipe: Recipe, counts: Mapping[str, int]) -> Recipe:
    """The recipe with text of its users, and the steps in which so many conversations of each are passed over."""
    pooled = make(recipe.method.name, **recipe.method.settings).placement.pooled
    batches = ceil((sum if pooled else max)(counts.values()) / recipe.training.batch_size)
    text = {"users": dict.fromkeys(counts, "not read")}
    return recipe.with_changes({"data": text, "training.local_steps": max(1, batches) * recipe.training.local_epochs})


def section(recipe: Recipe) -> ConversationsSection:
    """The recipe's data, which is conversations."""
    return cast(ConversationsSection, recipe.data)


def as_text_of(user: UserConversations) -> UserText:
    """Join the messages of each of a user's conversations, to find what is there twice.

    System messages are left out: a user's conversations often share one.
    """
    parts = {
        split: tuple(
            " ".join(m["content"] for m in messages if m["role"] != "system") for _, messages in getattr(user, split)
        )
        for split in SPLITS
    }
    return UserText(name=user.name, **parts)


def training_tokens(trainers: Sequence[UserAnswers], training: Training) -> int:
    """How many tokens trainers who are there in every round train on."""
    every = sum(int((trainer.train.windows != PAD).sum()) for trainer in trainers)
    return training.rounds * training.local_epochs * every


KIND = ConversationsKind()
