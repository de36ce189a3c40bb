"""Engines in real vLLM in this process, and exports in its server."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Gemma3TextConfig

from pipeline.conversations.requests import Request
from pipeline.errors import ConfigError, EnvironmentFault
from pipeline.evaluation.prompts import Prompt, with_room_for
from pipeline.export.directory import write_export
from pipeline.export.layout import ExportLayout, read_layout
from pipeline.heads.kind import TargetWeights
from pipeline.heads.medusa import MedusaHeads
from pipeline.heads.recurrent import RecurrentHeads
from pipeline.heads.shapes import MedusaShape, RecurrentShape
from pipeline.targets import vllm_decode, vllm_load
from pipeline.targets.loading import lm_head_weight, load_causal_lm
from pipeline.targets.spec import TargetSpec, load_tokenizer, model_config
from pipeline.targets.transformers_engines import (
    TransformersFeatureEngine,
    TransformersGenerationEngine,
)
from pipeline.targets.vllm_decode import ENOUGH_REPEATS, DecodeTask, decode_in_vllm
from pipeline.targets.vllm_engine import VLLMFeatureEngine, VLLMGenerationEngine
from pipeline.targets.vllm_load import LoadTask, serve_under_load
from tests.cluster import work_here
from tests.heads.pruning import pruned
from tests.targets.conftest import CONTEXT, EOS
from tests.targets.test_transformers_generation import run
from tests.tiny_models import SIZES, tiny_model

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("vllm_here")]


@pytest.fixture(scope="module")
def beside_older_weights(random_target, tmp_path_factory):
    """The random target with other weights in Mistral's own format, which vLLM prefers."""
    directory = tmp_path_factory.mktemp("mistral") / "target"
    shutil.copytree(random_target.model, directory)
    weights = load_file(directory / "model.safetensors")
    index = {"weight_map": dict.fromkeys(weights, "model.safetensors")}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    older = {name: weight + 1 for name, weight in weights.items()}
    save_file(older, directory / "consolidated.safetensors", {"format": "pt"})
    return replace(random_target, model=str(directory))


@pytest.fixture(scope="module")
def engine(random_target, beside_older_weights):
    """A vLLM generation engine; closing it restores this process's state."""
    before = dict(os.environ)
    engine = VLLMGenerationEngine(beside_older_weights, {})
    yield engine
    engine.close()
    with pytest.raises(EnvironmentFault, match="Available memory"):
        VLLMGenerationEngine(random_target, {"kv_cache_memory_bytes": 1 << 50})
    assert "vllm" not in torch.set_num_threads.__module__
    for name in ("LD_PRELOAD", "LOCAL_WORLD_SIZE"):
        assert os.environ.get(name) == before.get(name)
    assert not torch.distributed.is_initialized()


def test_greedy_text_is_that_of_the_transformers_engine(engine, random_target, prompts):
    requests = [Request(str(row), ids, 24) for row, ids in enumerate(prompts)]
    requests.append(Request("long", [9] * (CONTEXT - 3), 24))
    assert run(engine, requests) == run(TransformersGenerationEngine(random_target), requests)


def test_a_seeded_text_ends_at_its_first_stop_token(engine, prompts):
    requests = []
    for row, ids in enumerate(prompts):
        sampling = {"seed": row, "temperature": 0.8, "top_p": 1 - row / 30}
        requests.append(Request(str(row), ids, 24, stop_token_ids=(300,), **sampling))
    texts = run(engine, requests)
    assert run(engine, requests[::-1], one_per_step=True) == texts
    for request in requests:
        assert run(engine, [request]) == {request.id: texts[request.id]}
    for completion in texts.values():
        stops = [token in {*EOS, 300} for token in completion.token_ids]
        assert stops[-1] == (completion.finished == "stop") and not any(stops[:-1])
    assert {completion.finished for completion in texts.values()} == {"stop", "length"}


