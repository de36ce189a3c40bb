"""A target's settings before its weights are loaded: dtype, context, EOS ids, chat template.

These settings must be equal in every engine. `resolve` replaces a Hub revision by its commit and
the dtype "auto" by a dtype; `eos_token_ids` returns the tokens that end a text. A spec is plain
data that can be pickled.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import date
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING, Any

from pipeline.config import DTYPES
from pipeline.conversations.conversation import SpecialTokens
from pipeline.conversations.template import ChatTemplate
from pipeline.errors import ConfigError, EnvironmentFault
from pipeline.targets import files

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

    from pipeline.config import TargetConfig
    from pipeline.config.training import Bits

EngineArgs = Mapping[str, Any]  # arguments of vLLM or of the transformers engine

VERIFIABLE_LAYERS = {"full_attention", "sliding_attention", "attention"}
# Families with recurrent layers that their configurations do not list.
STATEFUL_TYPES = {"rwkv", "xlstm", "lfm2", "lfm2_moe", "plamo2"}
SLOT_BIASED_TYPES = {"bloom", "mpt"}


@dataclass(frozen=True)
class TargetSpec:
    """The resolved settings with which engines and workers load a target.

    `model` is a Hub id or an absolute directory; `revision` is a commit, or None for a directory.
    `chat_template` is the text of a template, not a path; None means the tokenizer's own.
    """

    model: str
    revision: str | None = None
    dtype: str = "float32"
    quantization: Bits | None = None
    max_tokens: int | None = None
    trust_remote_code: bool = False
    chat_template: str | None = None
    date: str = "2024-07-26"  # YYYY-MM-DD, for chat templates that ask for the date
    template_arguments: dict[str, Any] = field(default_factory=dict, hash=False)

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype of the target, as torch names it."""
        import torch

        return getattr(torch, self.dtype)


def resolve(target: TargetConfig, *, on_gpu: bool = False) -> TargetSpec:
    """Validate a target's configuration, and resolve it to a spec, without loading weights.

    Of a Hub target, only configuration files are downloaded.

    Args:
        on_gpu: Whether workers have a GPU, which decides dtype "auto".

    Raises:
        ConfigError: The target does not exist, cannot be read by transformers, cannot verify a
            tree, or has other weights beside it; or a setting of the target is invalid.
        EnvironmentFault: The Hub cannot be reached.
    """
    model, revision = target.model, target.revision
    config_file = files.find_file(model, revision, "config.json")
    if config_file is None:
        raise ConfigError(
            f"The target {model} has no config.json.",
            files.WHERE,
            "Set target.model to a model in transformers format.",
        )
    files.parse_json_object(config_file)
    files.require_no_other_weights(model, revision)
    if files.is_local(model):
        model = str(config_file.parent)
    else:
        revision = config_file.parent.name  # all workers load this commit, also after a resume
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
    if target.quantization and quantization_of(config):
        raise ConfigError(
            f"The target {target.model} is quantized already.",
            "target.quantization",
            "Leave it unset.",
        )
    context_length(spec, config)
    _stated_eos_ids(spec, config)
    dtype: str = target.dtype
    if dtype == "auto":
        dtype = own_dtype(config, on_gpu)
    return replace(spec, dtype=dtype)


def model_config(spec: TargetSpec) -> PretrainedConfig:
    """Load the target's transformers configuration.

    Raises:
        ConfigError: The target does not exist, or transformers cannot read its configuration, for
            example because that needs remote code.
        EnvironmentFault: The Hub cannot be reached.
    """
    from transformers import AutoConfig

    with files.target_errors(spec.model, spec.revision):
        try:
            return AutoConfig.from_pretrained(
                spec.model, revision=spec.revision, trust_remote_code=spec.trust_remote_code
            )
        except OSError:
            raise
        except Exception as error:  # a family's configuration may raise any error
            raise ConfigError(
                f"transformers cannot read the target {spec.model}: {one_line(error)}.",
                files.WHERE,
                "Repair its config.json, upgrade transformers, or set target.trust_remote_code:"
                " true if you trust the code beside the weights.",
            ) from error


def one_line(error: Exception) -> str:
    """Return an error's message on one line of at most 300 characters.

    If the message is empty, return the name of the error's type.
    """
    text = str(error) or type(error).__name__
    return shorten(text, 300, placeholder=" ...").strip(" .")


def last_line(said: object) -> str:
    """Return the last line of an output or of an error's message, cut to 300 characters.

    Full stops at its end are removed. If there is no text, return the representation of `said`.
    """
    lines = str(said).strip().splitlines() or [repr(said)]
    return lines[-1][:300].strip(" .")


