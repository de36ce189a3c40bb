"""The recurrent cell: against transformers' own Llama layer, against walking each path alone, and
in its files.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.functional import linear, silu
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from pipeline.artifacts.trained_heads import read_trained_heads, write_heads
from pipeline.conversations.spans import IGNORED
from pipeline.decoding.tree import Tree
from pipeline.errors import DataError
from pipeline.heads.kind import TargetWeights
from pipeline.heads.medusa import MedusaHeads
from pipeline.heads.recurrent import ATTENTION, RecurrentHeads
from pipeline.heads.shapes import EXPANDED, ExportFormat, MedusaShape, RecurrentShape

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
    """An EAGLE-1 layer: no input norm, attention whose output projection is zero, then norm, MLP
    and residual.
    """
    heads = random_cell(shape=replace(SHAPE, norm_eps=epsilon))
    tensors, exported = (
        heads.named_tensors(EXPANDED),
        heads.engine_config(heads.shape, EXPANDED, {}),
    )
    sizes = {
        "hidden_size": SIZE,
        "intermediate_size": INNER,
        "num_attention_heads": 8,
        "num_key_value_heads": 1,
    }
    config = LlamaConfig(**sizes, head_dim=64, rms_norm_eps=epsilon, attn_implementation="eager")
    layer = LlamaDecoderLayer(config, 0).double()
    prefix = "layers.0."
    weights = {
        name.removeprefix(prefix): value
        for name, value in tensors.items()
        if name.startswith(prefix)
    }
    layer.load_state_dict(
        weights | {"input_layernorm.weight": torch.ones(SIZE, dtype=torch.float64)}
    )
    layer.self_attn.q_proj.weight.data.normal_()  # whatever attention sees, it adds nothing
    layer.input_layernorm = nn.Identity()

    hidden, tokens = torch.randn(1, 5, SIZE, dtype=torch.float64), torch.randint(VOCAB, (1, 5))
    read = linear(torch.cat((heads.embedding[tokens], hidden), -1), tensors["fc.weight"])
    rotary = tuple(torch.randn(2, 1, 5, 64, dtype=torch.float64))
    expected = layer(read, position_embeddings=rotary)
    expected = expected[0] if isinstance(expected, tuple) else expected
    torch.testing.assert_close(
        heads.step(hidden, tokens), expected, rtol=1e-5, atol=1e-5
    )  # its norm is in fp32
    assert exported["rms_norm_eps"] == epsilon


def test_a_cell_of_another_trainer_keeps_its_own_norm_epsilon():
    """Of states near zero the epsilon decides what the norm makes."""
    shape, tensors = replace(SHAPE, norm_eps=1e-2), random_cell().named_tensors()
    heads = RecurrentHeads.from_named_tensors(shape, tensors)
    norm = nn.RMSNorm(SIZE, eps=1e-2, dtype=torch.float64)
    norm.load_state_dict({"weight": heads.norm})
    hidden, tokens = 0.01 * torch.randn(5, SIZE, dtype=torch.float64), torch.randint(VOCAB, (5,))
    heads.embedding.data *= 0.01
    z = linear(torch.cat((heads.embedding[tokens], hidden), -1), heads.fc)
    x = norm(z)
    expected = z + linear(silu(linear(x, heads.gate)) * linear(x, heads.up), heads.down)
    torch.testing.assert_close(heads.step(hidden, tokens), expected)


def test_the_first_prediction_is_the_target_s():
    weights = TargetWeights(lambda: torch.randn(VOCAB, SIZE), lambda: torch.randn(VOCAB, SIZE))
    heads, hidden = RecurrentHeads.initial(SHAPE, weights), torch.randn(4, SIZE)
    states = heads.states(hidden, torch.randint(VOCAB, (4,)), torch.randint(VOCAB, (3, 4)))
    torch.testing.assert_close(states, hidden.expand(3, -1, -1))


def test_target_matrices_are_shared_and_frozen():
    embedding, lm_head = torch.randn(VOCAB, SIZE), torch.randn(VOCAB, SIZE)
    heads = RecurrentHeads.initial(SHAPE, TargetWeights(lambda: lm_head, lambda: embedding))
    assert (
        heads.lm_head.data_ptr() == lm_head.data_ptr()
        and heads.embedding.data_ptr() == embedding.data_ptr()
    )
    trained = {name for name, parameter in heads.named_parameters() if parameter.requires_grad}
    assert trained == {"fc", "norm", "gate", "up", "down"}


def test_the_one_matrix_of_a_target_with_tied_embeddings_is_held_once_also_in_what_is_read(
    tmp_path,
):
    """Although it is read twice, as training does; but for a draft vocabulary, which has other
    rows.
    """
    matrix, path = torch.randn(VOCAB, SIZE), tmp_path / "heads.safetensors"
    target = TargetWeights(matrix.clone, matrix.clone)
    heads = RecurrentHeads.initial(SHAPE, target)
    write_heads(path, heads, {})
    for each in (heads.to(torch.bfloat16), read_trained_heads(path)):
        assert (
            each.lm_head.data_ptr() == each.embedding.data_ptr() and not each.lm_head.requires_grad
        )
    drafting = RecurrentHeads.initial(SHAPE.drafting(3), target.drafting(torch.tensor([1, 4, 9])))
    assert torch.equal(drafting.lm_head, matrix[[1, 4, 9]]) and torch.equal(
        drafting.embedding, matrix
    )


def test_states_follow_the_true_tokens_and_read_nothing_past_a_span():
    heads, hidden, following = (
        random_cell(),
        torch.randn(2, SIZE, dtype=torch.float64),
        torch.tensor([1, 2]),
    )
    labels = torch.tensor([[3, 4], [5, IGNORED], [6, IGNORED]])
    states = heads.states(hidden, following, labels)
    one = heads.step(hidden[:1], following[:1])
    two = heads.step(one, torch.tensor([3]))
    torch.testing.assert_close(
        states[:, 0], torch.cat((one, two, heads.step(two, torch.tensor([5]))))
    )
    labels_of_other = torch.tensor([[3, 4], [5, 7], [6, 8]])
    torch.testing.assert_close(
        heads.states(hidden, following, labels_of_other)[:2, 1], states[:2, 1]
    )
    states[:, 0].sum().backward()
    assert all(
        p.grad is not None and p.grad.isfinite().all()
        for p in heads.parameters()
        if p.requires_grad
    )


@st.composite
def trees(draw: st.DrawFn) -> list[tuple[int, ...]]:
    paths = {()}
    for _ in range(draw(st.integers(1, 12))):
        above = draw(st.sampled_from(sorted(path for path in paths if len(path) < 5)))
        paths.add((*above, draw(st.integers(0, 3))))
    return sorted(paths - {()})


def walked(
    heads: RecurrentHeads | MedusaHeads, hidden_D: Tensor, token: int, path: tuple[int, ...]
) -> int:
    """The token at the end of one path, alone."""
    hidden, token_11 = hidden_D[None, None], torch.tensor([[token]])
    for depth, rank in enumerate(path):
        hidden, logits = heads.expand(hidden, token_11, depth)
        token_11 = logits.argsort(-1, descending=True)[:, :, rank]
    return int(token_11)


@given(trees(), st.integers(0, 99))
@settings(max_examples=60)
def test_every_node_holds_what_its_path_alone_leads_to(choices: list[tuple[int, ...]], seed: int):
    heads, tree = random_cell(seed), Tree(choices)
    hidden, tokens = torch.randn(2, SIZE, dtype=torch.float64), [4, 9]
    proposed = heads.propose(hidden, torch.tensor(tokens), tree)
    for text, token in enumerate(tokens):
        assert proposed[text].tolist() == [
            walked(heads, hidden[text], token, path) for path in tree.choices
        ]


@given(trees(), st.integers(0, 99))
@settings(max_examples=20)
def test_medusa_heads_propose_at_once_what_they_expand_one_by_one(
    choices: list[tuple[int, ...]], seed: int
):
    generator = torch.Generator().manual_seed(seed)
    heads, tree = MedusaHeads(MedusaShape(SIZE, VOCAB, 5, 2), dtype=torch.float64), Tree(choices)
    for parameter in heads.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    hidden = torch.randn(1, SIZE, dtype=torch.float64)
    proposed = heads.propose(hidden, torch.tensor([3]), tree)
    assert proposed[0].tolist() == [walked(heads, hidden[0], 3, path) for path in tree.choices]


@pytest.mark.parametrize("format", [None, EXPANDED])
def test_the_cell_survives_a_safetensors_file(tmp_path, format: ExportFormat | None):
    heads = random_cell()
    save_file(heads.named_tensors(format), tmp_path / "heads.safetensors")
    read = RecurrentHeads.from_named_tensors(
        SHAPE, load_file(tmp_path / "heads.safetensors"), format
    )
    if format:
        assert not read.lm_head.any() and not read.embedding.any(), "an export leaves them out"
        read.take_from(TargetWeights(lambda: heads.lm_head, lambda: heads.embedding))
    for name, parameter in heads.named_parameters():
        assert torch.equal(read.get_parameter(name), parameter), name
        assert read.get_parameter(name).requires_grad == parameter.requires_grad


def test_a_cell_with_attention_is_refused():
    tensors = random_cell().named_tensors(EXPANDED)
    tensors[f"{ATTENTION}.o_proj.weight"][0, 0] = 1
    with pytest.raises(DataError):
        RecurrentHeads.from_named_tensors(SHAPE, tensors, EXPANDED, where="export")


def test_exported_attention_adds_nothing_and_is_small():
    tensors = random_cell().named_tensors(EXPANDED)
    attention = {name: tensor for name, tensor in tensors.items() if name.startswith(ATTENTION)}
    assert len(attention) == 4 and not any(tensor.any() for tensor in attention.values())
    config = RecurrentHeads.engine_config(SHAPE, EXPANDED, {})
    queries, keys = (
        config[key] * config["head_dim"] for key in ("num_attention_heads", "num_key_value_heads")
    )
    assert tensors[f"{ATTENTION}.q_proj.weight"].shape == (queries, SIZE)
    assert tensors[f"{ATTENTION}.v_proj.weight"].shape == (keys, SIZE)


@pytest.mark.parametrize(
    ("architecture", "served"), [("LlamaForCausalLM", True), ("GPT2LMHeadModel", False)]
)
def test_which_targets_vllm_serves_such_heads_with(architecture: str, served: bool):
    reason = RecurrentHeads.not_served(SHAPE, {"architectures": [architecture]})
    assert (reason is None) == served and (served or architecture in str(reason))
