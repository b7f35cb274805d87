from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from comingle.data.samples.samples import Samples, UserSamples, as_samples, bank_of, check, copy_into_one, epoch
from comingle.models.scoring import PAD
from comingle.utils.errors import DataError
from comingle.utils.seeds import generator


def numbered(first: int, count: int, *, shape: tuple[int, ...] = (2,)) -> Samples:
    """Sample i holds the number ``first + i`` everywhere, and is of class i mod 3."""
    values = torch.arange(first, first + count, dtype=torch.float32)
    return Samples(inputs=values.view(-1, *[1] * len(shape)).repeat(1, *shape), targets=torch.arange(count) % 3)


def user(name: str, first: int = 0, *, train: int = 5, valid: int = 0, test: int = 2) -> UserSamples:
    return UserSamples(
        name=name, train=numbered(first, train), valid=numbered(first, valid), test=numbered(first, test)
    )


@pytest.mark.parametrize(("count", "batch_size"), [(7, 4), (8, 4), (1, 4), (97, 8), (200, 32), (3, 1), (0, 4)])
def test_an_epoch_has_the_batches_of_a_shuffling_loader(count: int, batch_size: int) -> None:
    rows = epoch(count, batch_size, generator("epoch"))
    loader = DataLoader(TensorDataset(torch.arange(count)), batch_size=batch_size) if count else []
    assert (rows != PAD).sum(1).tolist() == [len(batch) for (batch,) in loader]
    assert sorted(rows[rows != PAD].tolist()) == list(range(count))
    assert not (rows[:-1] == PAD).any()  # only the last batch is filled, at its end
    assert rows.flatten()[count:].tolist() == [PAD] * (rows.numel() - count)


def test_epochs_are_shuffled_by_the_generator_alone() -> None:
    source = generator("epochs")
    first, second = epoch(64, 16, source), epoch(64, 16, source)
    assert not torch.equal(first, second)
    assert not torch.equal(first, torch.arange(64).view(4, 16))
    assert torch.equal(first, epoch(64, 16, generator("epochs")))


def test_every_sample_comes_first_equally_often() -> None:
    source = generator("places")
    firsts = torch.stack([epoch(5, 2, source)[0, 0] for _ in range(2000)]).bincount()
    assert firsts.min() > 330
    assert firsts.max() < 470


def test_a_bank_gives_each_user_its_own_samples() -> None:
    users = [user("ann", 100, train=3), user("bob", 200, train=5), user("cem", 300, train=1)]
    bank = bank_of([user.train for user in users])
    indices = torch.tensor([[0, PAD, PAD], [4, 0, 2], [1, 2, PAD]])
    inputs, targets, present = bank.take([2, 1, 0], indices)
    assert inputs[..., 0].masked_fill(~present, -1).tolist() == [[300, -1, -1], [204, 200, 202], [101, 102, -1]]
    assert targets.masked_fill(~present, -1).tolist() == [[0, -1, -1], [1, 0, 2], [1, 2, -1]]
    assert inputs.shape == (3, 3, 2)
    assert present.tolist() == (indices != PAD).tolist()


def test_a_bank_equals_a_loop_over_the_users() -> None:
    source = generator("bank")
    users = [
        UserSamples(
            name=f"u{k}",
            train=Samples(inputs=torch.randn(k + 1, 3, 4, 4, generator=source), targets=torch.randn(k + 1, 2)),
            valid=Samples(inputs=torch.randn(0, 3, 4, 4), targets=torch.randn(0, 2)),
            test=Samples(inputs=torch.randn(1, 3, 4, 4), targets=torch.randn(1, 2)),
        )
        for k in range(6)
    ]
    bank = bank_of([user.train for user in users], dtype=torch.float64)
    rows = [5, 0, 3, 3]
    indices = torch.stack([torch.randint(len(users[row].train), (4,), generator=source) for row in rows])
    inputs, targets, present = bank.take(rows, indices)
    assert inputs.dtype == targets.dtype == torch.float64
    assert present.all()
    for slot, row in enumerate(rows):
        assert torch.equal(inputs[slot], users[row].train.inputs[indices[slot]].double())
        assert torch.equal(targets[slot], users[row].train.targets[indices[slot]].double())


def test_class_numbers_stay_whole_whatever_the_dtype() -> None:
    bank = bank_of([user("ann").train], dtype=torch.float64)
    assert bank.targets.dtype == torch.int64


def test_a_last_user_without_samples_is_never_present() -> None:
    users = [user("ann", valid=2), user("bob")]
    bank = bank_of([user.valid for user in users])
    assert bank.counts.tolist() == [2, 0]
    _, _, present = bank.take([1, 0], torch.tensor([[PAD, PAD], [1, PAD]]))
    assert present.tolist() == [[False, False], [True, False]]


def test_an_index_never_reaches_the_samples_of_somebody_else() -> None:
    bank = bank_of([user("ann", train=3).train, user("bob", train=5).train])
    with pytest.raises(AssertionError, match="beyond the user's samples"):
        bank.take([0], torch.tensor([[3]]))