def test_states_equal_those_of_transformers(random_target, prompts):
    engine = VLLMFeatureEngine(random_target, {})
    next(engine.stream(prompts))  # an abandoned stream leaves nothing to the next one
    # a prefix cache would leave out repeated rows; more rows than the engine is given at once
    states = dict(engine.stream(prompts * 9))
    engine.close()
    assert len(states) == 9 * len(prompts)
    for index, expected_TD in TransformersFeatureEngine(random_target).stream(prompts * 9):
        torch.testing.assert_close(states[index], expected_TD, rtol=1e-3, atol=1e-4)


def test_outputs_of_layers_equal_those_of_transformers(random_target, prompts):
    engine = VLLMFeatureEngine(random_target, {}, layers=(1, 2))
    states = dict(engine.stream(prompts))
    engine.close()
    for index, expected_TX in TransformersFeatureEngine(random_target, layers=(1, 2)).stream(
        prompts
    ):
        torch.testing.assert_close(states[index], expected_TX, rtol=1e-3, atol=1e-3)


def test_a_class_of_vllm_without_outputs_of_layers_is_refused(tmp_path, random_target):
    config = Gemma3TextConfig(**SIZES, head_dim=64, max_position_embeddings=128)
    tiny_model(config).save_pretrained(tmp_path)
    load_tokenizer(random_target).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"features\.engine"):
        VLLMFeatureEngine(TargetSpec(str(tmp_path)), {}, layers=(1, 2))


# --- heads for the counting target


def right_heads(target, noise=0):
    """Return three Medusa heads that are always right on the counting target.

    Row t of head k's output is the embedding of t - 2 - k, and its block adds nothing. With noise
    most chains break before their end.
    """
    lm_head = lm_head_weight(load_causal_lm(target))
    heads = MedusaHeads(MedusaShape(hidden_size=128, vocab_size=512, num_heads=3))
    heads.lm_head.data = torch.stack([lm_head.roll(head + 1, dims=0) for head in range(3)])
    heads.lm_head.data += noise * torch.randn_like(heads.lm_head)
    return heads


def heads_of_one_lm_head(target):
    """Return pruned heads with a shared lm_head that all guess t + 2.

    The first head is right. With the target's own lm_head they would guess t + 1, and all would be
    wrong.

    Their draft vocabulary leaves out every third token: the guess after the one that follows it is
    right again.
    """
    lm_head = lm_head_weight(load_causal_lm(target))
    heads = MedusaHeads(MedusaShape(hidden_size=128, vocab_size=512, num_heads=3, lm_head="shared"))
    heads.lm_head.data = lm_head.roll(1, dims=0)
    return pruned(heads, [token for token in range(512) if token % 3])


def right_cell(target, noise=0):
    """Return recurrent heads that are always right on the counting target.

    Their state is the embedding of the token that they read. Noise changes the state.
    """
    model = load_causal_lm(target)
    matrices = TargetWeights(
        lambda: lm_head_weight(model), lambda: model.get_input_embeddings().weight
    )
    shape = RecurrentShape(128, 512, num_heads=3, intermediate_size=64)
    heads = RecurrentHeads.initial(shape, matrices)
    heads.fc.data = torch.eye(128, 256) + noise * torch.randn(128, 256)
    return heads


def exported(target, heads, format, directory):
    write_export(
        directory / "export",
        heads,
        ExportLayout(target.model, heads.shape, format),
        target=model_config(target).to_dict(),
        tokenizer=load_tokenizer(target),
        choices=[(0,)],
        card="",
    )
    return directory / "export"


def counted(prompt, num_tokens=33):
    """Return the counting target's answer."""
    text = [(prompt[-1] + step) % 512 for step in range(1, num_tokens + 1)]
    return text[: text.index(2) + 1] if 2 in text else text


PROMPTS = [[3, 100], [7, 7, 250], [300, 17]]


# --- the decode check


@torch.inference_mode()
def chain_through(target, heads, num_tokens, prompt, answer):
    """Return the number of tokens that each native step adds to the answer.

    A step begins at each token that the target has chosen; of the guesses after it those before the
    first wrong one are kept, and one more token of the target's own, up to the answer's end.
    """
    ids_1T = torch.tensor([prompt + answer])
    states_TD = load_causal_lm(target)(ids_1T, output_hidden_states=True).hidden_states[-1][0]
    place, accepted = 0, []
    while place + 1 < len(answer):
        later = answer[place + 1 :]
        hidden_11D = states_TD[len(prompt) + place - 1].view(1, 1, -1)
        token_11 = torch.tensor([[answer[place]]])
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


