"""Real vLLM in this process, whose import takes longer than an engine's start.

In processes of their own are a server, and engines that know nothing of this project.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from pipeline.conversations.requests import Completion, Request
from pipeline.errors import ConfigError, EnvironmentFault
from pipeline.evaluation.prompts import Prompt, with_room_for
from pipeline.export.directory import write_export
from pipeline.export.layout import ExportLayout, read_layout
from pipeline.heads.kind import Heads, TargetWeights
from pipeline.heads.medusa import MedusaHeads
from pipeline.heads.recurrent import RecurrentHeads
from pipeline.heads.shapes import MedusaShape, RecurrentShape
from pipeline.targets import vllm_decode, vllm_server
from pipeline.targets.loading import lm_head_weight, load_causal_lm
from pipeline.targets.spec import TargetSpec, load_tokenizer, model_config
from pipeline.targets.transformers_engines import (
    TransformersFeatureEngine,
    TransformersGenerationEngine,
)
from pipeline.targets.vllm_engine import VLLMFeatureEngine, VLLMGenerationEngine, engine_arguments
from tests.cluster import work_here
from tests.heads.pruning import pruned
from tests.targets.conftest import CONTEXT, EOS
from tests.targets.quantized_copies import compressed

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("vllm_here")]

Engine = VLLMGenerationEngine | TransformersGenerationEngine
Texts = dict[str, Completion]


def run(engine: Engine, requests: list[Request]) -> Texts:
    for request in requests:
        engine.add(request)
    assert len(engine._ids) == len(requests)
    completions: Texts = {}
    while engine._ids:
        completions |= {completion.id: completion for completion in engine.step()}
    return completions


@pytest.fixture(scope="module")
def greedy(prompts: list[list[int]]) -> list[Request]:
    long = Request("long", [9] * (CONTEXT - 3), 24)
    return [Request(str(row), ids, 24) for row, ids in enumerate(prompts)] + [long]


@pytest.fixture(scope="module")
def sampled(prompts: list[list[int]]) -> list[Request]:
    return [
        Request(
            str(row), ids, 24, seed=row, temperature=0.8, top_p=1 - row / 30, stop_token_ids=(300,)
        )
        for row, ids in enumerate(prompts)
    ]


@dataclasses.dataclass(frozen=True)
class Written:
    """All that one engine wrote before it was closed."""

    greedy: Texts
    sampled: Texts
    alone: Texts
    joining: Texts
    refusals: list[str]
    environment_before: dict[str, str]


@pytest.fixture(scope="module")
def written(random_target: TargetSpec, greedy: list[Request], sampled: list[Request]) -> Written:
    before = dict(os.environ)
    engine = VLLMGenerationEngine(random_target)
    waiting, joining = list(sampled), {}
    while waiting or engine._ids:
        if waiting:
            engine.add(waiting.pop())
        joining |= {completion.id: completion for completion in engine.step()}
    refusals = []
    for ids in ([], [1] * CONTEXT):
        with pytest.raises(ValueError, match="prompt tokens") as refusal:
            engine.add(Request("bad", ids, 5))
        refusals.append(str(refusal.value))
    assert engine.step() == []
    result = Written(
        greedy=run(engine, greedy),
        sampled=run(engine, sampled),
        alone={request.id: run(engine, [request])[request.id] for request in sampled},
        joining=joining,
        refusals=refusals,
        environment_before=before,
    )
    engine.close()
    return result


def test_greedy_text_is_that_of_the_transformers_engine(
    written: Written, random_target: TargetSpec, greedy: list[Request]
) -> None:
    assert written.greedy == run(TransformersGenerationEngine(random_target), greedy)


def test_a_seeded_text_does_not_depend_on_its_batch(written: Written) -> None:
    assert written.sampled == written.alone == written.joining


def test_a_stop_token_ends_a_text_and_is_its_last_id(written: Written) -> None:
    for completion in written.sampled.values():
        stops = [token in {*EOS, 300} for token in completion.token_ids]
        assert stops[-1] == (completion.finished == "stop")
        assert not any(stops[:-1])
    assert {completion.finished for completion in written.sampled.values()} == {"stop", "length"}


def test_a_text_ends_with_the_context(written: Written) -> None:
    long = written.greedy["long"]
    assert len(long.token_ids) == 3 or long.finished == "stop"


def test_a_prompt_that_leaves_no_room_is_refused(written: Written) -> None:
    assert len(written.refusals) == 2


def test_states_equal_those_of_transformers(
    random_target: TargetSpec, prompts: list[list[int]]
) -> None:
    engine = VLLMFeatureEngine(random_target)
    rows = [*prompts, prompts[2]]  # a prefix cache would leave out the repeated row
    next(engine.stream(rows))  # a stream that is given up leaves nothing to the next one
    states = dict(engine.stream(rows * 9))  # more rows than the engine is given at once
    engine.close()
    expected = dict(TransformersFeatureEngine(random_target).stream(rows))
    assert (engine.hidden_size, engine.dtype) == (128, torch.float32)
    assert sorted(states) == list(range(9 * len(rows)))
    for index, actual_TD in states.items():
        torch.testing.assert_close(actual_TD, expected[index % len(rows)], rtol=1e-3, atol=1e-4)


def test_a_closed_engine_leaves_the_process_as_it_was(written: Written) -> None:
    assert "vllm" not in torch.set_num_threads.__module__
    for name in ("LD_PRELOAD", "LOCAL_WORLD_SIZE"):
        assert os.environ.get(name) == written.environment_before.get(name)
    assert not torch.distributed.is_initialized()


# --- the decode check


@pytest.fixture
def export(counting_target: TargetSpec, tmp_path: Path) -> Path:
    return exported(counting_target, right_heads(counting_target), "expanded", tmp_path)


def right_heads(counting_target: TargetSpec) -> MedusaHeads:
    """Three heads that are always right about the counting target: row t of head k's output is the
    embedding of t - 2 - k, and its block adds nothing."""
    lm_head = lm_head_weight(load_causal_lm(counting_target))
    heads = MedusaHeads(MedusaShape(hidden_size=128, vocab_size=512, num_heads=3))
    heads.lm_head.data = torch.stack([lm_head.roll(head + 1, dims=0) for head in range(3)])
    return heads


def heads_of_one_lm_head(counting_target: TargetSpec) -> Heads:
    """All heads guess t+2, and the first is right; by the target's own lm_head they would guess
    t+1, and none were.

    Their draft vocabulary leaves out every third token: the guess after the one that follows it is
    right again.
    """
    lm_head = lm_head_weight(load_causal_lm(counting_target))
    heads = MedusaHeads(MedusaShape(hidden_size=128, vocab_size=512, num_heads=3, lm_head="shared"))
    heads.lm_head.data = lm_head.roll(1, dims=0)
    return pruned(heads, [token for token in range(512) if token % 3])


def right_cell(counting_target: TargetSpec) -> RecurrentHeads:
    """Its state is the embedding of the token it has read, which is what the counting target's
    lm_head reads.
    """
    model = load_causal_lm(counting_target)
    matrices = TargetWeights(
        lambda: lm_head_weight(model), lambda: model.get_input_embeddings().weight
    )
    heads = RecurrentHeads.initial(
        RecurrentShape(128, 512, num_heads=3, intermediate_size=64), matrices
    )
    heads.fc.data = torch.eye(128, 256)
    return heads


def exported(counting_target: TargetSpec, heads: Heads, format: str, directory: Path) -> Path:
    config = ExportLayout(counting_target.model, heads.shape, format)
    tokenizer, target = load_tokenizer(counting_target), model_config(counting_target).to_dict()
    rest = {"target": target, "tokenizer": tokenizer, "choices": [(0,)], "card": ""}
    write_export(directory / "export", heads, config, **rest)
    return directory / "export"


SERVE_ALONE = """
import gc, json, os, sys
from vllm import LLM, SamplingParams

