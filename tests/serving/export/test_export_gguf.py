"""GGUF files: read back, opened by transformers' own loader, and by llama.cpp where that is installed."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGUFReader, dequantize
from tokenizers import Regex
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from comingle.models.chat_templates import ChatTemplate
from comingle.models.loading import load_base
from comingle.models.random_bases import byte_tokenizer
from comingle.serving.export.gguf import (
    _PRE_TOKENIZERS,
    TokenType,
    chat_template_for_ollama,
    vocabulary,
    write_gguf,
    write_modelfile,
)
from comingle.utils.errors import DataError, RunError
from exporting import IDS, check_same, greedy, own_logits, trained

QWEN3 = "qwen3?dim=256&heads=2"  # transformers' loader takes heads of 128 for granted
PLAIN = [("fedit", "llama"), ("fedit", "gpt2"), ({"name": "floral", "clusters": 2}, QWEN3)]
MIXED = [("comigs-1g1s", "llama"), ({"name": "comigs", "specialists": [0, 2, 1]}, "mistral"), ("fedavg", "qwen3")]
TEXT = "The cat number 12 sat on a mat,\n  é 日本 don't\t1234567"


def read(path: Path) -> dict[str, torch.Tensor]:
    tensors = GGUFReader(path).tensors
    return {t.name: torch.from_numpy(np.copy(dequantize(t.data, t.tensor_type))) for t in tensors}


def opened(folder: Path, **settings: Any) -> Any:
    """By transformers' loader of GGUF files; through ``from_pretrained`` it would ask for accelerate."""
    file = folder / "model.gguf"
    network = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder, gguf_file=file.name, **settings))
    tensors = load_gguf_checkpoint(str(file), return_tensors=True, model_to_load=network)["tensors"]
    missing = network.load_state_dict(tensors, strict=False).missing_keys
    assert set(missing) <= ({"lm_head.weight"} if network.config.tie_word_embeddings else set())
    network.tie_weights()
    return network.eval()


def as_ours(tensors: dict[str, torch.Tensor], like: dict[str, torch.Tensor], heads: dict[str, int]) -> dict[str, Any]:
    """A Mixtral's tensors out of those of a file, by the rules of llama.cpp's converter read backwards."""
    names = {"attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj"}
    names |= {"attn_output": "self_attn.o_proj", "attn_norm": "input_layernorm"}
    names |= {
        "ffn_norm": "post_attention_layernorm",
        "ffn_gate_inp": "mlp.gate",
        "ffn_down_exps": "mlp.experts.down_proj",
    }
    found = {
        "model.embed_tokens.weight": tensors["token_embd.weight"],
        "model.norm.weight": tensors["output_norm.weight"],
        "lm_head.weight": tensors["output.weight"],
    }
    for name, tensor in tensors.items():
        parts = name.split(".")
        if parts[0] != "blk" or parts[2] not in names:
            continue
        if parts[2] in heads:
            tensor = tensor.view(heads[parts[2]], -1, 2, tensor.shape[1]).transpose(1, 2).reshape(tensor.shape)
        found[f"model.layers.{parts[1]}.{names[parts[2]]}{'' if 'exps' in name else '.weight'}"] = tensor
    for layer in {name.split(".")[1] for name in tensors if name.startswith("blk")}:
        both = [tensors[f"blk.{layer}.ffn_{key}_exps.weight"] for key in ("gate", "up")]
        found[f"model.layers.{layer}.mlp.experts.gate_up_proj"] = torch.cat(both, 1)
    assert found.keys() == like.keys()
    return found


@pytest.mark.parametrize(("method", "family"), PLAIN)
@pytest.mark.sampled(1)
def test_transformers_loader_reads_plain_models(federate: Any, tmp_path: Path, method: Any, family: str) -> None:
    person = trained(federate, method, base=f"random:{family}").user("bob")
    person.export(tmp_path / "g", format="gguf")
    check_same(person, opened(tmp_path / "g"))