def load_tokenizer(spec: TargetSpec) -> PreTrainedTokenizerBase:
    """Load the target's tokenizer.

    Raises:
        ConfigError: transformers cannot load a tokenizer for the target.
        EnvironmentFault: The Hub cannot be reached, and nothing of the target is cached.
    """
    from transformers import AutoTokenizer

    with files.target_errors(spec.model, spec.revision):
        try:
            return AutoTokenizer.from_pretrained(
                spec.model, revision=spec.revision, trust_remote_code=spec.trust_remote_code
            )
        except OSError:
            raise
        except Exception as error:  # the tokenizers library raises plain Exception
            raise ConfigError(
                f"transformers cannot load a tokenizer for the target {spec.model}.",
                files.WHERE,
                "Put the tokenizer's files beside the weights (`tokenizer.save_pretrained`).",
            ) from error


def load_chat_template(
    spec: TargetSpec,
    tokenizer: PreTrainedTokenizerBase | None = None,
    special_tokens: SpecialTokens = "escape",
) -> ChatTemplate:
    """Return the target's chat template; load the tokenizer if it is not given.

    Args:
        special_tokens: What happens to special tokens in messages, see `DialogueSettings`.

    Raises:
        ConfigError: The tokenizer cannot be loaded, there is no usable template, or a prompt can
            hold a token that the target has no embedding for.
    """
    if tokenizer is None:
        tokenizer = load_tokenizer(spec)
    today = date.fromisoformat(spec.date)
    template = ChatTemplate(tokenizer, spec.chat_template, today, spec.template_arguments)
    num_embeddings = model_config(spec).get_text_config().vocab_size
    token = template.token_from(num_embeddings, special_tokens)
    if token is not None:
        raise ConfigError(
            f"A prompt can contain the token {token}, but the target has embeddings only for ids"
            f" below {num_embeddings}.",
            files.WHERE,
            "Set target.model to the model that this tokenizer belongs to, or resize its embedding"
            " (`resize_token_embeddings`) and train the new rows.",
        )
    return template


def asks_for_date(spec: TargetSpec, paths: Iterable[Path]) -> bool:
    """Return whether a target's chat template asks for the date.

    If `spec` has no template, the template files among `paths` are read.
    """
    if spec.chat_template:
        return "strftime_now" in spec.chat_template
    for path in paths:
        is_template = path.name in files.TEMPLATE_FILES
        if is_template and "strftime_now" in path.read_text("utf-8", "replace"):
            return True
    return False


def context_length(spec: TargetSpec, config: PretrainedConfig | None = None) -> int:
    """Return the target's context length in tokens, or `spec.max_tokens` if that is shorter.

    If only one of the two is known, it is returned. Without `config`, the configuration is loaded.

    Raises:
        ConfigError: Neither is known.
    """
    if config is None:
        config = model_config(spec)
    own = getattr(config.get_text_config(), "max_position_embeddings", None)
    known = [length for length in (own, spec.max_tokens) if length]
    if not known:
        raise ConfigError(
            f"The target {spec.model} does not state its context length.",
            "target.max_tokens",
            "Set it.",
        )
    return min(known)


def quantization_of(config: PretrainedConfig) -> dict[str, Any] | None:
    """Return the quantization settings of a checkpoint, or None if it is not quantized."""
    return getattr(config, "quantization_config", None)


def quantization_format(config: PretrainedConfig) -> str | None:
    """Return a checkpoint's quantization format, such as `gptq`; None if it is not quantized."""
    settings = quantization_of(config)
    if settings is None:
        return None
    method = settings.get("quant_method", "an unknown format")
    detail = settings.get("format")
    return f"{method} ({detail})" if detail else method


def cached_numbers(config: PretrainedConfig) -> int:
    """Return how many numbers the target's KV cache holds for one token in all layers together.

    With multi-head latent attention (DeepSeek) a layer caches one compressed vector and one rotated
    key for all heads.
    """
    text = config.get_text_config()
    latent = getattr(text, "kv_lora_rank", None)
    if latent:
        return text.num_hidden_layers * (latent + text.qk_rope_head_dim)
    num_heads = text.num_attention_heads
    num_kv_heads = getattr(text, "num_key_value_heads", None) or num_heads
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // num_heads
    return 2 * text.num_hidden_layers * num_kv_heads * head_dim


def eos_token_ids(spec: TargetSpec) -> tuple[int, ...]:
    """Return the sorted EOS token ids of the target; the tuple may be empty.

    The ids are read from generation_config.json, else config.json, else the tokenizer.

    Raises:
        ConfigError: A JSON file states EOS ids that are not tokens of the vocabulary.
    """
    stated = _stated_eos_ids(spec, model_config(spec))
    if stated is not None:
        return stated
    value = load_tokenizer(spec).eos_token_id
    return () if value is None else (value,)


