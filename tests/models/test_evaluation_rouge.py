"""ROUGE-1 by hand, against the package rouge-score, and in scripts that the package drops."""

from __future__ import annotations

import math

import pytest

from comingle.data.conversations.scoring import AnswerScore, judge, rouge1, same_words, score_answers, split_words
from comingle.models.scoring import Score

ENGLISH = [
    ("entailment", "entailment"),
    ("neutral", "entailment"),
    ("The cat sat on the mat.", "the cat the dog"),
    ("308", "308 points"),
    ("", "something"),
    ("don't stop, e-mail me!", "Do not stop; e mail ME"),
    ("a a a b", "a b b"),
    ("under_score 3.5%", "under score 35"),
]


@pytest.mark.parametrize(
    ("answer", "reference", "expected"),
    [
        ("entailment", "entailment", 1.0),
        ("Entailment.", " entailment", 1.0),
        ("neutral", "entailment", 0.0),
        ("the answer is neutral", "neutral", 2 * (1 / 4) * 1 / (1 / 4 + 1)),  # P = 1/4, R = 1
        ("a a a b", "a b b", 2 * (2 / 4) * (2 / 3) / (2 / 4 + 2 / 3)),  # a and b once each: P = 2/4, R = 2/3
        ("", "neutral", 0.0),
        ("!?", "...", 0.0),
    ],
)
def test_the_measure_is_what_the_formula_says(answer: str, reference: str, expected: float) -> None:
    assert rouge1(answer, reference) == pytest.approx(expected, abs=1e-15)
    assert rouge1(reference, answer) == rouge1(answer, reference)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("Ein Fluß, 12 Äpfel", ["ein", "fluß", "12", "äpfel"]),
        ("το σπίτι μου", ["το", "σπίτι", "μου"]),
        ("हिन्दी में", ["हिन्दी", "में"]),  # vowel signs are marks, within words
        ("كَتَبَ الولد", ["كَتَبَ", "الولد"]),
        ("我爱北京2008年。", ["我", "爱", "北", "京", "2008", "年"]),
        ("ที่นี่", ["ที่", "นี่"]),  # letters with their vowel and tone
        ("e\u0301te\u0301 ﬁn", ["été", "fin"]),  # composed, and compatibility forms as letters
        ("under_score 3.5", ["under", "score", "3", "5"]),
        ("\u0301", []),
    ],
)
def test_words_of_every_script(text: str, words: list[str]) -> None:
    assert split_words(text) == words
    assert rouge1(text, text) == (1.0 if words else 0.0)


class OurWords:
    """Our words, where the package asks for a tokenizer."""

    def tokenize(self, text: str) -> list[str]:
        return split_words(text)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_package_agrees() -> None:
    scorer = pytest.importorskip(
        "rouge_score.rouge_scorer", reason="PACKAGE ABSENT: pip install rouge-score", exc_type=ImportError
    )
    plain = scorer.RougeScorer(["rouge1"])
    ours = scorer.RougeScorer(["rouge1"], tokenizer=OurWords())
    for answer, reference in ENGLISH:
        assert rouge1(answer, reference) == pytest.approx(plain.score(reference, answer)["rouge1"].fmeasure)
    for answer, reference in [*ENGLISH, ("हिन्दी में है", "वह हिन्दी में"), ("北京在哪里", "在北京"), ("σπίτι", "Σπίτι μου")]:
        assert rouge1(answer, reference) == pytest.approx(ours.score(reference, answer)["rouge1"].fmeasure)


def test_a_label_is_right_but_for_case_and_punctuation() -> None:
    assert same_words(" Neutral.", "neutral")
    assert not same_words("neutral neutral", "neutral")
    assert not same_words("", "neutral")


def test_an_answer_is_judged_beside_its_loss() -> None:
    score = Score(loss_nats=6.0, tokens=4)
    plain = score_answers(score, 2, ("rouge1", "loss"))
    assert plain.measures == {"loss": 1.5}
    assert (plain.mean_loss, plain.samples) == (1.5, 2)
    free = judge(plain, ["the cat", "no"], ["cat", "no"])
    assert free.measures == {"rouge1": pytest.approx((2 / 3 + 1) / 2), "loss": 1.5}
    every = score_answers(score, 2, ("accuracy", "exact_match", "rouge1", "perplexity", "loss_nats"))
    told = judge(every, ["the cat", "no"], ["cat", "no"]).measures
    assert list(told) == ["accuracy", "exact_match", "rouge1", "perplexity", "loss_nats"]
    assert (told["accuracy"], told["exact_match"]) == (0.5, 0.5)
    assert told["perplexity"] == pytest.approx(math.exp(1.5))
    empty = AnswerScore(loss_nats=0.0, tokens=0, samples=0, names=("loss",))
    assert math.isnan(empty.mean_loss)
    assert judge(empty, [], []) == empty
