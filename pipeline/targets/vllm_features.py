"""Features from vLLM's pooling runner: the states after the final norm, in the target's dtype.

`token_embed` without activation returns the last hidden state of each prompt token. The defaults would normalise it
(use_activation) and return fp32 (head_dtype); prefix caching would omit shared positions.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import torch

from pipeline.targets.spec import TargetSpec, context_length
from pipeline.targets.vllm_engine import RunningEngine, import_vllm

ROWS_PER_CALL = 64


class VLLMFeatureEngine:
    """The FeatureEngine that vLLM runs; arguments and errors are those of VLLMGenerationEngine.

    Args:
        tokens_per_batch: Maximum tokens of one forward; at least one whole conversation.
    """

    def __init__(
        self,
        spec: TargetSpec,
        *,
        engine_args: Mapping[str, Any] | None = None,
        gpus: int = 0,
        tokens_per_batch: int = 16_384,
    ):
        import_vllm()
        from vllm.config import PoolerConfig

        ours = {
            "runner": "pooling",
            "convert": "embed",
            "pooler_config": PoolerConfig(task="token_embed", use_activation=False),
            "hf_overrides": {"head_dtype": "model"},
            "skip_tokenizer_init": False,  # the pooling front end requires one but does not use it
            "enable_prefix_caching": False,
            "enable_chunked_prefill": False,
            "max_num_batched_tokens": max(tokens_per_batch, context_length(spec)),
        }
        self._running = RunningEngine(spec, {**ours, **(engine_args or {})}, gpus)
        self.hidden_size: int = self._running.llm.model_config.get_hidden_size()
        self.dtype: torch.dtype = getattr(torch, spec.dtype)

    def stream(self, rows: Iterable[Sequence[int]]) -> Iterator[torch.Tensor]:
        """The states [T_i, D] of each row on the host, in order, 64 rows at a time."""
        remaining = iter(rows)
        while taken := list(islice(remaining, ROWS_PER_CALL)):
            prompts = [{"prompt_token_ids": list(ids)} for ids in taken]
            outputs = self._running.llm.encode(prompts, pooling_task="token_embed", use_tqdm=False)
            yield from (output.outputs.data.to("cpu", self.dtype) for output in outputs)

    def close(self) -> None:
        self._running.close()
