"""The protocol alone: what the server gets is uniform, what comes out is the sum, and too few reveal nothing."""

from __future__ import annotations

import itertools
import secrets
import sys
from collections.abc import Collection as Container
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import pytest
from scipy.stats import chisquare

from comingle.config.settings import SecureSection, Terms
from comingle.privacy import secure_client
from comingle.privacy.secure_client import Record, Session, pair_mask, read_masked
from comingle.privacy.secure_server import SimulatedSum
from comingle.privacy.secure_sum import Grid, received_bytes, sent_bytes
from comingle.protocol.wire import unpack
from comingle.utils.errors import MessageError, NoSumError, RecipeError

LARGEST = 1000
SURELY = 1e-7
"""An honest server's view has a smaller p once in ten million tests."""


def terms_for(users: int, threshold: int, *, entries: int = 50, word: int = 32, expected: int | None = None) -> Terms:
    names = tuple(f"user {at}" for at in range(users))
    return Terms(
        run="r", round=3, users=names, expected=expected or users, threshold=threshold, word=word, entries=entries
    )


def uploads_for(terms: Terms, seed: int = 0) -> dict[str, np.ndarray]:
    draw = np.random.default_rng(seed)
    signed, unsigned = f"<i{terms.word // 8}", f"<u{terms.word // 8}"
    return {
        name: draw.integers(-LARGEST, LARGEST + 1, terms.entries).astype(signed).view(unsigned) for name in terms.users
    }


def plain_sum(rehearsal: SimulatedSum, names: Container[str]) -> np.ndarray:
    uploads = rehearsal.uploads
    return np.sum([uploads[n].view(f"<i{uploads[n].itemsize}").astype(np.int64) for n in names], 0)


def rehearse(terms: Terms, lost: Container[tuple[str, str]] = (), seed: int = 0) -> SimulatedSum:
    return SimulatedSum(
        terms=terms, uploads=uploads_for(terms, seed), answers=lambda step, name: (step, name) not in lost
    )


def p_uniform(values: np.ndarray, size: int = 256) -> float:
    return float(chisquare(np.bincount(values, minlength=size)).pvalue)


# -------------------------------------------------------------------- the sum


@pytest.mark.parametrize("word", [32, 64])
@pytest.mark.parametrize("seed", range(12))
@pytest.mark.sampled(4)
def test_the_sum_is_that_of_the_survivors_whoever_is_lost_when(seed: int, word: int) -> None:
    """At random: users, threshold, and who is lost in which step, so long as enough are left."""
    draw = np.random.default_rng(seed)
    users = int(draw.integers(3, 9))
    terms = terms_for(users, SecureSection().required_users(users), word=word)
    order = [str(name) for name in draw.permutation(terms.users)]
    steps = ["advertise", "share", "mask", "unmask"]
    lost = {(str(draw.choice(steps)), name) for name in order[: users - terms.threshold]}
    rehearsal = rehearse(terms, lost, seed)
    assert np.array_equal(rehearsal.total(LARGEST), plain_sum(rehearsal, rehearsal.server.survivors))
    gone = {name for step, name in lost if step != "unmask"}
    assert set(rehearsal.server.survivors) == set(terms.users) - gone


@pytest.mark.parametrize("step", ["advertise", "share", "mask", "unmask"])
def test_below_the_threshold_the_round_ends_without_a_sum_in_one_line(step: str) -> None:
    terms = terms_for(6, 4)
    rehearsal = rehearse(terms, {(step, name) for name in terms.users[:3]})
    with pytest.raises(NoSumError, match=f"^round 3: 3 of 6 users .*'{step}'; needed: 4; "):
        rehearsal.total(LARGEST)


def test_somebody_who_masks_something_else_is_noticed() -> None:
    rehearsal = rehearse(terms_for(4, 3, entries=500))
    honest = rehearsal.users["user 1"].mask
    rehearsal.users["user 1"].mask = lambda sealed, upload: honest(sealed, upload) * np.uint32(3)
    with pytest.raises(NoSumError, match=r"^round 3: .*out of range"):
        rehearsal.total(LARGEST)


