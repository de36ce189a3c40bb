"""The sizes of the models that configs/ and docs/models.md name, as their config.json on the Hub
has them.

Each is checked against the number of parameters that its authors state on its card. Of Gemma 3's
models with pictures it is the text model's part (`text_config`).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Published:
    """A model on the Hub: what its config.json says of its size, and how many parameters its card
    states.
    """

    hub_id: str
    model_type: str
    architecture: str
    billions: float
    sizes: dict[str, Any]

    def write(self, directory: Path) -> Path:
        """Its config.json in a directory; enough to plan with."""
        directory.mkdir(parents=True, exist_ok=True)
        content = {
            "model_type": self.model_type,
            "architectures": [self.architecture],
            "dtype": "bfloat16",
        }
        (directory / "config.json").write_text(json.dumps(content | self.sizes))
        return directory


def _sizes(
    hidden: int,
    inner: int,
    layers: int,
    heads: int,
    kv_heads: int,
    vocabulary: int,
    context: int,
    **more: Any,
) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocabulary,
        "max_position_embeddings": context,
        "tie_word_embeddings": False,
        **more,
    }


def _llama(hub_id: str, billions: float, *sizes: int, **more: Any) -> Published:
    return Published(hub_id, "llama", "LlamaForCausalLM", billions, _sizes(*sizes, **more))


def _mistral(hub_id: str, billions: float, *sizes: int, **more: Any) -> Published:
    more = {"sliding_window": None, **more}
    return Published(hub_id, "mistral", "MistralForCausalLM", billions, _sizes(*sizes, **more))


def _qwen2(hub_id: str, billions: float, *sizes: int, **more: Any) -> Published:
    return Published(hub_id, "qwen2", "Qwen2ForCausalLM", billions, _sizes(*sizes, **more))


def _qwen3(hub_id: str, billions: float, *sizes: int, **more: Any) -> Published:
    more = {"head_dim": 128, **more}
    return Published(hub_id, "qwen3", "Qwen3ForCausalLM", billions, _sizes(*sizes, **more))


def _gemma3(hub_id: str, billions: float, *sizes: int, **more: Any) -> Published:
    more = {"head_dim": 256, "tie_word_embeddings": True, **more}
    return Published(hub_id, "gemma3_text", "Gemma3ForCausalLM", billions, _sizes(*sizes, **more))


# hidden, inner, layers, heads, key-value heads, vocabulary, context
PUBLISHED = (
    _llama("meta-llama/Llama-3.1-8B-Instruct", 8.03, 4096, 14336, 32, 32, 8, 128256, 131072),
    _llama("meta-llama/Llama-3.1-70B-Instruct", 70.6, 8192, 28672, 80, 64, 8, 128256, 131072),
    _llama(
        "meta-llama/Llama-3.2-1B-Instruct",
        1.24,
        2048,
        8192,
        16,
        32,
        8,
        128256,
        131072,
        tie_word_embeddings=True,
    ),
    _llama(
        "meta-llama/Llama-3.2-3B-Instruct",
        3.21,
        3072,
        8192,
        28,
        24,
        8,
        128256,
        131072,
        tie_word_embeddings=True,
    ),
    _llama("meta-llama/Llama-3.3-70B-Instruct", 70.6, 8192, 28672, 80, 64, 8, 128256, 131072),
    _qwen2("Qwen/Qwen2.5-7B-Instruct", 7.61, 3584, 18944, 28, 28, 4, 152064, 32768),
    _qwen2("Qwen/Qwen2.5-14B-Instruct", 14.7, 5120, 13824, 48, 40, 8, 152064, 32768),
    _qwen2("Qwen/Qwen2.5-32B-Instruct", 32.5, 5120, 27648, 64, 40, 8, 152064, 32768),
    _qwen2("Qwen/Qwen2.5-72B-Instruct", 72.7, 8192, 29568, 80, 64, 8, 152064, 32768),
    _qwen3("Qwen/Qwen3-4B", 4.02, 2560, 9728, 36, 32, 8, 151936, 40960, tie_word_embeddings=True),
    _qwen3("Qwen/Qwen3-8B", 8.19, 4096, 12288, 36, 32, 8, 151936, 40960),
    _qwen3("Qwen/Qwen3-14B", 14.8, 5120, 17408, 40, 40, 8, 151936, 40960),
    _qwen3("Qwen/Qwen3-32B", 32.8, 5120, 25600, 64, 64, 8, 151936, 40960),
    Published(
        "Qwen/Qwen3-30B-A3B",
        "qwen3_moe",
        "Qwen3MoeForCausalLM",
        30.5,
        _sizes(2048, 6144, 48, 32, 4, 151936, 40960, head_dim=128)
        | {
            "moe_intermediate_size": 768,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "norm_topk_prob": True,
        },
    ),
    Published(
        "mistralai/Mixtral-8x7B-Instruct-v0.1",
        "mixtral",
        "MixtralForCausalLM",
        46.7,
        _sizes(4096, 14336, 32, 32, 8, 32000, 32768)
        | {"num_local_experts": 8, "num_experts_per_tok": 2},
    ),
    _mistral("mistralai/Mistral-7B-Instruct-v0.3", 7.25, 4096, 14336, 32, 32, 8, 32768, 32768),
    _mistral(
        "mistralai/Mistral-Small-24B-Instruct-2501",
        23.6,
        5120,
        32768,
        40,
        32,
        8,
        131072,
        32768,
        head_dim=128,
    ),
    _gemma3("google/gemma-3-1b-it", 1.0, 1152, 6912, 26, 4, 1, 262144, 32768, sliding_window=512),
    _gemma3(
        "google/gemma-3-12b-it", 11.8, 3840, 15360, 48, 16, 8, 262208, 131072, sliding_window=1024
    ),
    _gemma3(
        "google/gemma-3-27b-it",
        27.0,
        5376,
        21504,
        62,
        32,
        16,
        262208,
        131072,
        sliding_window=1024,
        head_dim=128,
    ),
    Published(
        "microsoft/phi-4",
        "phi3",
        "Phi3ForCausalLM",
        14.7,
        _sizes(5120, 17920, 40, 40, 10, 100352, 16384, pad_token_id=0),
    ),
    _llama("lmsys/vicuna-7b-v1.5", 6.74, 4096, 11008, 32, 32, 32, 32000, 4096),
    _llama("lmsys/vicuna-13b-v1.5", 13.0, 5120, 13824, 40, 40, 40, 32000, 4096),
    _llama("lmsys/vicuna-33b-v1.3", 32.5, 6656, 17920, 60, 52, 52, 32000, 2048),
    _mistral(
        "HuggingFaceH4/zephyr-7b-beta",
        7.24,
        4096,
        14336,
        32,
        32,
        8,
        32000,
        32768,
        sliding_window=4096,
    ),
)
BY_ID = {model.hub_id: model for model in PUBLISHED}