@pytest.mark.parametrize("family", ["llama", "mistral"])
@pytest.mark.slow
def test_a_mixture_is_read_back_into_the_same_mixtral(federate: Any, tmp_path: Path, family: str) -> None:
    """transformers' loader knows no expert tensors in the architecture llama, so they are put back by hand."""
    method = {"name": "comigs", "specialists": [0, 2, 1]}
    person = trained(federate, method, base=f"random:{family}").user("bob")
    person.export(tmp_path / "g", format="gguf")
    person.export(tmp_path / "t")
    network = AutoModelForCausalLM.from_pretrained(tmp_path / "t")
    tensors = as_ours(read(tmp_path / "g" / "model.gguf"), network.state_dict(), {"attn_q": 4, "attn_k": 2})
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.fill_(float("nan"))
    network.load_state_dict(tensors)
    check_same(person, network)
    fields = GGUFReader(tmp_path / "g" / "model.gguf").fields
    assert fields["llama.expert_count"].contents() == 3
    assert fields["llama.expert_used_count"].contents() == 2


def test_transformers_loader_reads_a_qwen3_mixture(federate: Any, tmp_path: Path) -> None:
    person = trained(federate, "comigs-1g1s", base=f"random:{QWEN3}").user("bob")
    person.export(tmp_path / "g", format="gguf")
    fields = GGUFReader(tmp_path / "g" / "model.gguf").fields
    width = fields["qwen3moe.expert_feed_forward_length"].contents()
    assert width == person.model.base.model.config.intermediate_size
    config = AutoConfig.from_pretrained(tmp_path / "g", gguf_file="model.gguf")
    assert (config.num_experts, config.num_experts_per_tok, config.head_dim) == (2, 2, 128)
    check_same(person, opened(tmp_path / "g", moe_intermediate_size=width))  # which the loader does not read


@pytest.mark.parametrize(("dtype", "kinds"), [("bfloat16", {"F32", "BF16"}), ("q8_0", {"F32", "Q8_0", "BF16"})])
def test_weights_are_rounded_as_asked(federate: Any, tmp_path: Path, dtype: str, kinds: set[str]) -> None:
    person = trained(federate, "comigs-1g1s").user("bob")
    for name in ("float32", dtype):
        person.export(tmp_path / name, format="gguf", dtype=name)
    found = {t.tensor_type.name for t in GGUFReader(tmp_path / dtype / "model.gguf").tensors}
    assert found == kinds
    exact, rounded = (read(tmp_path / name / "model.gguf") for name in ("float32", dtype))
    for name, tensor in exact.items():
        assert (rounded[name] - tensor).norm() <= 0.01 * tensor.norm()
        if tensor.ndim == 1 or "gate_inp" in name:
            assert torch.equal(rounded[name], tensor)
    assert (tmp_path / dtype / "model.gguf").stat().st_size < (tmp_path / "float32" / "model.gguf").stat().st_size


@pytest.mark.parametrize(("family", "why"), [("opt", "type opt; allowed: "), ("gemma3", "type gemma3_text; allowed: ")])
def test_what_llama_cpp_does_not_compute_is_refused(federate: Any, tmp_path: Path, family: str, why: str) -> None:
    person = trained(federate, "fedit", base=f"random:{family}").user("bob")
    with pytest.raises(DataError, match=rf"{why}.*--format transformers"):
        person.export(tmp_path / "g", format="gguf")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("family", "setting", "value"),
    [
        ("gpt2", "scale_attn_weights", False),
        ("gpt2", "scale_attn_by_inverse_layer_idx", True),
        ("qwen3", "attention_bias", True),
    ],
)
@pytest.mark.sampled(1)
def test_an_attention_that_llama_cpp_does_not_compute_is_refused(
    federate: Any, tmp_path: Path, family: str, setting: str, value: bool
) -> None:
    """llama.cpp reads no such setting of GPT-2's, and its Qwen 3 no bias behind the attention."""
    base = unusual(tmp_path / "base", family, setting, value)
    told = rf"user 'bob': .*\({setting}: {str(value).lower()}\).*--format transformers"
    for method in ("fedit", "comigs-1g1s") if family == "qwen3" else ("fedit",):
        person = trained(federate, method, base=base).user("bob")
        with pytest.raises(DataError, match=told):
            person.export(tmp_path / "g", format="gguf")
        assert [path.name for path in tmp_path.iterdir()] == ["base"]
        person.export(tmp_path / method)
        check_same(person, AutoModelForCausalLM.from_pretrained(tmp_path / method))
        shutil.rmtree(tmp_path / method)


def unusual(folder: Path, family: str, setting: str, value: bool) -> str:
    """A base that is unlike others of its family in one setting."""
    base = load_base(f"random:{family}", dtype="float32", device="cpu")
    config = base.model.config
    assert getattr(config, setting) is not value
    setattr(config, setting, value)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    assert base.tokenizer is not None
    base.tokenizer.save_pretrained(folder)
    return str(folder)


