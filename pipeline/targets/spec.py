"""A target before its weights are loaded: configuration, dtype, context, end-of-sequence ids and
files.

What must be equal in every engine is decided here: `resolve` pins a Hub target to a commit and
"auto" to a dtype, and `eos_token_ids` is the set that ends a text. A spec is plain data that can be
pickled and written as JSON.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pipeline.config import DTYPES
from pipeline.conversations.template import ChatTemplate
from pipeline.errors import ConfigError
from pipeline.targets import files
from pipeline.targets.quantization import Rounding, rounding_of

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

    from pipeline.config import TargetConfig

CONTEXT_KEYS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "n_ctx")

VERIFIABLE_LAYERS = {"full_attention", "sliding_attention"}
STATEFUL_WORDS = (
    "mamba",
    "ssm",
    "rwkv",
    "xlstm",
    "linear_attn",
    "linear_attention",
    "recurr",
    "retention",
)
STATEFUL_TYPES = {
    "bamba",
    "jamba",
    "zamba",
    "zamba2",
    "falcon_h1",
    "nemotron_h",
    "hyena",
    "plamo2",
    "lfm2",
    "lfm2_moe",
}
SLOT_BIASED_TYPES = {"bloom", "mpt"}


@dataclass(frozen=True)
class TargetSpec:
    """What every engine and worker loads. `dtype` is resolved; `chat_template` is text, not a
    path.
    """

    model: str
    revision: str | None = None
    dtype: str = "float32"
    quantization: Literal["4bit", "8bit"] | None = None
    max_tokens: int | None = None
    trust_remote_code: bool = False
    chat_template: str | None = None
    rounding: Rounding | None = None  # of what a quantized checkpoint's layers read
    date: str = "2024-07-26"  # what the chat template is told, where it asks: YYYY-MM-DD
    template_arguments: dict[str, Any] = field(default_factory=dict, hash=False)


def resolve(target: TargetConfig, *, on_gpu: bool | None = None) -> TargetSpec:
    """The spec of a configured target, validated as far as possible without loading weights.

    Args:
        on_gpu: Whether workers have a GPU, which decides dtype "auto"; None checks this machine.

    Raises:
        ConfigError: No such target, one that cannot verify a tree, or settings that contradict it.
        EnvironmentFault: The Hub cannot be reached.
    """
    model, revision = target.model, target.revision
    config_file = files.find_file(model, revision, "config.json")
    if config_file is None:
        raise ConfigError(
            f"The target {model} has no config.json.", files.WHERE, "Name a transformers model."
        )
    files.parse(config_file)
    if files.is_local(model):
        model = str(files.local_directory(model))
    elif config_file.parent.parent.name == "snapshots":
        revision = (
            config_file.parent.name
        )  # the commit: all workers load the same weights, also after a resume
    spec = TargetSpec(
        model=model,
        revision=revision,
        quantization=target.quantization,
        max_tokens=target.max_tokens,
        trust_remote_code=target.trust_remote_code,
        chat_template=_template_text(target.chat_template),
        date=target.date.isoformat(),
        template_arguments=target.template_arguments,
    )
    config = model_config(spec)
    require_verifiable(config)
    if target.quantization and getattr(config, "quantization_config", None):
        fix = "Leave target.quantization unset for a checkpoint that is quantized already."
        raise ConfigError(
            f"The target {target.model} is quantized already.", "target.quantization", fix
        )
    context_length(spec, config)
    _stated_eos_ids(spec, config)
    dtype = target.dtype if target.dtype != "auto" else own_dtype(config, on_gpu)
    return replace(spec, dtype=dtype, rounding=rounding_of(config))


def model_config(spec: TargetSpec) -> PretrainedConfig:
    """The target's transformers configuration.

    Raises:
        ConfigError: transformers does not know the model, or only through remote code.
    """
    from transformers import AutoConfig

    with files.hub_errors(spec.model, spec.revision):
        try:
            return AutoConfig.from_pretrained(
                spec.model, revision=spec.revision, trust_remote_code=spec.trust_remote_code
            )
        except OSError:
            raise
        except (
            Exception
        ) as error:  # whatever a family's configuration raises on values that it does not expect
            fix = (
                "Repair its config.json, upgrade transformers, or set target.trust_remote_code:"
                " true if you trust the code beside the weights."
            )
            what = f"transformers cannot read the target {spec.model}: {first_lines(error)}."
            raise ConfigError(what, files.WHERE, fix) from error


def first_lines(error: Exception) -> str:
    """The first two lines of an error's message, as one."""
    return (
        " ".join(" ".join(str(error).strip().split("\n")[:2]).split()).rstrip(".")
        or type(error).__name__
    )