gc.collect()
gc.freeze()  # no collection that an engine asks for looks through vLLM

def serve(export):
    llm = LLM(model=export, dtype="float32", max_model_len=128, enforce_eager=True, disable_log_stats=False)
    prompts = [{"prompt_token_ids": ids} for ids in json.loads(sys.argv[1])]
    wanted = SamplingParams(temperature=0, max_tokens=33, detokenize=False)
    outputs = llm.generate(prompts, wanted, use_tqdm=False)
    counted = {metric.name: getattr(metric, "value", 0) for metric in llm.get_metrics()}
    accepted, drafts = (counted[f"vllm:spec_decode_num_{name}"] for name in ("accepted_tokens", "drafts"))
    found = [[list(output.outputs[0].token_ids) for output in outputs], 1 + accepted / drafts]
    with open(os.path.join(export, "found.json"), "w") as file:
        json.dump(found, file)

for export in sys.argv[2:]:  # each in a process of its own, which has vLLM loaded
    child = os.fork()
    if not child:
        serve(export)
        os._exit(0)
    if os.waitpid(child, 0)[1]:
        sys.exit(1)
"""  # noqa: E501


PROMPTS = [[3, 100], [7, 7, 250], [300, 17]]


def rates_of_exports_alone(*exports: Path) -> list[float]:
    """With nothing of the project in the process, as `vllm serve EXPORT` does; their texts have to
    be the target's.
    """
    settings = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }
    command = [sys.executable, "-c", SERVE_ALONE, json.dumps(PROMPTS), *map(str, exports)]
    ended = subprocess.run(
        command,
        env=os.environ | settings,
        cwd=exports[0],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-2000:]
    found = [json.loads((export / "found.json").read_text()) for export in exports]
    expected = [[ids[-1] + 1 + step for step in range(33)] for ids in PROMPTS]
    assert all(texts == expected for texts, _ in found)
    return [rate for _, rate in found]


def test_vllm_serves_target_and_heads_of_an_export_alone(
    counting_target: TargetSpec, tmp_path: Path
) -> None:
    """Heads of one lm_head read it from the file, and not the target's."""
    one_lm_head, cell = rates_of_exports_alone(
        exported(
            counting_target, heads_of_one_lm_head(counting_target), "shared", tmp_path / "one"
        ),
        exported(counting_target, right_cell(counting_target), "expanded", tmp_path / "cell"),
    )
    assert 1.4 < one_lm_head < 1.6 and 3.5 < cell <= 4


