"""The recurrent cell: against transformers' own Llama layer, against walking each path alone, and
in its files.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from pipeline.artifacts.trained_heads import read_trained_heads, write_heads
from pipeline.conversations.spans import IGNORED
from pipeline.decoding.tree import Tree
from pipeline.heads.kind import Heads, TargetWeights
from pipeline.heads.medusa import MedusaHeads
from pipeline.heads.recurrent import RecurrentHeads
from pipeline.heads.shapes import EXPANDED, MedusaShape, RecurrentShape
from tests.decoding.steps import gumbel, random_trees

SIZE, INNER, VOCAB = 16, 24, 11
SHAPE = RecurrentShape(SIZE, VOCAB, num_heads=3, intermediate_size=INNER)


def random_cell(seed: int = 0, shape: RecurrentShape = SHAPE) -> RecurrentHeads:
    generator = torch.Generator().manual_seed(seed)
    heads = RecurrentHeads(shape, dtype=torch.float64)
    for parameter in heads.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator, dtype=torch.float64) / 2
    return heads


@pytest.mark.parametrize("epsilon", [1e-6, 0.5])
def test_a_step_is_the_layer_that_vllm_runs(epsilon):
    """An EAGLE-1 layer: no input norm, attention that adds nothing, then norm, MLP and residual."""
    own = random_cell().named_tensors()
    heads = RecurrentHeads.from_named_tensors(replace(SHAPE, norm_eps=epsilon), own)
    tensors = heads.named_tensors(EXPANDED)
    exported = heads.engine_config(heads.shape, EXPANDED, {})
    names = ("intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    sizes = {name: exported[name] for name in (*names, "rms_norm_eps")}
    assert exported["rms_norm_eps"] == epsilon
    config = LlamaConfig(hidden_size=SIZE, **sizes, attn_implementation="eager")
    layer = LlamaDecoderLayer(config, 0).double()
    layer.input_layernorm = nn.Identity()
    weights = {name: value for name, value in tensors.items() if name.startswith("layers.0.")}
    layer.load_state_dict({name.removeprefix("layers.0."): v for name, v in weights.items()})
    layer.self_attn.q_proj.weight.data.normal_()  # whatever attention sees, it adds nothing

    hidden, tokens = torch.randn(1, 5, SIZE, dtype=torch.float64), torch.randint(VOCAB, (1, 5))
    read = linear(torch.cat((heads.embedding[tokens], hidden), -1), tensors["fc.weight"])
    rotary = tuple(torch.randn(2, 1, 5, exported["head_dim"], dtype=torch.float64))
    expected = layer(read, position_embeddings=rotary)
    # Its norm is in fp32.
    torch.testing.assert_close(heads.step(hidden, tokens), expected, rtol=1e-5, atol=1e-5)


def test_a_cell_starts_as_the_target_and_borrows_its_matrices():
    embedding, lm_head = torch.randn(VOCAB, SIZE), torch.randn(VOCAB, SIZE)
    heads = RecurrentHeads.initial(SHAPE, TargetWeights(lambda: lm_head, lambda: embedding))
    hidden = torch.randn(4, SIZE)
    states = heads.states(hidden, torch.randint(VOCAB, (4,)), torch.randint(VOCAB, (3, 4)))
    torch.testing.assert_close(states, hidden.expand(3, -1, -1))
    assert heads.lm_head.data_ptr() == lm_head.data_ptr()
    assert heads.embedding.data_ptr() == embedding.data_ptr()
    trained = {name for name, parameter in heads.named_parameters() if parameter.requires_grad}
    assert trained == {"fc", "norm", "gate", "up", "down"}


def test_tied_embeddings_are_held_once(tmp_path):
    """Although read twice, as in training; a draft vocabulary has other rows."""
    matrix, path = torch.randn(VOCAB, SIZE), tmp_path / "heads.safetensors"
    target = TargetWeights(matrix.clone, matrix.clone)
    heads = RecurrentHeads.initial(SHAPE, target)
    write_heads(path, heads, {})
    for each in (heads.to(torch.bfloat16), read_trained_heads(path)):
        assert each.lm_head.data_ptr() == each.embedding.data_ptr()
    kept = torch.tensor([1, 4, 9])
    drafting = RecurrentHeads.initial(SHAPE.drafting(3), target.drafting(kept))
    assert torch.equal(drafting.lm_head, matrix[kept])
    assert torch.equal(drafting.embedding, matrix)


def test_states_follow_true_tokens_within_the_span():
    heads, hidden = random_cell(), torch.randn(2, SIZE, dtype=torch.float64)
    following = torch.tensor([1, 2])
    states = heads.states(hidden, following, torch.tensor([[3, 4], [5, IGNORED], [6, IGNORED]]))
    one = heads.step(hidden[:1], following[:1])
    two = heads.step(one, torch.tensor([3]))
    three = heads.step(two, torch.tensor([5]))
    torch.testing.assert_close(states[:, 0], torch.cat((one, two, three)))
    longer = heads.states(hidden, following, torch.tensor([[3, 4], [5, 7], [6, 8]]))
    torch.testing.assert_close(longer[:2, 1], states[:2, 1])


def walked(heads: Heads, hidden_D: Tensor, token: int, path: tuple[int, ...]) -> int:
    """The token at the end of one path, alone."""
    hidden, token_11 = hidden_D[None, None], torch.tensor([[token]])
    for depth, rank in enumerate(path):
        hidden, logits = heads.expand(hidden, token_11, depth)
        token_11 = logits.argsort(-1, descending=True)[:, :, rank]
    return int(token_11)


@pytest.mark.parametrize("kind", ["recurrent", "medusa"])
@given(random_trees().filter(len), st.integers(0, 99))
@settings(max_examples=40, deadline=None)
def test_every_node_holds_what_its_path_alone_leads_to(kind, choices, seed: int):
    heads, tree = random_cell(seed), Tree(choices)
    if kind == "medusa":
        heads = MedusaHeads(MedusaShape(SIZE, VOCAB, 5, 2), dtype=torch.float64)
        for parameter in heads.parameters():
            parameter.data = gumbel(parameter.shape, seed)
    hidden, tokens = torch.randn(2, SIZE, dtype=torch.float64), [4, 9]
    proposed = heads.propose(hidden, torch.tensor(tokens), tree)
    for text, token in enumerate(tokens):
        alone = [walked(heads, hidden[text], token, path) for path in tree.choices]
        assert proposed[text].tolist() == alone


@pytest.mark.parametrize(
    ("architecture", "served"), [("LlamaForCausalLM", True), ("GPT2LMHeadModel", False)]
)
def test_which_targets_vllm_serves_such_heads_with(architecture: str, served: bool):
    reason = RecurrentHeads.vllm_refusal(SHAPE, {"architectures": [architecture]})
    assert (reason is None) == served and (served or architecture in str(reason))