# -------------------------------------------------------------------- tokenizers


def test_bytes_and_special_tokens_are_kept() -> None:
    words = vocabulary("bob", byte_tokenizer(), 262)
    assert (words.model, words.pre, words.adds_bos, words.adds_eos) == ("gpt2", "gpt-2", False, False)
    assert words.tokens[ord("A")] == "A"
    assert words.tokens[256:] == ("<|eos|>", "<|bos|>", "<|pad|>", "[UNUSED259]", "[UNUSED260]", "[UNUSED261]")
    assert words.token_types[255:260] == (
        TokenType.NORMAL,
        TokenType.CONTROL,
        TokenType.CONTROL,
        TokenType.CONTROL,
        TokenType.UNUSED,
    )
    assert words.special_ids == {"bos": 257, "eos": 256, "pad": 258}


def learned(split: str) -> PreTrainedTokenizerFast:
    """Byte pairs learned from a few lines, with text split as some family has it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split in ("gpt-2", "smollm"))
    before: list[Any] = []
    if split == "smollm":
        before = [pre_tokenizers.Digits(individual_digits=True)]
    elif split != "gpt-2":
        pattern = next(pattern for pattern, name in _PRE_TOKENIZERS.items() if name == split)
        before = [pre_tokenizers.Split(Regex(pattern), "isolated")]
    tokenizer = Tokenizer(models.BPE(ignore_merges=split == "llama-bpe"))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*before, level]) if before else level
    tokenizer.decoder = decoders.ByteLevel()
    settings = {"vocab_size": 300, "special_tokens": ["<end>"], "show_progress": False}
    trainer = trainers.BpeTrainer(**settings, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator([TEXT, "the mat of the cat, 12 123 1234", "日本 日本"] * 9, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")


SPLITS = ("gpt-2", "smollm", "llama-bpe", "qwen2")


@pytest.mark.parametrize("split", SPLITS)
def test_the_way_of_splitting_text_is_found(split: str) -> None:
    tokenizer = learned(split)
    words = vocabulary("bob", tokenizer, len(tokenizer) + 3)
    assert words.pre == split
    assert len(words.tokens) == len(words.token_types) == len(tokenizer) + 3
    assert words.merges[0].replace(" ", "") in words.tokens


def test_a_tokenizer_that_splits_in_an_unknown_way_is_refused() -> None:
    from tokenizers import pre_tokenizers

    tokenizer = byte_tokenizer()
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Punctuation(), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    with pytest.raises(DataError, match=r"'bob': .*pre-tokenizer.*--format transformers"):
        vocabulary("bob", tokenizer, 259)


def test_sentencepiece_tokens_keep_their_order_of_merging(stories: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(stories)
    words = vocabulary("bob", tokenizer, len(tokenizer))
    spec = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    first, last = ("".join(spec["merges"][at]) for at in (0, -1))
    assert words.model == "llama"
    assert words.scores[spec["vocab"][first]] == 0.0 > words.scores[spec["vocab"][last]]
    assert words.token_types[spec["vocab"]["<0x0A>"]] == TokenType.BYTE


# -------------------------------------------------------------------- adapters


@pytest.mark.parametrize(("method", "family"), PLAIN)
def test_an_adapter_is_the_difference_between_the_model_and_the_base(
    federate: Any, tmp_path: Path, method: Any, family: str
) -> None:
    """All in llama.cpp's own order of rows: base + B A is the merged model."""
    person = trained(federate, method, base=f"random:{family}").user("bob")
    person.export(tmp_path / "merged", format="gguf")
    person.export(tmp_path / "lora", format="gguf-adapter")
    base = person.model.base
    write_gguf(tmp_path / "base.gguf", "base", base.model, base.tokenizer, "F32")
    merged, plain = read(tmp_path / "merged" / "model.gguf"), read(tmp_path / "base.gguf")
    factors = read(tmp_path / "lora" / "adapter.gguf")
    changed = {name.removesuffix(".lora_a") for name in factors if name.endswith(".lora_a")}
    assert changed
    assert len(factors) == 2 * len(changed)
    for name, tensor in plain.items():
        change = factors[f"{name}.lora_b"] @ factors[f"{name}.lora_a"] if name in changed else 0
        torch.testing.assert_close(tensor + change, merged[name], rtol=0, atol=1e-5)
        assert name not in changed or (merged[name] - tensor).abs().max() > 1e-4
    fields = GGUFReader(tmp_path / "lora" / "adapter.gguf").fields
    rank = len(factors[f"{min(changed)}.lora_a"])
    assert fields["general.type"].contents() == "adapter"
    assert fields["adapter.type"].contents() == "lora"
    assert fields["adapter.lora.alpha"].contents() == rank
    assert "FROM ./BASE.gguf\nADAPTER ./adapter.gguf\n" in (tmp_path / "lora" / "Modelfile").read_text()


