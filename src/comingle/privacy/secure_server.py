"""The server's side of secure aggregation, and a simulation in one process."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from comingle.config.settings import Terms, no_sum_message
from comingle.privacy import secure_client
from comingle.privacy.secure_client import Session, pair_mask
from comingle.privacy.secure_sum import KEY_BYTES, PUBLIC_KEYS_BYTES
from comingle.protocol.messages import Download, Upload
from comingle.protocol.wire import pack, unpack
from comingle.utils.errors import MessageError, NoSumError


@dataclass(kw_only=True)
class SumCollector:
    """The server's side of one secure sum: the users' keys and shares, and the sum of their masked uploads.

    Args:
        terms: Public terms of the sum, such as its round, users and threshold.
        public_keys: Public keys of the users who advertised.
        sealed_shares: ``sealed_shares[sender][receiver]`` are the encrypted shares from one user for another.
        masked_sum: Sum of the masked uploads.
        survivors: Users whose masked uploads arrived.
        revealed: ``revealed[user][other]`` is the share of the user ``other``'s secret that ``user`` holds.
    """

    terms: Terms
    public_keys: dict[str, bytes] = field(default_factory=dict)
    sealed_shares: dict[str, dict[str, bytes]] = field(default_factory=dict)
    masked_sum: np.ndarray | None = None
    survivors: list[str] = field(default_factory=list)
    revealed: dict[str, dict[str, bytes]] = field(default_factory=dict)

    # ---------------------------------------------------------------- uploads

    def store_keys(self, name: str, public: bytes) -> None:
        """Store a user's public keys.

        Args:
            name: Name of the user.
            public: The two public keys, one after the other.

        Raises:
            MessageError: The keys have a wrong length or are another user's.
        """
        if len(public) != PUBLIC_KEYS_BYTES or public in self.public_keys.values():
            raise MessageError("secure aggregation: keys of the wrong length, or those of another user")
        self.public_keys[name] = public

    def store_sealed_shares(self, name: str, sealed: Mapping[str, bytes]) -> None:
        """Store the encrypted shares of a user's secrets, to pass them on to the other users.

        Args:
            name: The user whose secrets they are.
            sealed: One encrypted pair of shares for each other user, by the user who can decrypt it.
        """
        assert set(sealed) == set(self.public_keys) - {name}
        self.sealed_shares[name] = dict(sealed)

    def add_upload(self, name: str, masked: np.ndarray) -> None:
        """Add a user's masked upload to the sum; single uploads are not stored.

        Args:
            name: Name of the user.
            masked: The upload plus masks, integers modulo ``2^word``.
        """
        assert name in self.sealed_shares, "without shares its mask cannot be removed"
        assert name not in self.survivors, "it has sent an upload before"
        self.masked_sum = masked.copy() if self.masked_sum is None else self.masked_sum + masked
        self.survivors.append(name)

    def store_revealed_shares(self, name: str, revealed: Mapping[str, bytes]) -> None:
        """Store the shares that the user ``name`` has revealed in step "unmask", to reconstruct others' secrets.

        Args:
            name: The user who revealed the shares.
            revealed: Its share of a secret of each user, by that user.
        """
        assert set(revealed) == set(self.sharers)
        self.revealed[name] = dict(revealed)

    # ---------------------------------------------------------------- downloads

    @property
    def sharers(self) -> list[str]:
        """Users who have sealed shares for the others, in the order of ``public_keys``."""
        return [name for name in self.public_keys if name in self.sealed_shares]

    def sealed_for(self, name: str) -> dict[str, bytes]:
        """Return the shares that the other users sealed for the user ``name``, by the user who sealed them."""
        return {other: self.sealed_shares[other][name] for other in self.sharers if other != name}

    def require(self, completed: Sequence[str] | Mapping[str, object], step: str) -> None:
        """Raise an error if too few users have completed a step.

        Args:
            completed: Users who have completed the step, or a mapping with these users as keys.
            step: Name of the step, for the message.

        Raises:
            NoSumError: Fewer users than the threshold have completed it.
        """
        if len(completed) < self.terms.threshold:
            fact = f"{len(completed)} of {self.terms.expected} users completed step {step!r}"
            raise NoSumError(no_sum_message(self.terms.round, fact, self.terms.threshold))

    # ---------------------------------------------------------------- the sum

    def total(self, largest: int) -> np.ndarray:
        """Remove the masks from the sum of masked uploads; return the sum of the survivors' uploads, int64.

        Common masks of two survivors have cancelled in the sum.

        Args:
            largest: Largest magnitude of an entry of any upload.

        Raises:
            NoSumError: Too few users have revealed their shares, or the result is out of range.
        """
        self.require(self.revealed, "unmask")
        assert self.masked_sum is not None
        total = self.masked_sum.copy()
        for name in self.survivors:
            own_mask_seed = self._reconstruct_secret(name)
            total -= secure_client.mask(own_mask_seed, self.terms.entries, self.terms.word)
        dropped_users = [name for name in self.sharers if name not in self.survivors]
        for name in dropped_users:
            self._remove_common_masks(total, name)
        # The unsigned numbers stand for signed integers modulo 2^word.
        signed = total.view(f"<i{total.itemsize}").astype(np.int64)
        largest_in_sum = max(int(signed.max()), -int(signed.min()))
        if largest_in_sum > largest * len(self.survivors):
            raise NoSumError(f"round {self.terms.round}: the result is out of range; a user sent wrong data")
        return signed

    def _remove_common_masks(self, total: np.ndarray, dropped: str) -> None:
        """Remove the masks that each survivor has in common with a user that dropped out after sharing.

        Args:
            total: Sum of the masked uploads, changed in place.
            dropped: Name of the user that dropped out.

        Raises:
            NoSumError: The revealed shares do not give the user's masking key.
        """
        private_key = self._reconstruct_secret(dropped)
        # A user's public keys are concatenated: the first is for sealing, the second for masks.
        if secure_client.public_of(private_key) != self.public_keys[dropped][KEY_BYTES:]:
            raise NoSumError(f"round {self.terms.round}: the shares of user {dropped!r} give another key")
        for survivor in self.survivors:
            public_key = self.public_keys[survivor][KEY_BYTES:]
            common_mask = pair_mask(private_key, public_key, (dropped, survivor), self.terms)
            survivor_has_added_mask = survivor < dropped  # the first of two users by name adds, the other subtracts
            if survivor_has_added_mask:
                total -= common_mask
            else:
                total += common_mask

    def _reconstruct_secret(self, name: str) -> bytes:
        """Reconstruct a secret of the user ``name`` from the shares that other users have revealed.

        It is the seed of the user's own mask if the user is a survivor, else its masking key. A share is the value of
        the secret's polynomial (Shamir) at the point of the user who revealed it.

        Raises:
            NoSumError: There are too few shares, or they belong to no secret.
        """
        points = {user: point for point, user in enumerate(self.public_keys, start=1)}  # the secret is at 0
        shares = {points[user]: shares_of_others[name] for user, shares_of_others in self.revealed.items()}
        try:
            return secure_client.join(shares, self.terms.threshold)
        except MessageError as error:
            raise NoSumError(f"round {self.terms.round}: {error}") from None


Answers = Callable[[str, str], bool]
"""Function of a step and a user's name that returns whether the user answers; if not, it has dropped out."""


