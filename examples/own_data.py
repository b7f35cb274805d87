"""Train on text and a model from your program: lists, splits, tables, files, and a transformers model.

All users have the same sentences in different forms, so they end with nearly the same perplexity.
"""

import tempfile
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import comingle
from comingle.models.random_bases import byte_tokenizer

SENTENCES = [f"On day {n} it rained for {n % 7} hours, and then the sun came out." for n in range(120)]


def tables() -> dict:
    """Return a ``datasets.Dataset``; needs ``pip install "comingle[data]"``."""
    try:
        from datasets import Dataset
    except ImportError:
        return {}
    return {"dora": Dataset.from_dict({"text": SENTENCES, "day": list(range(120))})}


def small_model() -> tuple:
    """Return a small model and tokenizer, in place of ``AutoModelForCausalLM.from_pretrained(...)``."""
    config = LlamaConfig(
        vocab_size=len(byte_tokenizer()),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=4,
    )
    torch.manual_seed(0)
    return LlamaForCausalLM(config), byte_tokenizer()


def main() -> None:
    """Train a loaded model on every form of text."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "cleo.txt"
        file.write_text("\n\n".join(SENTENCES))
        users = {
            "ada": SENTENCES,
            "ben": {"train": SENTENCES[:90], "valid": SENTENCES[90:105], "test": SENTENCES[105:]},
            "cleo": file,
            **tables(),
        }
        recipe = {
            "data": {"split": {"valid": 0.1, "test": 0.1}, "max_test_tokens": 500},  # options; users are passed below
            "training": {"rounds": 4, "local_steps": 10, "batch_size": 4, "context": 32},
        }
        run = comingle.run(recipe, users=users, base=small_model(), method="fedavg")
    print(run)
    for record in run.records():
        tokens, perplexity = record["train_tokens"], record["test_perplexity"]
        print(f"{record['user']:5} {tokens:6,} training tokens, test perplexity {perplexity:6.1f}")


if __name__ == "__main__":
    main()