def test_bytes_are_as_counted_beforehand() -> None:
    rehearsal = rehearse(terms := terms_for(5, 4, entries=999))
    rehearsal.total(LARGEST)
    for counted, found in (
        ([sent_bytes(terms, n, 5) for n in terms.users], rehearsal.received),
        ([received_bytes(terms, n, list(terms.users)) for n in terms.users], rehearsal.sent),
    ):
        assert counted == [sum(len(data) for _, who, data in found if who == name) for name in terms.users]


# -------------------------------------------------------------------- what the server sees


def masked_of(rehearsal: SimulatedSum) -> dict[str, np.ndarray]:
    """What the server got in the third step."""
    terms = rehearsal.terms
    found = {name: unpack(data) for step, name, data in rehearsal.received if step == "mask"}
    return {name: read_masked(got, name, terms.round, terms.entries, terms.word) for name, got in found.items()}


@pytest.mark.parametrize("word", [32, 64])
def test_what_the_server_receives_is_uniform(word: int) -> None:
    """Every masked upload, and the sum of any of them but all, also once the server has taken the own masks off."""
    terms = terms_for(4, 3, entries=20_000, word=word)
    rehearsal = SimulatedSum(terms=terms, uploads={name: np.full(20_000, 7, f"<u{word // 8}") for name in terms.users})
    total = rehearsal.total(LARGEST)
    assert bool((total == 28).all())
    masked, server = masked_of(rehearsal), rehearsal.server
    own = {name: secure_client.mask(server._reconstruct_secret(name), terms.entries, word) for name in terms.users}
    for count in (1, 2, 3):
        for names in itertools.combinations(terms.users, count):
            for seen in (masked, {name: masked[name] - own[name] for name in names}):
                together = np.sum([seen[name] for name in names], 0, dtype=f"<u{word // 8}")
                assert p_uniform(together.view(np.uint8)) > SURELY
    assert bool((np.sum([masked[n] - own[n] for n in terms.users], 0, dtype=f"<u{word // 8}") == 28).all())


def test_the_test_of_uniformity_can_fail() -> None:
    """Of what is not masked."""
    plain = np.random.default_rng(0).normal(0, 1000, 20_000).astype("<i4")
    assert p_uniform(plain.view(np.uint8)) < SURELY


def test_who_is_lost_after_masking_is_not_seen_either() -> None:
    """Its masking key comes out; its own mask never does, so what arrives late stays uniform."""
    terms = terms_for(5, 3, entries=20_000)
    rehearsal = SimulatedSum(terms=terms, uploads={name: np.full(20_000, 7, "<u4") for name in terms.users})
    rehearsal.answers = lambda step, name: (step, name) != ("mask", "user 2")
    rehearsal.total(LARGEST)
    server, late = rehearsal.server, rehearsal.users["user 2"]
    left = late.mask(server.sealed_for("user 2"), rehearsal.uploads["user 2"])
    private = server._reconstruct_secret("user 2")
    for name in server.survivors:
        pair = pair_mask(private, server.public_keys[name][secure_client.KEY_BYTES :], ("user 2", name), terms)
        left = left - pair if name > "user 2" else left + pair
    assert p_uniform(left.view(np.uint8)) > SURELY
    assert bool(
        (left - secure_client.mask(late._derive_secret("own mask"), terms.entries, 32) == 7).all()
    )  # that alone was missing


def test_what_is_sealed_is_uniform_and_for_one_reader() -> None:
    rehearsal = rehearse(terms_for(12, 8))
    rehearsal.total(LARGEST)
    server = rehearsal.server
    sealed = b"".join(one for of in server.sealed_shares.values() for one in of.values())
    assert p_uniform(np.frombuffer(sealed, np.uint8)) > SURELY
    assert len(set(server.public_keys.values())) == 12
    with pytest.raises(MessageError, match="not sealed"):
        rehearsal.users["user 1"]._unseal_shares("user 2", server.sealed_shares["user 2"]["user 3"])


