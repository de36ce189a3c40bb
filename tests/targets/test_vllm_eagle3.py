"""EAGLE-3 heads in real vLLM: it drafts what the layer drafts here."""

from __future__ import annotations

from collections import defaultdict

import pytest
import torch
from torch import Tensor

from pipeline.export.directory import write_export
from pipeline.export.layout import ExportLayout
from pipeline.heads.eagle3 import SERVED, Eagle3Heads
from pipeline.heads.kind import Rows, TargetWeights
from pipeline.heads.shapes import Eagle3Shape
from pipeline.targets import vllm_decode
from pipeline.targets.loading import layer_outputs, lm_head_weight, load_causal_lm
from pipeline.targets.spec import load_tokenizer, model_config
from pipeline.targets.vllm_decode import DecodeTask, decode_in_vllm
from tests.cluster import work_here
from tests.heads.pruning import pruned
from tests.targets.conftest import SHAPE, save_target
from tests.tiny_models import tiny_llama

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("vllm_here")]

NUM_TOKENS, NUM_DRAFTS = 40, 4
PROMPTS = [[3, 100], [9, 400, 31, 31, 250, 8, 77], [300] * 30 + [17]]


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    """A random Llama of six layers whose text does not end."""
    model = tiny_llama(**SHAPE, num_hidden_layers=6, initializer_range=0.2)
    return save_target(model, tmp_path_factory.mktemp("six"), (2,))


@pytest.fixture(scope="module")
def texts(target):
    """The prompts with their greedy answers, by transformers."""
    model = load_causal_lm(target)
    found = []
    for prompt in PROMPTS:
        ids_1T = torch.tensor([prompt])
        options = {"max_new_tokens": NUM_TOKENS, "do_sample": False, "attention_mask": ids_1T > -1}
        found.append(model.generate(ids_1T, **options)[0].tolist())
    return found


def states_of(target, layers, texts) -> list[Tensor]:
    """What heads read at every position of each text, [T, X]."""
    model = load_causal_lm(target)
    with torch.no_grad(), layer_outputs(model, layers) as seen:
        for ids in texts:
            model(torch.tensor([ids]))
    return [states_1TX[0] for states_1TX in seen]


def half_trained(target, shape, texts) -> Eagle3Heads:
    """Random heads that have learned the texts, so that vLLM accepts some of their guesses."""
    model = load_causal_lm(target)
    borrowed = TargetWeights(
        lambda: lm_head_weight(model), lambda: model.get_input_embeddings().weight
    )
    torch.manual_seed(0)
    heads = Eagle3Heads.initial(shape, borrowed)
    for weight in (heads.o, heads.down):
        torch.nn.init.normal_(weight, std=0.1)
    batches = []
    for ids, states_TX in zip(texts, states_of(target, shape.layers, texts), strict=True):
        num_rows = len(ids) - 1 - shape.num_heads
        learned_N = torch.arange(num_rows)
        later = [torch.tensor(ids[2 + k : 2 + k + num_rows]) for k in range(shape.num_heads)]
        tokens_S = torch.tensor(ids[1:])
        rows = Rows(states_TX[:-1], tokens_S, torch.zeros_like(tokens_S), learned_N)
        batches.append((tokens_S[:num_rows], torch.stack(later), rows))
    trained = [each for each in heads.parameters() if each.requires_grad]
    optimizer = torch.optim.Adam(trained, lr=2e-3)
    for _ in range(12):
        for next_N, labels_KN, rows in batches:
            weights_K = torch.ones(shape.num_heads) / len(next_N)
            hidden = torch.empty(len(next_N), 0)
            loss, _ = heads.weighted_loss(hidden, next_N, labels_KN, None, weights_K, rows)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return heads.requires_grad_(False)