def load_tokenizer(spec: TargetSpec) -> PreTrainedTokenizerBase:
    """The target's tokenizer.

    Raises:
        ConfigError: It has none that transformers can load.
    """
    from transformers import AutoTokenizer

    with files.hub_errors(spec.model, spec.revision):
        try:
            return AutoTokenizer.from_pretrained(
                spec.model, revision=spec.revision, trust_remote_code=spec.trust_remote_code
            )
        except Exception as error:  # the tokenizers library raises no narrower one
            fix = "Put the tokenizer's files beside the weights (`tokenizer.save_pretrained`)."
            raise ConfigError(
                f"The target {spec.model} has no tokenizer that loads.", files.WHERE, fix
            ) from error


def load_chat_template(
    spec: TargetSpec, tokenizer: PreTrainedTokenizerBase | None = None
) -> ChatTemplate:
    """The target's chat template, with its tokenizer where that is loaded already.

    Raises:
        ConfigError: It has no tokenizer that loads, or no template that renders a conversation.
    """
    given = date.fromisoformat(spec.date), spec.template_arguments
    return ChatTemplate(tokenizer or load_tokenizer(spec), spec.chat_template, *given)


def asks_for_date(spec: TargetSpec, paths: Iterable[Path]) -> bool:
    """Whether the chat template, in `spec` or among the target's files, writes the date of the day
    into its prompts.
    """
    stored = (path for path in paths if path.name in files.TEMPLATE_FILES)
    texts = (
        [spec.chat_template]
        if spec.chat_template
        else (path.read_text("utf-8", "replace") for path in stored)
    )
    return any("strftime_now" in text for text in texts)


def context_length(spec: TargetSpec, config: PretrainedConfig | None = None) -> int:
    """The longest conversation in tokens: the model's own context, or target.max_tokens where that
    is shorter.

    Raises:
        ConfigError: Neither is known.
    """
    text = (config or model_config(spec)).get_text_config()
    own = next((value for key in CONTEXT_KEYS if (value := getattr(text, key, None))), None)
    known = [length for length in (own, spec.max_tokens) if length]
    if not known:
        raise ConfigError(
            f"The target {spec.model} does not state its context length.",
            "target.max_tokens",
            "Set it.",
        )
    return min(known)


def cached_numbers(config: PretrainedConfig) -> int:
    """Numbers of all layers' keys and values of one token.

    With multi-head latent attention (DeepSeek's) a layer keeps one compressed vector and one
    rotated key for all heads.
    """
    text = config.get_text_config()
    latent = getattr(text, "kv_lora_rank", None)
    if latent:
        return int(text.num_hidden_layers * (latent + text.qk_rope_head_dim))
    num_heads = text.num_attention_heads
    num_kv_heads = getattr(text, "num_key_value_heads", None) or num_heads
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // num_heads
    return int(2 * text.num_hidden_layers * num_kv_heads * head_dim)


def eos_token_ids(spec: TargetSpec) -> tuple[int, ...]:
    """The sorted ids that end a text: generation_config's, else the model's, else the tokenizer's;
    may be empty.

    Raises:
        ConfigError: One of the first two holds something else than tokens of the vocabulary.
    """
    stated = _stated_eos_ids(spec, model_config(spec))
    if stated is not None:
        return stated
    value = load_tokenizer(spec).eos_token_id
    return () if value is None else (value,)


def _stated_eos_ids(spec: TargetSpec, config: PretrainedConfig) -> tuple[int, ...] | None:
    """The sorted end-of-sequence ids in generation_config.json or config.json; None where neither
    has any.
    """
    vocab_size = getattr(config.get_text_config(), "vocab_size", None)
    for name in ("generation_config.json", "config.json"):
        value = files.read_json(spec.model, spec.revision, name).get("eos_token_id")
        if value is None:
            continue
        ids = value if isinstance(value, list) else [value]
        if not ids or not all(_is_token(id, vocab_size) for id in ids):
            tokens = f"a token id from 0 to {vocab_size - 1}" if vocab_size else "a token id"
            what = (
                f"The target's eos_token_id is {json.dumps(value)[:40]}, neither {tokens} nor a"
                " list of such ids."
            )
            raise ConfigError(what, f"eos_token_id in {spec.model}, {name}", "Correct it there.")
        return tuple(sorted(set(ids)))
    return None


