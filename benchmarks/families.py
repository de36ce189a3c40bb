"""Miniature models of each family in docs/models.md: random weights, tokenizer and chat template.

Chat templates follow the published ones: the same marks around turns and the same handling of a
system prompt, the date and thoughts, without the branches for tools and images. Configurations of
refused families are here too.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

CONTEXT = 192
WORDS = [
    "red",
    "green",
    "blue",
    "cat",
    "dog",
    "moon",
    "river",
    "stone",
    "why",
    "how",
    "what",
    "sings",
    "runs",
    "old",
]

SIZES = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 32, "max_position_embeddings": CONTEXT, "initializer_range": 0.2,  # noqa: E501
    "dtype": "float32",
}  # fmt: skip

LLAMA_3 = """{{ bos_token }}{% set first = messages[0]['content'] if messages[0]['role'] == 'system' else '' %}\
<|start_header_id|>system<|end_header_id|>

Cutting Knowledge Date: December 2023
Today Date: {{ strftime_now("%d %b %Y") if strftime_now is defined else "26 Jul 2024" }}

{{ first }}<|eot_id|>{% for m in messages if m['role'] != 'system' %}<|start_header_id|>{{ m['role'] }}<|end_header_id|>

{{ m['content'] | trim }}<|eot_id|>{% endfor %}{% if add_generation_prompt %}\
<|start_header_id|>assistant<|end_header_id|>

{% endif %}"""  # noqa: E501
CHATML = """{% if messages[0]['role'] != 'system' %}<|im_start|>system
You are a helpful assistant.<|im_end|>
{% endif %}{% for m in messages %}<|im_start|>{{ m['role'] }}
{{ m['content'] }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
QWEN_3 = """{% set last = namespace(user=0) %}{% for m in messages %}{% if m['role'] == 'user' %}\
{% set last.user = loop.index0 %}{% endif %}{% endfor %}{% for m in messages %}{% set text = m['content'] %}\
{% if m['role'] == 'assistant' and loop.index0 < last.user and '</think>' in text %}\
{% set text = text.split('</think>')[-1].lstrip('\\n') %}{% endif %}<|im_start|>{{ m['role'] }}
{{ text }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and enable_thinking is false %}<think>

</think>

{% endif %}{% endif %}"""  # noqa: E501
MISTRAL = """{{ bos_token }}{% for m in messages %}{% if m['role'] == 'user' %}[INST] {{ m['content'] }}[/INST]\
{% elif m['role'] == 'assistant' %} {{ m['content'] | trim }}{{ eos_token }}{% else %}\
{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}{% endfor %}"""  # noqa: E501
GEMMA_3 = """{{ bos_token }}{% if messages[0]['role'] == 'system' %}\
{% set before = messages[0]['content'] + '\\n\\n' %}\
{% set rest = messages[1:] %}{% else %}{% set before = '' %}{% set rest = messages %}{% endif %}{% for m in rest %}\
<start_of_turn>{{ 'model' if m['role'] == 'assistant' else m['role'] }}
{{ before if loop.first else '' }}{{ m['content'] | trim }}<end_of_turn>
{% endfor %}{% if add_generation_prompt %}<start_of_turn>model
{% endif %}"""  # noqa: E501
PHI_4 = """{% for m in messages %}<|im_start|>{{ m['role'] }}<|im_sep|>{{ m['content'] }}<|im_end|>{% endfor %}\
{% if add_generation_prompt %}<|im_start|>assistant<|im_sep|>{% endif %}"""  # noqa: E501
ZEPHYR = """{% for m in messages %}<|{{ m['role'] }}|>
{{ m['content'] }}{{ eos_token }}
{% endfor %}{% if add_generation_prompt %}<|assistant|>
{% endif %}"""
VICUNA = (
    Path(__file__).parents[1].joinpath("configs/templates/vicuna.jinja").read_text(encoding="utf-8")
)

EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 48}
WINDOWED = {"sliding_window": 24, "layer_types": ["sliding_attention", "full_attention"]}


@dataclass(frozen=True)
class Family:
    """A model family in miniature: transformers' configuration, sizes and chat template."""

    config: str  # name of transformers' configuration class
    template: str
    end_of_turn: str
    marks: tuple[str, ...] = ()
    sizes: dict[str, Any] = field(default_factory=dict)
    arguments: dict[str, Any] = field(default_factory=dict)  # target.template_arguments
    served_as: str = (
        ""  # the family whose architecture this is, where an engine cannot tell them apart
    )