@pytest.mark.parametrize(
    ("make", "noise", "num_tokens"), [(right_heads, 3, 3), (right_cell, 0.1, 5)]
)
def test_vllm_takes_the_steps_that_a_text_takes_natively(
    counting_target, tmp_path, monkeypatch, make, noise, num_tokens
):
    """Prompts are computed in parts, requests wait, and the longest text ends at its limit."""
    work_here(monkeypatch, vllm_decode)
    heads = make(counting_target, noise)
    export = exported(counting_target, heads, "expanded", tmp_path)
    args = {"speculative_config": heads.speculative_config(str(export), num_tokens)}
    args |= {"enable_chunked_prefill": True, "max_num_batched_tokens": 32, "max_num_seqs": 3}
    prompts = [[100], [9] * 70, [300, 17], [7] * 45 + [200], [500], [510], [1]]
    target = with_room_for(counting_target, [Prompt("a", ids) for ids in prompts], 33, num_tokens)
    with_heads, reports = DecodeTask(target, prompts, 33, args, in_turn=(0, 1)), []
    plain, found = decode_in_vllm(
        [replace(with_heads, engine_args={}), with_heads],
        lambda **progress: reports.append(progress),
    )
    assert (reports[0]["part"], reports[-1]["done"]) == ("plain vLLM starts", 2)
    answers = [counted(ids) for ids in prompts]
    assert list(map(len, answers)) == [33, 33, 33, 33, 14, 4, 1]
    assert plain.token_ids == found.token_ids == answers
    assert 1 <= len(plain.in_turn()) == len(plain.at_once()) <= ENOUGH_REPEATS
    assert plain.accepted == [[1] * (len(answer) - 1) for answer in answers]
    pairs = zip(prompts, answers, strict=True)
    natively = [chain_through(counting_target, heads, num_tokens, *pair) for pair in pairs]
    assert found.accepted == natively
    lengths = {kept for steps in natively for kept in steps}
    assert lengths == set(range(1, num_tokens + 2)), "guesses are wrong at every depth"


def test_vllm_reads_the_lm_head_that_pruned_heads_share(counting_target, tmp_path, monkeypatch):
    work_here(monkeypatch, vllm_decode)
    heads = heads_of_one_lm_head(counting_target)
    export = exported(counting_target, heads, "shared", tmp_path)
    args = {"speculative_config": heads.speculative_config(str(export), 3)}
    (found,) = decode_in_vllm([DecodeTask(counting_target, PROMPTS, 33, args)])
    steps = [kept for answer in found.accepted for kept in answer]
    assert 1.3 < sum(steps) / len(steps) <= 1.7, "the first head is right two times of three"


def test_a_server_starts_with_target_and_heads_of_an_export(counting_target, tmp_path, monkeypatch):
    export = exported(counting_target, right_cell(counting_target), "expanded", tmp_path)
    alone = read_layout(export).engine_args(export, counting_target.model)
    assert alone == {"model": str(export)}, "the export names target and number of tokens"
    work_here(monkeypatch, vllm_load)
    # vLLM's default, which starts faster
    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "fork")
    (found,) = serve_under_load([LoadTask(counting_target, PROMPTS, 33, alone, levels=(1, 2))])
    for row, level, num_requests in zip(found, (1, 2), (3, 4), strict=True):
        assert (row.requests, row.num_tokens) == (level, 33 * num_requests)
        assert 3.5 < row.acceleration_rate <= 4
        assert len(row.ttft) == len(row.tpot) == num_requests


# --- what cannot start


def test_an_argument_that_vllm_refuses_is_a_configuration_error(random_target):
    with pytest.raises(ConfigError, match=r"rejects an argument: .*dtype"):
        VLLMGenerationEngine(random_target, {"dtype": "float13"})