def test_good_users_pass() -> None:
    check([user("ann"), user("bob", valid=3)], classes=3)
    real = Samples(inputs=torch.randn(4, 2), targets=torch.randn(4, 1))
    check([UserSamples(name="ann", train=real, valid=real.first(0), test=real)])
    assert len(real.first(2)) == 2


def altered(**changes: Samples) -> UserSamples:
    parts = {"train": numbered(0, 5), "valid": numbered(0, 0), "test": numbered(0, 2)} | changes
    return UserSamples(name="bob", **parts)


NAN = Samples(inputs=torch.tensor([[0.0, float("nan")]]), targets=torch.tensor([0]))
REAL = Samples(inputs=torch.zeros(1, 2), targets=torch.zeros(1, 3))
OUTSIDE = Samples(inputs=torch.zeros(2, 2), targets=torch.tensor([-1, 7]))


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (altered(train=numbered(0, 0)), "user 'bob': train .*no samples"),
        (altered(test=numbered(0, 0)), "user 'bob': test .*no samples"),
        (
            altered(train=numbered(0, 4, shape=(3,))),
            r"user 'bob': train inputs .*\(3,\) .*'ann' .*\(2,\)",
        ),
        (
            altered(valid=numbered(0, 4, shape=(2, 2))),
            r"user 'bob': valid inputs .*\(2, 2\) .*'ann' .*\(2,\)",
        ),
        (
            altered(test=REAL),
            r"user 'bob': test targets .*\(3,\) .*'ann' .*\(\)",
        ),
        (altered(test=NAN), "user 'bob': test inputs .*NaN.*allowed: finite"),
        (altered(test=OUTSIDE), "user 'bob': test targets .*-1 to 7; allowed: 0 to 2"),
    ],
)
def test_a_user_who_does_not_fit_is_named(bad: UserSamples, message: str) -> None:
    with pytest.raises(DataError, match=f"^{message}"):
        check([user("ann"), bad], classes=3)


def test_the_kind_of_target_must_fit_the_task() -> None:
    with pytest.raises(DataError, match=r"^user 'ann': train targets .*int64; .*real numbers"):
        check([user("ann")])
    real = UserSamples(name="eva", train=REAL, valid=REAL.first(0), test=REAL)
    with pytest.raises(DataError, match=r"^user 'eva': train targets .*float32; .*whole numbers"):
        check([real], classes=3)


def test_names_and_numbers_are_checked() -> None:
    with pytest.raises(DataError, match=r"^no users"):
        check([], classes=3)
    with pytest.raises(DataError, match=r"^user 'ann': .*two"):
        check([user("ann"), user("ann")], classes=3)
    with pytest.raises(DataError, match=r"^samples: .*2 inputs .*3 targets"):
        Samples(inputs=torch.zeros(2, 1), targets=torch.zeros(3, dtype=torch.int64))


def test_a_single_target_beside_no_inputs_is_refused() -> None:
    with pytest.raises(DataError) as error:
        as_samples(torch.zeros(0, 3), torch.tensor(1.0), "ada")
    assert str(error.value).startswith("ada: ")


def test_rows_of_one_tensor_are_joined_without_a_copy() -> None:
    inputs, targets = torch.randn(3, 4, 2), torch.arange(12).view(3, 4)
    parts = [Samples(inputs=x, targets=y) for x, y in zip(inputs, targets, strict=True)]
    joined = bank_of(parts)
    assert joined.inputs.data_ptr() == inputs.data_ptr()
    assert joined.targets.data_ptr() == targets.data_ptr()
    assert torch.equal(joined.inputs, inputs.flatten(0, 1))
    assert torch.equal(joined.targets, targets.flatten())
    for apart in ([parts[0], parts[2]], [parts[1], parts[0]]):
        bank = bank_of(apart)
        assert bank.inputs.data_ptr() != apart[0].inputs.data_ptr()
        assert torch.equal(bank.inputs, torch.cat([part.inputs for part in apart]))


def test_filled_samples_are_joined_without_a_copy() -> None:
    parts = [user("ann", 100, train=3).train, user("bob", 200, train=5).train]
    filled = copy_into_one(iter(parts), [3, 5])
    joined = bank_of(filled)
    assert joined.inputs.data_ptr() == filled[0].inputs.data_ptr()
    for part, view in zip(parts, filled, strict=True):
        assert torch.equal(part.inputs, view.inputs)
        assert torch.equal(part.targets, view.targets)


def test_samples_become_views_of_a_bank_of_their_dtype() -> None:
    users = [user("ann", 100, train=3), user("bob", 200, train=5)]
    parts, before = [user.train for user in users], [user.train.inputs.clone() for user in users]
    assert bank_of(parts, dtype=torch.float64, moves=True).inputs.dtype == torch.float64
    assert [part.inputs.dtype for part in parts] == [torch.float32] * 2
    bank = bank_of(parts, moves=True)
    assert all(torch.equal(part.inputs, values) for part, values in zip(parts, before, strict=True))
    assert [part.inputs.data_ptr() for part in parts] == [bank.inputs.data_ptr(), bank.inputs[3:].data_ptr()]
    assert parts[1].targets.data_ptr() == bank.targets[3:].data_ptr()
    kept = [user("cem").train, user("dan").train]
    assert bank_of(kept).inputs.data_ptr() != kept[0].inputs.data_ptr()