# -------------------------------------------------------------------- who may know what


def test_fewer_than_the_threshold_with_the_server_learn_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """All shares of all but one of them too few; and what they have fits every secret."""
    terms = terms_for(6, 4)
    rehearsal = rehearse(terms)
    rehearsal.total(LARGEST)
    everyone = list(rehearsal.users.values())
    colluders, victim = everyone[:3], everyone[5]
    points = {name: at for at, name in enumerate(rehearsal.server.public_keys, start=1)}
    purposes: tuple[Literal["own mask", "masking"], ...] = ("own mask", "masking")
    for purpose in purposes:
        secret = victim._derive_secret(purpose)
        held = {points[user.name]: user._share_of(victim.name, purpose) for user in everyone}
        assert secure_client.join(held, terms.threshold) == secret
        theirs = {points[user.name]: held[points[user.name]] for user in colluders}
        with pytest.raises(MessageError, match="3 shares; needed: 4"):
            secure_client.join(theirs, terms.threshold)
        for any_other in (bytes(32), secrets.token_bytes(32)):
            assert secure_client.join(theirs | {6: completed(theirs, any_other, 6)}, 4) == any_other


def test_colluders_and_the_server_see_the_sum_of_the_honest_and_nothing_of_one() -> None:
    """Off each honest upload comes all that they know: its own mask, which was opened, and the masks that it has in
    common with each of them. What is left is uniform, of one and of any two; of all three it is their sum."""
    terms = terms_for(6, 4, entries=20_000)
    rehearsal = SimulatedSum(terms=terms, uploads={name: np.full(20_000, 7, "<u4") for name in terms.users})
    rehearsal.total(LARGEST)
    server, masked = rehearsal.server, masked_of(rehearsal)
    colluders, honest = terms.users[:3], terms.users[3:]
    left = {}
    for name in honest:
        known = secure_client.mask(server._reconstruct_secret(name), terms.entries, terms.word)
        for other in colluders:
            private = rehearsal.users[other]._derive_secret("masking")
            pair = pair_mask(private, server.public_keys[name][secure_client.KEY_BYTES :], (other, name), terms)
            known = known + pair if name < other else known - pair
        left[name] = masked[name] - known
    for count in (1, 2):
        for names in itertools.combinations(honest, count):
            together = np.sum([left[name] for name in names], 0, dtype="<u4")
            assert p_uniform(together.view(np.uint8)) > SURELY
    assert bool((np.sum([left[name] for name in honest], 0, dtype="<u4") == 21).all())


def completed(held: dict[int, bytes], secret: bytes, point: int) -> bytes:
    """The share with which some others, of which one is missing, would be those of any secret."""
    known = {0: int.from_bytes(secret)} | {at: int.from_bytes(one) for at, one in held.items()}
    value = 0
    for at, y in known.items():
        above = below = 1
        for other in known:
            if other != at:
                above, below = above * (point - other) % secure_client.PRIME, below * (at - other) % secure_client.PRIME
        value += y * above * pow(below, -1, secure_client.PRIME)
    return (value % secure_client.PRIME).to_bytes(secure_client.SHARE_BYTES)


def test_shares_of_one_secret_are_uniform() -> None:
    """The bytes below the topmost, of each share and of the difference of two, below a threshold of three."""
    found = [secure_client.split(bytes(32), [1, 2, 3], 3, secrets.token_bytes(32)) for _ in range(800)]
    for values in (
        [int.from_bytes(one[1]) for one in found],
        [int.from_bytes(one[3]) for one in found],
        [int.from_bytes(one[2]) - int.from_bytes(one[1]) for one in found],
    ):
        low = b"".join((value % secure_client.PRIME).to_bytes(33)[1:] for value in values)
        assert p_uniform(np.frombuffer(low, np.uint8)) > SURELY
    two = [secure_client.split(bytes(32), [1, 2, 3], 2, secrets.token_bytes(32)) for _ in range(800)]
    line = {(int.from_bytes(one[2]) - 2 * int.from_bytes(one[1])) % secure_client.PRIME for one in two}
    assert line == {0}  # with a threshold of two, two of them say what the secret is