def test_a_mixture_is_no_adapter(federate: Any, tmp_path: Path) -> None:
    person = trained(federate, "comigs-1g1s", base="random:llama").user("bob")
    with pytest.raises(DataError, match="its model is not one LoRA"):
        person.export(tmp_path / "lora", format="gguf-adapter")
    assert list(tmp_path.iterdir()) == []


def test_quantisation_by_llama_cpp_needs_its_program(
    federate: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    person = trained(federate, "fedit", base="random:llama").user("bob")
    with pytest.raises(RunError, match=r"--dtype q4_k_m: needs llama.cpp's llama-quantize on the PATH"):
        person.export(tmp_path / "g", format="gguf", dtype="q4_k_m")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_llama_cpp_quantises(federate: Any, tmp_path: Path) -> None:
    if shutil.which("llama-quantize") is None:
        pytest.skip("llama-quantize is not on the PATH")
    person = trained(federate, "fedit", base="random:llama?dim=256&mlp=256").user("bob")
    person.export(tmp_path / "g", format="gguf", dtype="q4_k_m")
    types = {tensor.tensor_type.name for tensor in GGUFReader(tmp_path / "g" / "model.gguf").tensors}
    assert "Q4_K" in types


# -------------------------------------------------------------------- Ollama


def go(template: str, messages: list[dict[str, str]]) -> str:
    """What Go's text/template makes of the few actions that a Modelfile uses, written without a look at ours."""
    pieces = re.split(r"\{\{ (.*?) \}\}", template)  # text and actions in turns

    def block(at: int, message: dict[str, str] | None) -> tuple[list[tuple[str, int, int]], int]:
        """Branches of an ``if``: condition, first and last piece; and the position after its ``end``."""
        depth, branches, condition, start = 1, [], pieces[at].removeprefix("if "), at + 1
        while True:
            at += 2
            action = pieces[at]
            depth += action.startswith(("if", "range")) - (action == "end")
            if (depth == 1 and action.startswith("else")) or depth == 0:
                branches.append((condition, start, at))
                condition, start = action.removeprefix("else").strip().removeprefix("if "), at + 1
            if depth == 0:
                return branches, at + 1

    def holds(condition: str, message: dict[str, str] | None) -> bool:
        if condition == 'ne (index .Messages 0).Role "system"':
            return messages[0]["role"] != "system"
        (role,) = re.fullmatch(r'eq \.Role "(\w+)"', condition).groups()  # type: ignore[union-attr]
        return message is not None and message["role"] == role

    def run(at: int, until: int, message: dict[str, str] | None) -> str:
        text = ""
        while at < until:
            if at % 2 == 0:
                text += pieces[at]
                at += 1
            elif pieces[at] == ".Content":
                assert message is not None
                text += message["content"]
                at += 1
            elif pieces[at] == "range .Messages":
                ((_, start, end),), after = block(at, None)
                text += "".join(run(start, end, one) for one in messages)
                at = after
            else:
                branches, after = block(at, message)
                taken = next(((start, end) for condition, start, end in branches if holds(condition, message)), (0, 0))
                text += run(*taken, message)
                at = after
        return text

    return run(0, len(pieces), None)


CHATML = (
    "{% if messages[0]['role'] != 'system' %}{{ '<|im_start|>system\nBe kind.<|im_end|>\n' }}{% endif %}"
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TRIMMED = (
    "{% for m in messages %}{% if m['role'] == 'user' %}{{ '[INST] ' + m['content'] | trim + ' [/INST]' }}"
    "{% elif m['role'] == 'system' %}{{ '<<SYS>>' + m['content'] + '<</SYS>>' }}"
    "{% else %}{{ ' ' + m['content'] + '</s>' }}{% endif %}{% endfor %}"
)
NUMBERED = "{% for m in messages %}{{ loop.index }}: {{ m['content'] }}\n{% endfor %}"


def renderer(source: str) -> Any:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = source
    return ChatTemplate(tokenizer).render


@pytest.mark.parametrize("source", [CHATML, TRIMMED])
@pytest.mark.parametrize("roles", ["user", "system user", "user assistant user", "system user assistant user"])
def test_a_template_of_ollama_renders_as_the_chat_template(source: str, roles: str) -> None:
    render = renderer(source)
    template = chat_template_for_ollama(render)
    assert template is not None
    messages = [{"role": role, "content": f"text {n} of {role}"} for n, role in enumerate(roles.split())]
    assert go(template, messages) == render(messages, add_prompt=True)


@pytest.mark.parametrize(
    "source",
    [
        NUMBERED,  # turns differ by their number
        "{{ messages[-1]['content'] }}",  # says only the last message
        CHATML.replace("'<|im_start|>assistant", "'{{ thinks }}<|im_start|>assistant"),  # reads as an action of Go
        "{{ raise_exception('no system') if messages[0]['role'] == 'system' }}" + CHATML,
    ],
)
def test_a_chat_template_without_fixed_turns_has_none_of_ollama(source: str) -> None:
    assert chat_template_for_ollama(renderer(source)) is None


def commands_of(modelfile: str) -> list[tuple[str, str]]:
    """The commands that Ollama reads from a Modelfile, by the rules of its parser (ollama/ollama, parser/parser.go).

    A command is a word of letters, after ``parameter`` a second one, and a value up to the end of the line. A value
    that begins with one or three quotes goes on until a line ends with as many; there are no escapes. Characters that
    Go does not print are dropped from values, but for those between lines and words.
    """
    found: list[tuple[str, str]] = []
    lines = re.split(r"(?<=[\r\n])", modelfile)
    while lines:
        line = lines.pop(0)
        if not line.strip() or line.lstrip(" \t").startswith("#"):
            continue
        words = re.fullmatch(r"[ \t]*(parameter[ \t]([A-Za-z0-9_]+)|[A-Za-z]+)[ \t](.*)", line, re.I | re.DOTALL)
        assert words, f"not a command: {line!r}"
        name, value = (words[2] or words[1]).lower(), words[3]
        assert words[2] or name in ("from", "adapter", "template", "system", "license"), name
        quotes = next((quotes for quotes in ('"""', '"') if value.lstrip().startswith(quotes)), "")
        while quotes and not (len(value.strip()) >= 2 * len(quotes) and value.strip().endswith(quotes)):
            assert lines, f"no end of {value!r}"
            value += lines.pop(0)
        value = "".join(c for c in value.strip() if c.isprintable() or c in " \t\r\n")
        found.append((name, value[len(quotes) : len(value) - len(quotes)]))
    assert "from" in dict(found)
    return found


ENDS = ["<|im_end|>", '"', 'say "no"', "<｜end▁of▁sentence｜>", "\n\n", " # ", '"\n', "\\n", "'", "é\n"]


def test_ollama_reads_the_template_and_the_ends_as_they_are(tmp_path: Path) -> None:
    """Its parser has no escapes."""
    source = CHATML.replace("Be kind.", '\t# Be "kind",\n\nplease\r\n')
    write_modelfile(tmp_path / "Modelfile", "bob", "./model.gguf", "./adapter.gguf", renderer(source), ENDS)
    (model, adapter, template, *stops) = commands_of((tmp_path / "Modelfile").read_bytes().decode())
    assert (model, adapter) == (("from", "./model.gguf"), ("adapter", "./adapter.gguf"))
    assert template == ("template", chat_template_for_ollama(renderer(source)))
    assert stops == [("stop", end) for end in ENDS]


def test_what_no_modelfile_can_say_is_left_out(tmp_path: Path) -> None:
    """Control characters, and three quotes; a template with them is that of the GGUF file."""
    write_modelfile(tmp_path / "Modelfile", "bob", "./m.gguf", "", renderer(CHATML.replace("Be", "\a")), ["\a", '"""'])
    assert commands_of((tmp_path / "Modelfile").read_text()) == [("from", "./m.gguf")]


def test_a_modelfile_has_the_template_and_the_ends(tmp_path: Path) -> None:
    write_modelfile(tmp_path / "Modelfile", "bob", "./model.gguf", "", renderer(CHATML), ["<|im_end|>", '"'])
    text = (tmp_path / "Modelfile").read_text()
    assert "\nFROM ./model.gguf\n" in text
    template = re.search(r'\nTEMPLATE """(.*?)"""\n', text, re.DOTALL)
    assert template is not None
    hello = [{"role": "user", "content": "Hello"}]
    assert go(template[1], hello) == renderer(CHATML)(hello, add_prompt=True)
    assert text.endswith('PARAMETER stop "<|im_end|>"\nPARAMETER stop """""""\n')
    write_modelfile(tmp_path / "Modelfile", "bob", "./model.gguf", "", None, [])
    assert 'TEMPLATE """{{ .Prompt }}"""' in (tmp_path / "Modelfile").read_text()


# -------------------------------------------------------------------- llama.cpp


def llama(path: Path, **settings: Any) -> Any:
    llama_cpp = pytest.importorskip("llama_cpp", reason="llama-cpp-python is built from source, which few have")
    # Its cache of keys and values is float16 otherwise, and that is what would be seen.
    return llama_cpp.Llama(
        str(path), logits_all=True, n_ctx=128, verbose=False, n_threads=1, type_k=0, type_v=0, **settings
    )


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("method", "family"), [*PLAIN, *MIXED])
def test_llama_cpp_says_the_same(federate: Any, tmp_path: Path, method: Any, family: str) -> None:
    person = trained(federate, method, base=f"random:{family}").user("bob")
    person.export(tmp_path / "g", format="gguf")
    model = llama(tmp_path / "g" / "model.gguf")
    model.eval(IDS[0].tolist())
    theirs = torch.tensor(np.array(model.scores[: IDS.shape[1]])).unsqueeze(0)
    torch.testing.assert_close(theirs, own_logits(person), rtol=0, atol=1e-3)
    ids = person.model.base.tokenizer(TEXT)["input_ids"]
    assert model.tokenize(TEXT.encode(), add_bos=False) == ids
    with person.generating() as own:
        wanted = greedy(own)
    prompt, said = wanted[:8], []
    model.reset()
    for token in model.generate(prompt, temp=0.0, repeat_penalty=1.0):
        said.append(token)
        if len(said) == len(wanted) - 8:
            break
    assert said == wanted[8:]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("method", "family"), PLAIN)
