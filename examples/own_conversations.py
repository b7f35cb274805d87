"""Train on your own chat logs: rows with ``messages``, or with a prompt and a response.

The loss is on the responses. The base's chat template is used if there is one.
"""

import comingle

CITIES = {"Oslo": "Norway", "Rome": "Italy", "Cairo": "Egypt", "Lima": "Peru", "Quito": "Ecuador", "Accra": "Ghana"}


def with_messages(greeting: str) -> list[dict]:
    """Return conversations of two turns, as chat applications store them."""
    return [
        {
            "messages": [
                {"role": "user", "content": f"{greeting}! Where is {city}?"},
                {"role": "assistant", "content": f"{city} is in {country}."},
                {"role": "user", "content": "Thanks. Is it far?"},
                {"role": "assistant", "content": f"{country} is not near."},
            ]
        }
        for city, country in CITIES.items()
        for _ in range(5)
    ]


def with_prompts() -> list[dict]:
    """Return single questions with their answers."""
    return [
        {"prompt": f"What is {n} plus {m}?", "response": f"It is {n + m}."} for n in range(1, 7) for m in range(1, 6)
    ]


def main() -> None:
    """Train with CoMiGS and score each user's model on unseen responses."""
    recipe = {
        "base": "random:llama?layers=1&dim=32",
        "adapters": {"rank": 4},
        "data": {"split": {"valid": 0.2, "test": 0.2}},
        "training": {"rounds": 4, "local_epochs": 1, "batch_size": 4, "context": 256},
    }
    users = {"ada": with_messages("Hello"), "ben": with_messages("Good morning"), "cem": with_prompts()}
    run = comingle.run(recipe, users=users, method={"name": "comigs-1g1s", "router_every": 5})
    print(run)
    for record in run.records():
        print(f"{record['user']}: test perplexity of responses {record['test_perplexity']:.1f}")


if __name__ == "__main__":
    main()