def test_any_threshold_of_shares_gives_the_secret() -> None:
    secret = secrets.token_bytes(32)
    for threshold in (1, 2, 4):
        made = secure_client.split(secret, range(1, 6), threshold, b"k" * 32)
        for held in itertools.combinations(made, threshold):
            assert secure_client.join({point: made[point] for point in held}, threshold) == secret
    assert secure_client.split(secret, range(1, 6), 3, b"k" * 32) == secure_client.split(
        secret, range(1, 6), 3, b"k" * 32
    )


def test_the_prime_is_one() -> None:
    """Miller and Rabin, to many bases."""
    odd, twos = secure_client.PRIME - 1, 0
    while odd % 2 == 0:
        odd, twos = odd // 2, twos + 1
    for base in range(2, 60):
        found = pow(base, odd, secure_client.PRIME)
        assert found in (1, secure_client.PRIME - 1) or any(
            (found := found * found % secure_client.PRIME) == secure_client.PRIME - 1 for _ in range(twos - 1)
        )


# -------------------------------------------------------------------- each once


def at_unmasking(lost: Container[tuple[str, str]] = ()) -> SimulatedSum:
    """A sum of five that has been masked, and that nobody has unmasked."""
    rehearsal = rehearse(terms_for(5, 3), {("unmask", name) for name in terms_for(5, 3).users} | set(lost))
    with pytest.raises(NoSumError):
        rehearsal.total(LARGEST)
    return rehearsal


def test_a_user_unmasks_one_sum_of_a_round_and_none_of_too_few() -> None:
    user = at_unmasking().users["user 0"]
    names = list(user.terms.users)
    with pytest.raises(MessageError, match=r"2 users .*allowed: at least 3"):
        user.unmask(names[:2])
    with pytest.raises(MessageError, match="lacks this user"):
        user.unmask(names[1:])
    first = user.unmask(names[:4])
    assert user.unmask(names[:4]) == first
    for others in (names, names[:3], [names[0], *names[2:]]):
        with pytest.raises(MessageError, match=r"unmask of round 3 .*once"):
            user.unmask(others)


def test_one_mask_serves_one_upload() -> None:
    rehearsal = at_unmasking()
    user, server = rehearsal.users["user 1"], rehearsal.server
    sealed, upload = server.sealed_for("user 1"), rehearsal.uploads["user 1"]
    assert np.array_equal(user.mask(sealed, upload), masked_of(rehearsal)["user 1"])
    with pytest.raises(MessageError, match=r"masked of round 3 .*once"):
        user.mask(sealed, upload + np.uint32(1))
    with pytest.raises(MessageError, match=r"mask of round 3 .*once"):
        user.mask({name: one for name, one in sealed.items() if name != "user 4"}, upload)


def test_a_session_that_was_written_down_goes_on_with_the_same_bytes() -> None:
    terms, records = terms_for(3, 2), list[Record]()
    uploads = uploads_for(terms)
    own = Session(terms=terms, name="user 0", seed=secrets.token_bytes(32), save=records.append)
    others = [Session(terms=terms, name=n, seed=secrets.token_bytes(32), save=lambda r: None) for n in terms.users[1:]]
    roster = {user.name: user.advertise() for user in (own, *others)}
    sealed = {user.name: user.share(roster)["user 0"] for user in others}
    once = own.share(roster), own.mask(sealed, uploads["user 0"]), own.unmask(list(terms.users))
    assert [set(record["done"]) for record in records][-1] == {"advertise", "share", "mask", "masked", "unmask"}
    for record in records:
        again = Session.of(record, lambda r: None)
        assert again.advertise() == roster["user 0"]
        assert again.share(roster) == once[0]
        assert np.array_equal(again.mask(sealed, uploads["user 0"]), once[1])
        assert again.unmask(list(terms.users)) == once[2]
    with pytest.raises(MessageError, match=r"unmask of round 3 .*once"):
        Session.of(records[-1], lambda r: None).unmask(["user 0", "user 1"])


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda r: {n: k for n, k in r.items() if n != "user 0"}, "key of user 'user 0'"),
        (lambda r: {**r, "user 0": r["user 1"], "user 1": r["user 0"]}, "key of user 'user 0'"),
        (lambda r: {**r, "eve": bytes(64)}, "unknown users"),
        (lambda r: {**r, "user 1": r["user 2"]}, "with one key"),
        (lambda r: dict(list(r.items())[:2]), "2 users .*allowed: at least 3"),
    ],
)
def test_a_roster_that_is_not_the_rounds_is_refused(change: Any, why: str) -> None:
    terms = terms_for(4, 3)
    users = [Session(terms=terms, name=n, seed=secrets.token_bytes(32), save=lambda r: None) for n in terms.users]
    roster = {user.name: user.advertise() for user in users}
    with pytest.raises(MessageError, match=why):
        users[0].share(change(roster))
    assert users[0].share(roster)  # which says nothing against the right one


