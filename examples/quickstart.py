"""Train a personal model for each of three users, together and alone.

Run it with ``python examples/quickstart.py``. It takes seconds, on a toy model with random weights.
"""

import comingle

TEXTS = {
    "ada": [f"The cat number {n} sat on a mat and looked at {n + 1} birds in the garden." for n in range(80)],
    "ben": [f"def add_{n}(x):\n    return x + {n}\n" for n in range(80)],
    "cem": [f"{n} apples and {n + 2} pears are {2 * n + 2} pieces of fruit." for n in range(80)],
}
RECIPE = {
    "base": "random:llama?layers=1&dim=32",  # a real one: "smollm2-135m"
    "adapters": {"rank": 4},
    "training": {"rounds": 6, "local_steps": 10, "batch_size": 4, "context": 32},
    "evaluation": {"every": 2},
}


def main() -> None:
    """Train with CoMiGS and alone, compare, and let a user's model generate."""
    together = comingle.run(RECIPE, users=TEXTS, method="comigs-1g1s", progress=True)
    alone = comingle.run(RECIPE, users=TEXTS, method="local")
    before = comingle.run(RECIPE, users=TEXTS, method="pretrained")
    print(together)
    print("\ntest perplexity   untrained   alone   together")
    for first, second, third in zip(before.records(), alone.records(), together.records(), strict=True):
        scores = [record["test_perplexity"] for record in (first, second, third)]
        print(f"{third['user']:15} {scores[0]:11.1f} {scores[1]:7.1f} {scores[2]:10.1f}")
    ada = together.user("ada")
    print(f"\nada's model goes on: {ada.generate('The cat', max_new_tokens=12)!r} (a toy speaks noise)")


if __name__ == "__main__":
    main()