def test_heads_that_are_always_right_accept_everything_in_vllm(
    counting_target: TargetSpec, export: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    work_here(monkeypatch, vllm_decode)
    prompts = [[100], [7, 7, 250], [300, 2, 17], [500]]
    alone = read_layout(export).engine_args(export, counting_target.model)
    assert alone == {"model": str(export)}, (
        "the engine reads from the export which target and how many tokens"
    )
    told: list[dict] = []
    plain, accelerated = vllm_decode.decode_in_vllm(
        counting_target,
        [{}, alone],
        prompts,
        33,
        repeats=2,
        told=lambda **progress: told.append(progress),
    )
    assert {each["part"] for each in told} >= {"plain vLLM starts", "vLLM with the heads starts"}
    assert all(each["total"] == 8 for each in told if "total" in each)
    expected = [[(ids[-1] + 1 + step) for step in range(33)] for ids in prompts[:3]] + [
        [*range(501, 512), 0, 1, 2]
    ]
    assert plain.token_ids == accelerated.token_ids == expected
    assert plain.num_tokens == 3 * 33 + 14
    assert plain.model_runner == accelerated.model_runner == "V1", "the CPU build has no other"
    assert plain.accepted == [[1] * 32] * 3 + [[1] * 13]
    # 32 tokens after the prefill's are 8 steps of four, and 13 are three and one that the text's
    # end cuts short
    assert accelerated.accepted == [[4] * 8] * 3 + [[4, 4, 4, 1]]


def test_a_cell_that_is_always_right_accepts_more_than_it_was_trained_for(
    counting_target: TargetSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    work_here(monkeypatch, vllm_decode)
    export = exported(counting_target, right_cell(counting_target), "expanded", tmp_path)
    apart = {"speculative_config": RecurrentHeads.speculative_config(str(export), 5)}
    (result,) = vllm_decode.decode_in_vllm(counting_target, [apart], PROMPTS, 33)
    assert result.token_ids == [[ids[-1] + 1 + step for step in range(33)] for ids in PROMPTS]
    assert result.accepted == [[6] * 5 + [2]] * 3, "of 32 tokens after the prefill's"


def often_right_heads(counting_target: TargetSpec) -> MedusaHeads:
    """`right_heads` with so much noise that most chains break before their end."""
    heads = right_heads(counting_target)
    heads.lm_head.data += 3 * torch.randn(
        heads.lm_head.shape, generator=torch.Generator().manual_seed(0)
    )
    return heads


def often_right_cell(counting_target: TargetSpec) -> RecurrentHeads:
    """`right_cell` with noise in the state that it goes on from."""
    heads = right_cell(counting_target)
    heads.fc.data += 0.1 * torch.randn(heads.fc.shape, generator=torch.Generator().manual_seed(0))
    return heads


@torch.inference_mode()
def chain_through(
    target: TargetSpec, heads: Heads, num_tokens: int, prompt: list[int], answer: list[int]
) -> list[int]:
    """The number of tokens that each step of decoding with the heads' first guesses adds to the
    answer.

    A step begins at each token that the target has chosen; of the guesses after it those before the
    first wrong one are kept, and one more token of the target's own, up to the answer's end.
    """
    states_TD = load_causal_lm(target)(
        torch.tensor([prompt + answer]), output_hidden_states=True
    ).hidden_states[-1][0]
    place, accepted = 0, []
    while later := answer[place + 1 :]:
        hidden_11D, token_11 = (
            states_TD[len(prompt) + place - 1].view(1, 1, -1),
            torch.tensor([[answer[place]]]),
        )
        right = 0
        for depth, token in enumerate(later[:num_tokens]):
            hidden_11D, logits_11V = heads.expand(hidden_11D, token_11, depth)
            token_11 = logits_11V.argmax(-1)
            if token_11.item() != token:
                break
            right += 1
        accepted.append(min(right + 1, len(later)))
        place += accepted[-1]
    return accepted


@pytest.mark.parametrize(("make", "num_tokens"), [(often_right_heads, 3), (often_right_cell, 5)])
def test_each_request_takes_the_steps_that_its_text_takes_natively(
    counting_target: TargetSpec,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    make,
    num_tokens: int,
) -> None:
    """Also where a prompt is computed in parts, a request waits, or the longest text ends at its
    limit.
    """
    work_here(monkeypatch, vllm_decode)
    heads = make(counting_target)
    export = exported(counting_target, heads, "expanded", tmp_path)
    args = {"speculative_config": heads.speculative_config(str(export), num_tokens)}
    args |= {"enable_chunked_prefill": True, "max_num_batched_tokens": 32}
    prompts = [[100], [9] * 70, [300, 17], [7] * 45 + [200], [500], [510], [1]]
    target = with_room_for(counting_target, [Prompt("a", ids) for ids in prompts], 33, num_tokens)
    (found,) = vllm_decode.decode_in_vllm(target, [args], prompts, 33, at_once=3)
    texts = [[(prompt[-1] + step) % 512 for step in range(1, 34)] for prompt in prompts]
    ended = [text[: text.index(2) + 1] if 2 in text else text for text in texts]
    assert found.token_ids == ended and list(map(len, ended)) == [33, 33, 33, 33, 14, 4, 1]
    walked = [
        chain_through(counting_target, heads, num_tokens, *pair)
        for pair in zip(prompts, ended, strict=True)
    ]
    assert found.accepted == walked
    lengths = {kept for steps in walked for kept in steps}
    assert lengths == set(range(1, num_tokens + 2)), "guesses are wrong at every depth"


def test_a_server_with_heads_that_are_always_right_answers_as_many_tokens_in_fewer_steps(
    counting_target: TargetSpec, export: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    work_here(monkeypatch, vllm_server)
    monkeypatch.setenv(
        "VLLM_WORKER_MULTIPROC_METHOD", "fork"
    )  # vLLM's default, which starts faster
    alone = read_layout(export).engine_args(export, counting_target.model)
    (found,) = vllm_server.serve_under_load(counting_target, [alone], PROMPTS, (1, 2), 33)
    for at_level, level in zip(found, (1, 2), strict=True):
        assert at_level["num_tokens"] == 33 * max(3, 2 * level), "prompts repeat"
        assert at_level["acceleration_rate"] == 4, "of 32 tokens after the prefill's, in 8 drafts"
        assert len(at_level["ttft"]) == len(at_level["tpot"]) == max(3, 2 * level)
        assert at_level["requests"] == level


# --- what cannot start


def test_a_missing_vllm_says_how_to_install_it(
    random_target: TargetSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(EnvironmentFault, match=r"not importable.*engine: transformers"):
        VLLMGenerationEngine(random_target)


@pytest.mark.parametrize(
    "arguments", [{"num_wheels": 4}, {"max_model_len": 10 * CONTEXT}, {"dtype": "float13"}]
)
def test_an_argument_that_vllm_refuses_is_a_configuration_error(
    random_target: TargetSpec, arguments: dict[str, object]
) -> None:
    with pytest.raises(ConfigError, match=f"rejects an argument: .*{next(iter(arguments))}"):
        VLLMGenerationEngine(random_target, engine_args=arguments)


def test_an_engine_that_cannot_start_says_why(random_target: TargetSpec) -> None:
    with pytest.raises(EnvironmentFault, match="Available memory"):
        VLLMGenerationEngine(random_target, engine_args={"kv_cache_memory_bytes": 1 << 50})


def test_a_gpu_that_vllm_finds_too_old_is_an_environment_fault(
    tiny_target, tmp_path, monkeypatch
) -> None:
    """A P100, of which vLLM's own check of the format says that it is not supported."""
    from vllm.platforms import current_platform
    from vllm.platforms.interface import DeviceCapability

    copy = compressed(tiny_target, tmp_path, name="int8")
    monkeypatch.setattr(
        type(current_platform), "get_device_capability", lambda *_, **__: DeviceCapability(6, 0)
    )
    with pytest.raises(EnvironmentFault, match="is not supported for the current GPU") as caught:
        VLLMGenerationEngine(TargetSpec(str(copy)))
    assert caught.value.exit_code == 4 and "\n" not in str(caught.value)


def test_a_quantized_target_is_sent_to_transformers(random_target: TargetSpec) -> None:
    with pytest.raises(ConfigError, match="engine: transformers"):
        VLLMGenerationEngine(dataclasses.replace(random_target, quantization="4bit"))


@pytest.mark.skipif(
    torch.cuda.is_available(), reason="this machine has the GPU that must be missing"
)
def test_a_missing_gpu_is_an_environment_fault(random_target: TargetSpec) -> None:
    with pytest.raises(EnvironmentFault, match="1 GPUs are asked for"):
        VLLMGenerationEngine(random_target, gpus=1)


def test_the_users_engine_arguments_override_ours(random_target: TargetSpec) -> None:
    arguments = engine_arguments(random_target, {"enforce_eager": False, "max_num_seqs": 8}, gpus=0)
    assert (arguments["enforce_eager"], arguments["max_num_seqs"]) == (False, 8)


def test_prompts_are_prefilled_whole_on_a_cpu(random_target: TargetSpec) -> None:
    arguments = engine_arguments(random_target, {}, gpus=0)
    assert arguments["enable_chunked_prefill"] is False
    assert arguments["max_num_batched_tokens"] >= arguments["max_model_len"] == CONTEXT