def test_a_key_that_is_none_is_refused_with_the_name_of_its_user() -> None:
    terms = terms_for(4, 3)
    users = [Session(terms=terms, name=n, seed=secrets.token_bytes(32), save=lambda r: None) for n in terms.users]
    roster = {user.name: user.advertise() for user in users}
    with pytest.raises(MessageError, match=r"^secure aggregation: .*key of user 'user 2'$"):
        users[0].share({**roster, "user 2": bytes(64)})


def test_a_user_who_is_listed_twice_is_named() -> None:
    message = secure_client.survivors_message("user 0", 3, ["user 0", "user 2", "user 2"])
    with pytest.raises(MessageError, match=r"^secure aggregation: user 'user 2' .*round 3"):
        secure_client.read_survivors(message, "user 0", 3)


def test_steps_are_taken_in_their_order() -> None:
    terms = terms_for(3, 2)
    user = Session(terms=terms, name="user 0", seed=bytes(32), save=lambda record: None)
    with pytest.raises(MessageError, match=r"has not shared"):
        user.unmask(["user 0", "user 1"])
    with pytest.raises(MessageError, match="has not advertised"):
        user.mask({"user 1": bytes(82)}, np.zeros(50, "<u4"))


def test_keys_of_another_round_or_run_mask_otherwise() -> None:
    """What two users have in common is bound to all terms of the sum, so no mask is ever used for another."""
    terms = terms_for(3, 2)
    one, two = secrets.token_bytes(32), secrets.token_bytes(32)
    pair = "user 0", "user 1"
    first = pair_mask(one, secure_client.public_of(two), pair, terms)
    assert np.array_equal(first, pair_mask(two, secure_client.public_of(one), pair[::-1], terms))
    for other in (replace(terms, round=4), replace(terms, run="s"), replace(terms, threshold=3)):
        assert not np.array_equal(first, pair_mask(one, secure_client.public_of(two), pair, other))


def test_without_the_package_it_is_said_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    secure_client._primitives.cache_clear()
    monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives.hashes", None)
    with pytest.raises(RecipeError, match=r"^privacy.secure_aggregation: .*cryptography.*'comingle\[flower\]'"):
        secure_client.derive(bytes(32), "anything")


# -------------------------------------------------------------------- settings


def test_two_sums_of_one_round_would_need_somebody_twice() -> None:
    for threshold in (0.51, 0.66, 1.0):
        for users in range(3, 200):
            least = SecureSection(threshold=threshold).required_users(users)
            assert 2 * least > users
            assert 2 <= least <= users


def test_a_sum_fills_at_most_half_of_its_numbers() -> None:
    for bits, users in itertools.product((16, 24, 32), (1, 2, 3, 100, 127, 128, 129, 70_000)):
        word = SecureSection(bits=bits).word_bits(users)
        assert users * Grid(bound=1.0, bits=bits).largest < 2 ** (word - 2)
    assert SecureSection(bits=24).word_bits(100) == 32
    assert SecureSection(bits=24).word_bits(129) == 64