def _is_token(id: Any, vocab_size: int | None) -> bool:
    """Whether a value is an id of the vocabulary, whose size may be unknown."""
    if not isinstance(id, int) or isinstance(id, bool):
        return False
    return id >= 0 and (vocab_size is None or id < vocab_size)


def weight_files(spec: TargetSpec, *, fetch: bool = True) -> list[Path]:
    """Local files whose content identifies the target: weights, configuration, tokenizer, template;
    sorted by name.

    A Hub target is downloaded. Its files are links into the Hub cache, named there by the content's
    hash.

    Args:
        fetch: False downloads nothing.

    Raises:
        ConfigError: The target holds no weights that can be read.
        EnvironmentFault: The Hub cannot be reached, or without `fetch` the weights are not
            downloaded.
    """
    return files.identifying_files(
        spec.model, spec.revision, with_code=spec.trust_remote_code, fetch=fetch
    )


def require_verifiable(config: PretrainedConfig) -> None:
    """Check that the target's layers can verify a tree of candidates in one forward (section
    2.1.2).

    A tree needs attention that can be masked per candidate. A recurrent state has a single past,
    and a bias by cache slot (ALiBi) treats siblings as successors.

    Raises:
        ConfigError: The target is not a decoder, or has such layers.
    """
    reason = _why_not_verifiable(config)
    if reason:
        fix = (
            "Choose a decoder-only target with attention in every layer, as Llama, Mistral or"
            " Qwen2/3 have."
        )
        raise ConfigError(
            f"The target ({config.model_type}) cannot verify a tree: {reason}.", files.WHERE, fix
        )


def _why_not_verifiable(config: PretrainedConfig) -> str | None:
    text = config.get_text_config()
    types = {config.model_type, text.model_type}
    named = getattr(config, "architectures", None) or []
    architectures = list(map(str, named if isinstance(named, list) else [named]))
    causal = any("CausalLM" in name or "LMHeadModel" in name for name in architectures)
    if config.is_encoder_decoder:
        return "it is an encoder-decoder"
    if (
        architectures
        and not causal
        and "AutoModelForCausalLM" not in (getattr(config, "auto_map", None) or {})
    ):
        return f"{architectures[0]} is no causal language model"
    if types & SLOT_BIASED_TYPES or getattr(text, "alibi", False):
        return "its attention is biased by cache slot (ALiBi)"
    layers = {
        *(getattr(text, "layer_types", None) or ()),
        *(getattr(text, "layers_block_type", None) or ()),
    }
    if unknown := sorted(layers - VERIFIABLE_LAYERS - {"attention"}):
        return f"it has layers of type {', '.join(unknown)}"
    if types & STATEFUL_TYPES:
        return "some of its layers keep a running state instead of attention's past"
    words = {*types, *vars(text)}
    if word := next(
        (key for key in sorted(words) if any(mark in key.lower() for mark in STATEFUL_WORDS)), None
    ):
        return f"it has layers that keep a running state ({word})"
    return None


def own_dtype(config: PretrainedConfig, on_gpu: bool | None) -> str:
    if on_gpu is None:
        import torch

        on_gpu = torch.cuda.is_available()
    if not on_gpu:
        return "float32"
    own: Any = getattr(config, "dtype", None) or getattr(config.get_text_config(), "dtype", None)
    name = str(own).removeprefix("torch.")
    return name if name in DTYPES else "bfloat16"


def _template_text(template: str | None) -> str | None:
    """The template's text; the configuration gives it as text or as a path."""
    if template is None or "{" in template:
        return template
    path = Path(template).expanduser()
    if not path.is_file():
        fix = "Give a Jinja template or the path of a file that holds one."
        raise ConfigError(f"There is no file {template}.", "target.chat_template", fix)
    return path.read_text(encoding="utf-8")