@dataclass(kw_only=True)
class SimulatedSum:
    """Simulation of one secure sum in a single process, with real messages.

    Args:
        terms: Public terms of the sum: its round, users, threshold, number of entries and bits of each.
        uploads: Upload of each user, numbers modulo ``2^word``.
        answers: Returns whether a user answers in a step.
        received: Step, user and bytes of each message that the server receives.
        sent: Step, user and bytes of each message that the server sends.
    """

    terms: Terms
    uploads: Mapping[str, np.ndarray]
    answers: Answers = lambda step, name: True
    received: list[tuple[str, str, bytes]] = field(default_factory=list)
    sent: list[tuple[str, str, bytes]] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Create the parties of the protocol: the server, which collects messages, and a session of each user.

        Users draw their secrets from random seeds.
        """
        self.server = SumCollector(terms=self.terms)

        def do_not_save(record: secure_client.Record) -> None:
            pass

        self.users = {
            name: Session(terms=self.terms, name=name, seed=secrets.token_bytes(KEY_BYTES), save=do_not_save)
            for name in self.uploads
        }

    def total(self, largest: int) -> np.ndarray:
        """Run the four steps of the protocol; return the sum of the uploads of the users who answered "mask".

        A step is run with the users who have answered the step before.

        Args:
            largest: Largest magnitude of an entry of any upload, to detect a sum that is out of range.

        Raises:
            NoSumError: Too few users have answered a step.
        """
        server, round_number = self.server, self.terms.round
        for name in self._users_who_answer("advertise", self.users):
            self._run_advertise_step(name, round_number)
        advertisers = list(server.public_keys)
        server.require(advertisers, "advertise")
        for name in self._users_who_answer("share", advertisers):
            self._run_share_step(name, round_number)
        sharers = server.sharers
        server.require(sharers, "share")
        for name in self._users_who_answer("mask", sharers):
            self._run_mask_step(name, round_number)
        survivors = server.survivors
        server.require(survivors, "mask")
        for name in self._users_who_answer("unmask", survivors):
            self._run_unmask_step(name, round_number)
        return server.total(largest)

    def _users_who_answer(self, step: str, names: Iterable[str]) -> list[str]:
        """Return those of some users that answer in a step; the others have dropped out, as clients may.

        Args:
            step: Name of the step: "advertise", "share", "mask" or "unmask".
            names: Names of the users who are asked.
        """
        return [name for name in names if self.answers(step, name)]

    def _run_advertise_step(self, name: str, round_number: int) -> None:
        """Send a user's public keys to the server, which stores them."""
        keys = secure_client.keys_message(name, round_number, self.users[name].advertise())
        message = self._transmit_upload("advertise", name, keys)
        self.server.store_keys(name, secure_client.read_keys(message, name, round_number))

    def _run_share_step(self, name: str, round_number: int) -> None:
        """Send all public keys to a user, and give the server the shares that the user seals for the others."""
        user = self.users[name]
        message = secure_client.all_keys_message(name, round_number, self.server.public_keys)
        request = self._transmit_download("share", name, message)
        public_keys = secure_client.read_all_keys(request, name, round_number, own_keys=user.advertise())
        sealed_shares = user.share(public_keys)
        answer = self._transmit_upload("share", name, secure_client.shares_message(name, round_number, sealed_shares))
        others = [other for other in self.server.public_keys if other != name]
        received_shares = secure_client.read_shares(answer, name, round_number, others, sealed=True)
        self.server.store_sealed_shares(name, received_shares)

    def _run_mask_step(self, name: str, round_number: int) -> None:
        """Send a user the shares sealed for it, and add its masked upload to the server's sum."""
        user, terms = self.users[name], self.terms
        message = secure_client.sealed_shares_message(name, round_number, self.server.sealed_for(name))
        request = self._transmit_download("mask", name, message)
        sealed_shares = secure_client.read_sealed_shares(request, name, round_number)
        masked = user.mask(sealed_shares, self.uploads[name])
        answer = self._transmit_upload("mask", name, secure_client.masked_message(name, round_number, masked))
        received_upload = secure_client.read_masked(answer, name, round_number, terms.entries, terms.word)
        self.server.add_upload(name, received_upload)

    def _run_unmask_step(self, name: str, round_number: int) -> None:
        """Send a user the names of the users in the sum, and give the server the shares that the user reveals."""
        user = self.users[name]
        message = secure_client.survivors_message(name, round_number, self.server.survivors)
        request = self._transmit_download("unmask", name, message)
        revealed = user.unmask(secure_client.read_survivors(request, name, round_number))
        answer = self._transmit_upload("unmask", name, secure_client.shares_message(name, round_number, revealed))
        received_shares = secure_client.read_shares(answer, name, round_number, self.server.sharers, sealed=False)
        self.server.store_revealed_shares(name, received_shares)

    def _transmit_upload(self, step: str, name: str, message: Upload) -> Upload | Download:
        """Simulate the sending of a user's message to the server: pack it, and return the message that arrives.

        The bytes are recorded in ``received``, so that tests can examine and count them.
        """
        packed = pack(message)
        self.received.append((step, name, packed))
        return unpack(packed)

    def _transmit_download(self, step: str, name: str, message: Download) -> Upload | Download:
        """Simulate the sending of the server's message to a user: pack it, and return the message that arrives.

        The bytes are recorded in ``sent``, so that tests can examine and count them.
        """
        packed = pack(message)
        self.sent.append((step, name, packed))
        return unpack(packed)


def simulate_sum(terms: Terms, uploads: Mapping[str, np.ndarray], largest: int) -> np.ndarray:
    """Return the sum of uploads, computed by the secure protocol with all users in this process; no user drops out.

    Args:
        terms: Public terms of the sum: its round, users, threshold, number of entries and bits of each.
        uploads: Upload of each user, numbers modulo ``2^word``.
        largest: Largest magnitude of an entry of any upload.

    Raises:
        NoSumError: There are too few users.
    """
    return SimulatedSum(terms=terms, uploads=uploads).total(largest)
