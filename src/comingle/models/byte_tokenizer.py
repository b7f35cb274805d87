"""A tokenizer that needs no download: one token per byte, and three more to end, begin and pad a text."""

from __future__ import annotations

from comingle.models.pretrained import PreTrainedTokenizerBase

EOS, BOS, PAD = 256, 257, 258  # ids below are the byte values themselves
NUM_TOKENS = 259


def byte_tokenizer() -> PreTrainedTokenizerBase:
    """Byte-level tokenizer of `NUM_TOKENS` tokens; decoding an encoded text gives the text back, whatever it is."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocab = {character: byte for byte, character in enumerate(_byte_characters())}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|eos|>", "<|bos|>", "<|pad|>"])  # in the order of their ids
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|eos|>",
        bos_token="<|bos|>",
        pad_token="<|pad|>",
        clean_up_tokenization_spaces=False,
    )


def _byte_characters() -> list[str]:
    """The printable character that stands for each byte in byte-level vocabularies (GPT-2's table)."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    spare = iter(range(256, 512))  # the others take the next code points, in order
    return [chr(byte) if byte in printable else chr(next(spare)) for byte in range(256)]