def test_llama_cpp_adds_an_adapter_to_the_base(federate: Any, tmp_path: Path, method: Any, family: str) -> None:
    person = trained(federate, method, base=f"random:{family}").user("bob")
    person.export(tmp_path / "lora", format="gguf-adapter")
    base = person.model.base
    write_gguf(tmp_path / "base.gguf", "base", base.model, base.tokenizer, "F32")
    model = llama(tmp_path / "base.gguf", lora_path=str(tmp_path / "lora" / "adapter.gguf"))
    model.eval(IDS[0].tolist())
    theirs = torch.tensor(np.array(model.scores[: IDS.shape[1]])).unsqueeze(0)
    torch.testing.assert_close(theirs, own_logits(person), rtol=0, atol=1e-3)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("split", SPLITS)
def test_llama_cpp_splits_text_as_its_tokenizer_does(federate: Any, tmp_path: Path, split: str) -> None:
    base, tokenizer = load_base("random:llama?vocab=310", dtype="float32", device="cpu"), learned(split)
    base.model.save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    person = trained(federate, "fedit", base=str(tmp_path / "base")).user("bob")
    person.export(tmp_path / "g", format="gguf")
    model = llama(tmp_path / "g" / "model.gguf")
    for text in (TEXT, "I'LL 12345 x=1\n\n  y", "日本 é!!"):
        assert model.tokenize(text.encode(), add_bos=False) == tokenizer(text)["input_ids"]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_llama_cpp_reads_sentencepiece_as_its_tokenizer_does(federate: Any, stories: Path, tmp_path: Path) -> None:
    person = trained(federate, "comigs-1g1s", base=str(stories)).user("bob")
    person.export(tmp_path / "g", format="gguf")
    model = llama(tmp_path / "g" / "model.gguf")
    for text in ("Once upon a time, there was a little girl.", TEXT, " two  spaces\n\nand lines"):
        ids = person.model.base.tokenizer(text)["input_ids"]
        assert model.tokenize(text.encode(), add_bos=True) == ids
    model.eval(IDS[0].tolist())
    theirs = torch.tensor(np.array(model.scores[: IDS.shape[1]])).unsqueeze(0)
    torch.testing.assert_close(theirs, own_logits(person), rtol=0, atol=1e-3)
