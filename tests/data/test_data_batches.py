from __future__ import annotations

import pytest
import torch

from comingle.models.scoring import PAD, count_targets, evaluation_windows, hide, inputs_of, prompt_ends, random_windows
from comingle.utils.seeds import generator


def make_stream(tokens: int) -> torch.Tensor:
    return torch.arange(100, 100 + tokens, dtype=torch.int32)


def test_random_windows_are_runs_of_the_stream():
    windows = random_windows(make_stream(50), count=64, context=8, generator=generator("train", 0))
    assert windows.shape == (64, 9)
    assert windows.dtype == torch.int64
    assert torch.equal(windows, windows[:, :1] + torch.arange(9))


def test_random_windows_start_uniformly_at_every_valid_place():
    windows = random_windows(make_stream(12), count=7000, context=5, generator=generator("train", 0))
    starts, counts = torch.unique(windows[:, 0] - 100, return_counts=True)
    assert starts.tolist() == [0, 1, 2, 3, 4, 5, 6]  # the last window ends with the last token
    assert counts.min() > 850
    assert counts.max() < 1150


def test_a_stream_of_one_window_gives_it_every_time():
    windows = random_windows(make_stream(6), count=3, context=5, generator=generator("train", 0))
    assert windows.tolist() == [list(range(100, 106))] * 3


def test_random_windows_follow_the_generator_alone():
    first = random_windows(make_stream(500), count=4, context=8, generator=generator("anna", 3, "train"))
    again = random_windows(make_stream(500), count=4, context=8, generator=generator("anna", 3, "train"))
    other = random_windows(make_stream(500), count=4, context=8, generator=generator("anna", 4, "train"))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_a_generator_goes_on_from_batch_to_batch():
    stream, source = make_stream(500), generator("anna")
    first, second = (random_windows(stream, count=4, context=8, generator=source) for _ in range(2))
    assert not torch.equal(first, second)


@pytest.mark.parametrize("context", [1, 4, 7, 128])
@pytest.mark.parametrize("tokens", [2, 3, 5, 8, 9, 10, 29, 128, 129, 130, 257])
def test_every_token_but_the_first_is_a_target_exactly_once_after_its_predecessor(tokens: int, context: int):
    stream = make_stream(tokens)
    windows = evaluation_windows(stream, context=context)
    inputs, targets = windows[:, :-1], windows[:, 1:]
    counted = targets != PAD
    assert targets[counted].tolist() == stream[1:].tolist()
    assert inputs[counted].tolist() == stream[:-1].tolist()
    assert int(counted.sum()) == count_targets(stream) == tokens - 1
    assert windows.shape == (-(-(tokens - 1) // context), context + 1)
    assert windows.dtype == torch.int64
    assert bool(counted.any(dim=1).all())  # no window is all padding


def test_only_the_end_of_the_last_window_is_padded():
    windows = evaluation_windows(make_stream(7), context=4)
    assert windows.tolist() == [[100, 101, 102, 103, 104], [104, 105, 106, PAD, PAD]]


def test_evaluation_windows_do_not_share_memory():
    stream = make_stream(9)
    windows = evaluation_windows(stream, context=4)
    windows[0, -1] = 7
    assert windows[1, 0] == 104
    assert stream[4] == 104


@pytest.mark.parametrize("tokens", [0, 1])
def test_a_stream_without_targets_gives_no_window(tokens: int):
    assert evaluation_windows(make_stream(tokens), context=4).shape == (0, 5)
    assert count_targets(make_stream(tokens)) == 0


def test_loss_over_windows_equals_loss_over_the_stream_for_a_model_of_one_token():
    """A bigram model sees one token only, so cutting into windows must not change its loss, pads must add nothing."""
    table = torch.randn(40, 40, generator=generator("table"), dtype=torch.float64)
    stream = torch.randint(40, (101,), generator=generator("stream"), dtype=torch.int32)
    windows = evaluation_windows(stream, context=8)
    inputs, targets = windows[:, :-1].clamp(min=0), windows[:, 1:]
    cut = torch.nn.functional.cross_entropy(table[inputs].flatten(0, 1), targets.flatten(), ignore_index=PAD)
    whole = torch.nn.functional.cross_entropy(table[stream[:-1].long()], stream[1:].long())
    assert cut.item() == pytest.approx(whole.item(), rel=1e-12)


def test_a_prompt_ends_before_the_first_token_that_is_predicted():
    """Where nothing is hidden a window ends with its last input from which something is predicted."""
    prompt = torch.cat([hide(torch.tensor([5, 6, 7])), torch.tensor([8, 9]), torch.full((3,), PAD)])
    turns = torch.cat(
        [hide(torch.tensor([5, 6])), torch.tensor([7]), hide(torch.tensor([8, 9])), torch.tensor([1, 2, 3])]
    )
    text, short = torch.arange(8), torch.cat([torch.arange(4), torch.full((4,), PAD)])
    ends = prompt_ends(torch.stack([prompt, turns, text, short, torch.full((8,), PAD)]))
    assert ends.tolist() == [2, 1, 6, 2, 0]
    assert inputs_of(prompt)[2] == 7
