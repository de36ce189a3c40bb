"""Features from vLLM's pooling runner: the states after the final norm, in the target's dtype.

`token_embed` without activation returns the last hidden state of each prompt token. The defaults
would normalise it (use_activation) and return fp32 (head_dtype); prefix caching would omit shared
positions.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping, Sequence
from itertools import islice
from typing import Any

import torch

from pipeline.targets.quantized import in_engine
from pipeline.targets.spec import TargetSpec, context_length
from pipeline.targets.vllm_engine import RunningEngine, import_vllm

ROWS_WAITING = 64  # in the engine: what it batches next, whatever the caller does meanwhile


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
        from vllm import PoolingParams
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
        spec = in_engine(spec, "vllm", on_gpu=gpus > 0)  # of which dtype the states are
        self._running = RunningEngine(spec, {**ours, **(engine_args or {})}, gpus)
        self.hidden_size: int = self._running.llm.model_config.get_hidden_size()
        self.dtype: torch.dtype = getattr(torch, spec.dtype)
        self._pooling = PoolingParams(task="token_embed")
        self._streams = 0

    def stream(
        self, rows: Iterable[Sequence[int]]
    ) -> Generator[tuple[int, torch.Tensor], None, None]:
        """Each row's index and its states [T_i, D] on the host; the engine always has rows to go on
        with.
        """
        engine = self._running.llm.llm_engine
        self._streams += 1
        remaining, waiting = enumerate(rows), dict[str, int]()
        try:
            while True:
                for index, ids in islice(remaining, ROWS_WAITING - len(waiting)):
                    name = f"{self._streams}:{index}"
                    prompt = {"type": "token", "prompt_token_ids": list(ids)}
                    engine.add_request(name, prompt, self._pooling.clone())
                    waiting[name] = index
                if not waiting:
                    return
                for output in engine.step():
                    if output.finished:
                        yield (
                            waiting.pop(output.request_id),
                            output.outputs.data.to("cpu", self.dtype),
                        )
        finally:
            engine.abort_request(list(waiting))

    def close(self) -> None:
        self._running.close()