IM = ("<|im_start|>", "<|im_end|>")
LLAMA_ROPE = {
    "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,  # noqa: E501
    "original_max_position_embeddings": 64,
}  # fmt: skip
FAMILIES = {
    "Llama 3.1, 3.3": Family(
        "LlamaConfig",
        LLAMA_3,
        "<|eot_id|>",
        ("<|start_header_id|>", "<|end_header_id|>"),
        {"rope_parameters": LLAMA_ROPE},
    ),
    "Llama 3.2": Family(
        "LlamaConfig",
        LLAMA_3,
        "<|eot_id|>",
        ("<|start_header_id|>", "<|end_header_id|>"),
        {"rope_parameters": LLAMA_ROPE, "tie_word_embeddings": True},
    ),
    "Qwen2.5": Family("Qwen2Config", CHATML, "<|im_end|>", IM),
    "Qwen3, without thinking": Family(
        "Qwen3Config",
        QWEN_3,
        "<|im_end|>",
        (*IM, "<think>", "</think>"),
        arguments={"enable_thinking": False},
    ),
    "Qwen3, with thinking": Family(
        "Qwen3Config",
        QWEN_3,
        "<|im_end|>",
        (*IM, "<think>", "</think>"),
        served_as="Qwen3, without thinking",
    ),
    "Qwen3-MoE": Family("Qwen3MoeConfig", QWEN_3, "<|im_end|>", IM, {"num_experts": 4, **EXPERTS}),
    "Mixtral": Family(
        "MixtralConfig", MISTRAL, "</s>", ("[INST]", "[/INST]"), {"num_local_experts": 4, **EXPERTS}
    ),
    "Mistral": Family(
        "MistralConfig", MISTRAL, "</s>", ("[INST]", "[/INST]"), {"sliding_window": None}
    ),
    "Gemma 3": Family(
        "Gemma3TextConfig",
        GEMMA_3,
        "<end_of_turn>",
        ("<start_of_turn>",),
        {**WINDOWED, "tie_word_embeddings": True, "query_pre_attn_scalar": 32},
    ),
    "Phi-4": Family("Phi3Config", PHI_4, "<|im_end|>", (*IM, "<|im_sep|>"), {"pad_token_id": 0}),
    "Vicuna": Family(
        "LlamaConfig", VICUNA, "</s>", (), {"num_key_value_heads": 2}, served_as="Llama 3.1, 3.3"
    ),
    "Zephyr": Family("MistralConfig", ZEPHYR, "</s>", (), {"sliding_window": 24}),
}


def save_tokenizer(family: Family, directory: Path) -> Any:
    """Write and return a small tokenizer with a model family's marks and chat template."""
    import transformers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    special = list(dict.fromkeys(["<s>", "</s>", family.end_of_turn, *family.marks]))
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer, backend.decoder = (
        pre_tokenizers.ByteLevel(add_prefix_space=False),
        decoders.ByteLevel(),
    )
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator([" ".join(WORDS)] * 4, trainer)
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<s>",
        eos_token=family.end_of_turn,
        additional_special_tokens=special,
    )
    tokenizer.chat_template = family.template
    tokenizer.save_pretrained(directory)
    return tokenizer


def save_family(name: str, directory: Path) -> Path:
    """Write the miniature model of a family, with tokenizer and chat template."""
    import torch
    import transformers

    family = FAMILIES[name]
    tokenizer = save_tokenizer(family, directory)
    end = tokenizer.convert_tokens_to_ids(family.end_of_turn)
    sizes = {
        **SIZES,
        "vocab_size": len(tokenizer),
        "bos_token_id": 0,
        "eos_token_id": end,
        **family.sizes,
    }
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(
        getattr(transformers, family.config)(**sizes)
    )
    for parameter in model.parameters():  # wide enough to avoid ties of greedy tokens
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.2)
    # Gemma multiplies its embeddings by the root of the hidden size; the miniature would repeat its
    # input.
    if family.config.startswith("Gemma"):
        model.get_input_embeddings().weight.data /= 64
    model.generation_config = transformers.GenerationConfig(
        bos_token_id=0, eos_token_id=[end, *range(100, 108)]
    )
    model.save_pretrained(directory)
    return directory


# Configurations of transformers whose layers cannot verify a tree, and a part of the error.
REFUSED = {
    "Mamba": ("MambaConfig", {"num_hidden_layers": 2, "state_size": 4}, "linear_attention"),
    "Falcon Mamba": (
        "FalconMambaConfig",
        {"num_hidden_layers": 2, "state_size": 4},
        "linear_attention",
    ),
    "Jamba": ("JambaConfig", {"num_hidden_layers": 2}, "mamba"),
    "Qwen3-Next": (
        "Qwen3NextConfig",
        {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]},
        "linear_attention",
    ),
    "RecurrentGemma": ("RecurrentGemmaConfig", {"num_hidden_layers": 3, "head_dim": 16}, "recurr"),
    "BLOOM": ("BloomConfig", {"n_layer": 2, "n_head": 2}, "cache slot"),
    "Gemma 3 with pictures": ("Gemma3Config", {}, "no causal language model"),
}


def save_refused(name: str, directory: Path) -> Path:
    """Write the config.json and tokenizer of a refused model, without weights."""
    import json

    import transformers

    kind, sizes, _ = REFUSED[name]
    save_tokenizer(FAMILIES["Llama 3.2"], directory)
    content = getattr(transformers, kind)(
        **({"hidden_size": 64, "vocab_size": 512} if sizes else {}), **sizes
    ).to_dict()
    suffix = "ForCausalLM" if sizes else "ForConditionalGeneration"
    architecture = kind.removesuffix("Config") + suffix
    (directory / "config.json").write_text(
        json.dumps(content | {"architectures": [architecture]}, default=str)
    )
    return directory