def _stated_eos_ids(spec: TargetSpec, config: PretrainedConfig) -> tuple[int, ...] | None:
    """Return the sorted EOS token ids that generation_config.json, or else config.json, states.

    Return None if neither states any.

    Raises:
        ConfigError: The file states ids that are not tokens of the vocabulary.
    """
    for name in ("generation_config.json", "config.json"):
        path = files.find_file(spec.model, spec.revision, name)
        if path is None:
            continue
        value = files.parse_json_object(path).get("eos_token_id")
        if value is None:
            continue
        ids = value if isinstance(value, list) else [value]
        vocabulary = range(config.get_text_config().vocab_size)
        if not ids or not all(type(id) is int and id in vocabulary for id in ids):
            raise ConfigError(
                f"The target's eos_token_id is {value}, not token ids below {len(vocabulary)}.",
                f"eos_token_id in {path}",
                "Correct the file.",
            )
        return tuple(sorted(set(ids)))
    return None


def weight_files(spec: TargetSpec, *, fetch: bool = True) -> list[Path]:
    """Return the local files whose content identifies the target, sorted by name.

    These are weights, configuration, tokenizer, chat template and, if it is trusted, code.

    Args:
        fetch: Whether a Hub target is downloaded first. If not, it must be in the Hub's cache.

    Raises:
        ConfigError: Weight files are missing.
        EnvironmentFault: The Hub cannot be reached; or, without `fetch`, the target is not cached.
    """
    if files.is_local(spec.model):
        directory = files.local_directory(spec.model)
    elif fetch:
        directory = files.download(spec.model, spec.revision, with_code=spec.trust_remote_code)
    else:
        snapshot = files.cached_snapshot(spec.model, spec.revision)
        if snapshot is None:
            raise EnvironmentFault(
                f"The target {spec.model} is not on this machine yet; a run downloads it.",
                files.WHERE,
                "Start the run, or download the target first.",
            )
        directory = snapshot
    names = {*files.DESCRIBING_FILES, *files.weight_names(directory)}
    if spec.trust_remote_code:
        names |= {path.name for path in directory.glob("*.py")}
    return [directory / name for name in sorted(names) if (directory / name).is_file()]


def require_verifiable(config: PretrainedConfig) -> None:
    """Check that a target with this configuration can verify a candidate tree in one forward pass.

    A tree needs attention that can be masked for each candidate (paper section 2.1.2). A recurrent
    layer has one state for all candidates. A bias by position in the cache (ALiBi) treats sibling
    candidates as successive tokens.

    Raises:
        ConfigError: The target is not a decoder-only language model, or has layers of another type
            than attention, or attention with such a bias.
    """
    reason = _why_not_verifiable(config)
    if reason is not None:
        raise ConfigError(
            f"The target ({config.model_type}) cannot verify a tree: {reason}.",
            files.WHERE,
            "Choose a decoder-only target with attention in every layer, as Llama, Mistral or"
            " Qwen2/3 have.",
        )


def _why_not_verifiable(config: PretrainedConfig) -> str | None:
    """Return why a target with this configuration cannot verify a tree, or None if it can."""
    text = config.get_text_config()
    if config.is_encoder_decoder:
        return "it is an encoder-decoder"
    architectures = config.architectures or []
    # A model with its own code names its classes in `auto_map`.
    names = " ".join([*architectures, *(getattr(config, "auto_map", None) or {})])
    if architectures and "CausalLM" not in names and "LMHeadModel" not in names:
        return f"{architectures[0]} is no causal language model"
    if text.model_type in SLOT_BIASED_TYPES or getattr(text, "alibi", False):
        return "its attention is biased by cache slot (ALiBi)"
    layer_types = set(getattr(text, "layer_types", None) or ())
    layer_types.update(getattr(text, "layers_block_type", None) or ())
    unknown = sorted(layer_types - VERIFIABLE_LAYERS)
    if unknown:
        return f"it has layers of type {', '.join(unknown)}"
    if text.model_type in STATEFUL_TYPES:
        return "some of its layers keep a running state instead of attention's past"
    return None


def own_dtype(config: PretrainedConfig, on_gpu: bool) -> str:
    """Return the dtype for "auto": the checkpoint's on a GPU, float32 on a CPU.

    On a GPU it is bfloat16 if the checkpoint's dtype is unknown or not one of `DTYPES`.
    """
    if not on_gpu:
        return "float32"
    own = getattr(config, "dtype", None) or getattr(config.get_text_config(), "dtype", None)
    name = str(own).removeprefix("torch.")
    return name if name in DTYPES else "bfloat16"


def _template_text(template: str | None) -> str | None:
    """Return the text of a chat template, or None for None.

    `template` is the text itself, which contains "{", or the path of a file.

    Raises:
        ConfigError: There is no such file.
    """
    if template is None or "{" in template:
        return template
    path = Path(template).expanduser()
    if not path.is_file():
        raise ConfigError(
            f"There is no file {template}.",
            "target.chat_template",
            "Give a Jinja template or the path of a file that holds one.",
        )
    return path.read_text(encoding="utf-8")