def drafted(heads, states_TX, ids, position) -> list[int]:
    """The chain that the heads draft after `position`, whose next token is known."""
    cache = heads.open_cache(1, len(ids))
    next_1T = torch.tensor([ids[1 : position + 2]])
    number = torch.tensor([position + 1])
    hidden_11D = heads.advance(states_TX[None, : position + 1], next_1T, number, cache)[:, None]
    token_11, found = next_1T[:, -1:], []
    for depth in range(NUM_DRAFTS):
        hidden_11D, logits_11V = heads.expand(hidden_11D, token_11, depth, cache)
        token_11 = heads.vocabulary.tokens_of_rows(logits_11V.argmax(-1))
        found.append(token_11.item())
    return found


@pytest.fixture
def drafts(monkeypatch):
    """What vLLM drafts: a list of (position, next token, drafted tokens)."""
    from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer

    found, propose = [], SpecDecodeBaseProposer.propose

    def keep(self, *args, **given):
        drafted_BK = propose(self, *args, **given)
        ends = given["common_attn_metadata"].query_start_loc[1:] - 1
        if given["token_indices_to_sample"] is not None:
            ends = given["token_indices_to_sample"]
        columns = (given["target_positions"][ends], given["next_token_ids"], drafted_BK)
        found.extend(zip(*(column.tolist() for column in columns), strict=True))
        return drafted_BK

    monkeypatch.setattr(SpecDecodeBaseProposer, "propose", keep)
    return found


@pytest.mark.parametrize(
    ("layers", "tokens", "norm_before_residual", "alone"),
    [
        ((2, 3), None, True, False),
        ((1, 4, 6), [token for token in range(512) if token % 5], False, True),
    ],
)
def test_vllm_drafts_the_chain_of_the_layer(
    target, texts, drafts, tmp_path, monkeypatch, layers, tokens, norm_before_residual, alone
):
    """Draft by draft, whether vLLM is given target and export or the export alone."""
    work_here(monkeypatch, vllm_decode)
    shape = Eagle3Shape(
        128,
        512,
        3,
        layers=layers,
        intermediate_size=64,
        attention_heads=4,
        key_value_heads=2,
        rope_theta=500.0,
        norm_before_residual=norm_before_residual,
    )
    heads = half_trained(target, shape, texts)
    if tokens:
        heads = pruned(heads, tokens)
    layout = ExportLayout(target.model, heads.shape, num_speculative_tokens=NUM_DRAFTS)
    export = tmp_path / "export"
    stored = {"target": model_config(target).to_dict(), "tokenizer": load_tokenizer(target)}
    write_export(export, heads, layout, **stored, choices=[(0,)], card="")
    args = {"speculative_config": layout.speculative_config(export)}
    if alone:
        args = layout.engine_args(export, target.model)
        assert args == {"model": str(export)}
    (found,) = decode_in_vllm([DecodeTask(target, PROMPTS, NUM_TOKENS, args)])
    answers = [ids[len(prompt) :] for ids, prompt in zip(texts, PROMPTS, strict=True)]
    assert found.token_ids == answers
    chains = defaultdict(list)  # by position and next token
    for ids, states_TX in zip(texts, states_of(target, layers, texts), strict=True):
        for position in range(len(ids) - 1):
            chain = drafted(heads, states_TX, ids, position)
            chains[position, ids[position + 1]].append(chain)
    within = [each for each in drafts if each[:2] in chains]  # vLLM also drafts after an end
    is_equal = [chain in chains[position, token] for position, token, chain in within]
    assert all(is_equal) and len(is_equal) > 40
    steps = {kept for answer in found.accepted for kept in answer}
    assert steps >= {1, 2, 3}, "guesses are right and wrong at several depths"


def test_vllm_returns_layer_outputs_of_the_targets_that_it_serves():
    from vllm.model_executor.models import ModelRegistry
    from vllm.model_executor.models.interfaces import supports_eagle3

    for name in SERVED:
        assert supports_eagle3(ModelRegistry.models[name].load_model_cls()), name
    assert not supports_eagle3(ModelRegistry.models["Gemma3ForCausalLM"].load_model_cls())
