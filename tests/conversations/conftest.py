"""Tiny tokenizers of the three kinds that chat models have, and the chat templates of the
well-known families.

The templates are what those models' repositories ship, without their tool calls. The special tokens
of all families are in every tokenizer, except Zephyr's role markers, which are plain text in
Zephyr's own vocabulary too.
"""

from __future__ import annotations

import json

import pytest
from tokenizers import (
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import PreTrainedTokenizerFast

from pipeline.conversations.template import ChatTemplate

BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
SPECIAL = ["<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"]
SPECIAL += ["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]

LLAMA_3_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

TEXT = [
    (
        "A chat between a curious user and an assistant. USER: Hello there, who are you? ASSISTANT:"
        " I am a small model."
    ),
    (
        "system\nuser\nassistant\n<|system|>\n<|user|>\n<|assistant|>\n[INST]"
        " <<SYS>>\n\n<</SYS>>\n\n [/INST]"
    ),
    (
        "Hello, how are you today? I am fine, thank you. Tell me a story about a cat and the moon."
        " 你好，今天怎么样？"
    ),
] * 4

TEMPLATES = {
    "zephyr": (
        """{% for message in messages %}
{% if message['role'] == 'user' %}
{{ '<|user|>
' + message['content'] + eos_token }}
{% elif message['role'] == 'system' %}
{{ '<|system|>
' + message['content'] + eos_token }}
{% elif message['role'] == 'assistant' %}
{{ '<|assistant|>
'  + message['content'] + eos_token }}
{% endif %}
{% if loop.last and add_generation_prompt %}
{{ '<|assistant|>' }}
{% endif %}
{% endfor %}"""
    ),
    "chatml": (
        """{% for message in messages %}{{'<|im_start|>' + message['role'] + '
' + message['content'] + '<|im_end|>' + '
'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant
' }}{% endif %}"""
    ),
    "llama-3": (
        """{% for message in messages %}\
{% set content = '<|start_header_id|>' + message['role'] + '<|end_header_id|>

' + message['content'] | trim + '<|eot_id|>' %}\
{% if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}{{ content }}{% endfor %}\
{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>

' }}{% endif %}"""  # noqa: E501
    ),
    "llama-2": (
        """{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}\
{% set system_message = messages[0]['content'] %}{% else %}{% set loop_messages = messages %}\
{% set system_message = false %}{% endif %}{% for message in loop_messages %}\
{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}\
{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}\
{% if loop.index0 == 0 and system_message != false %}\
{% set content = '<<SYS>>\\n' + system_message + '\\n<</SYS>>\\n\\n' + message['content'] %}\
{% else %}{% set content = message['content'] %}{% endif %}{% if message['role'] == 'user' %}\
{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}{% elif message['role'] == 'assistant' %}\
{{ ' '  + content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}"""  # noqa: E501
    ),
    "vicuna": (
        """{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ messages[0]['content'] + ' ' }}\
{% set messages = messages[1:] %}{% else %}{{ 'A chat between a curious user and an assistant. ' }}{% endif %}\
{% for message in messages %}{% if message['role'] == 'user' %}{{ 'USER: ' + message['content'] + ' ' }}\
{% else %}{{ 'ASSISTANT: ' + message['content'] + eos_token }}{% endif %}{% endfor %}\
{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"""  # noqa: E501
    ),
}

# A space before each text, as Vicuna has, and a token after it, as ChatML has.
SPACED = """{% for message in messages %}\
{{ message['role'].upper() + ': ' + message['content'] + eos_token }}{% endfor %}\
{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"""

# As Qwen3 does: thoughts are kept in the last answer only.
FORGETFUL = """{% for message in messages %}{% set content = message['content'] %}\
{% if message['role'] == 'assistant' and not loop.last and '</think>' in content %}\
{% set content = content.split('</think>')[-1].lstrip('\\n') %}{% endif %}{{'<|im_start|>' + message['role'] + '
' + content + '<|im_end|>' + '
'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant
' }}{% endif %}"""  # noqa: E501

# As Gemma does: no system prompt.
WITHOUT_SYSTEM = (
    """{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"""  # noqa: E501
    + (TEMPLATES["chatml"])
)


@pytest.fixture(scope="session")
def templates() -> dict[str, str]:
    return TEMPLATES | {"spaced": SPACED, "forgetful": FORGETFUL, "without-system": WITHOUT_SYSTEM}


@pytest.fixture(scope="session")
def tokenizers() -> dict[str, PreTrainedTokenizerFast]:
    """byte-level (GPT-2, Llama-3, Qwen), metaspace (a space before every text), legacy (Llama-2,
    Vicuna, Zephyr).
    """
    return {"byte-level": _byte_level(), "metaspace": _metaspace(), "legacy": _legacy()}


@pytest.fixture(scope="session")
def tokenizer(tokenizers) -> PreTrainedTokenizerFast:
    return tokenizers["byte-level"]


@pytest.fixture(scope="session")
def chatml(tokenizer, templates) -> ChatTemplate:
    return ChatTemplate(tokenizer, templates["chatml"])


def _byte_level() -> PreTrainedTokenizerFast:
    backend = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(LLAMA_3_WORDS), "isolated")
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(False, use_regex=False)]
    )
    backend.decoder = decoders.ByteLevel()
    return _wrapped(_trained(backend, SPECIAL, pre_tokenizers.ByteLevel.alphabet()))


def _metaspace() -> PreTrainedTokenizerFast:
    backend = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    backend.decoder = decoders.Sequence(
        [decoders.ByteFallback(), decoders.Fuse(), decoders.Metaspace()]
    )
    return _wrapped(_with_byte_fallback(_trained(backend, SPECIAL + BYTES, [])))


def _legacy() -> PreTrainedTokenizerFast:
    backend = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    backend.pre_tokenizer = pre_tokenizers.Split(
        "▁", "merged_with_next"
    )  # so that no merge spans two words
    parts = [
        decoders.Replace("▁", " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
        decoders.Strip(" ", 1, 0),
    ]
    backend.decoder = decoders.Sequence(parts)
    trained = _with_byte_fallback(_trained(backend, SPECIAL + BYTES, []))
    trained.pre_tokenizer = None
    return _wrapped(trained)


def _trained(backend: Tokenizer, special: list[str], alphabet: list[str]) -> Tokenizer:
    trainer = trainers.BpeTrainer(
        vocab_size=900,
        special_tokens=special,
        initial_alphabet=alphabet,
        show_progress=False,
        min_frequency=1,
    )
    backend.train_from_iterator(TEXT, trainer)
    return backend


def _with_byte_fallback(backend: Tokenizer) -> Tokenizer:
    """The byte tokens as ordinary ones: the trainer takes them into the vocabulary only as special
    tokens.
    """
    description = json.loads(backend.to_str())
    description["added_tokens"] = [
        token for token in description["added_tokens"] if token["content"] in SPECIAL
    ]
    return Tokenizer.from_str(json.dumps(description))


def _wrapped(backend: Tokenizer) -> PreTrainedTokenizerFast:
    # As Llama's does: outside a chat template, a text begins with BOS.
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
