"""The demo target is a model like any other: whole on disk or not there, and what its configuration
says it is.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

from examples.demo_target import target as demo
from examples.demo_target import train_target as demo_training
from pipeline.conversations.conversation import Conversation, Message
from pipeline.errors import DataError

pytestmark = pytest.mark.slow

TURNS = [
    (
        "What is the capital of Alderhaven?",
        "Alderhaven is a town, so it has no capital of its own.",
    ),
    ("蒸发是什么意思？", "蒸发是指液体在沸点以下慢慢变成气体。"),
    ("Write a function.", "```python\ndef double(number):\n    return 2 * number\n```"),
    ("Thank you.", "You are welcome. Ask again whenever you like."),
]


def conversations() -> list[Conversation]:
    made = []
    for number, (question, answer) in enumerate(TURNS):
        system = (Message("system", "Answer briefly."),) if number % 2 else ()
        turn = (Message("user", question), Message("assistant", answer))
        made.append(Conversation(f"test:{number}", (*system, *turn, *turn)))
    return made


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    directory = tmp_path_factory.mktemp("targets") / "demo"
    seen: list[int] = []
    record = demo.train_demo_target(
        conversations(),
        directory,
        steps=12,
        progress=lambda step, *_: seen.append(step),
    )
    return directory, record, seen


@pytest.fixture(scope="module")
def tokenizer(trained):
    return AutoTokenizer.from_pretrained(trained[0])


@pytest.fixture(scope="module")
def model(trained):
    return AutoModelForCausalLM.from_pretrained(trained[0])


def test_transformers_loads_a_llama_with_heads_of_64(model, tokenizer, trained):
    config, shape = model.config, (len(tokenizer), 192)
    ids = {model.generation_config.eos_token_id, config.eos_token_id}
    assert ids == {tokenizer.eos_token_id} and tokenizer.eos_token == "</s>"
    assert config.architectures == ["LlamaForCausalLM"]
    assert (config.max_position_embeddings, config.head_dim) == (1024, 64)
    assert trained[1]["parameters"] == model.num_parameters() < 6e6
    assert model.lm_head.weight.shape == model.model.embed_tokens.weight.shape == shape
    assert max(tokenizer.get_vocab().values()) < config.vocab_size
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert {path.suffix for path in trained[0].iterdir()} == {".safetensors", ".json", ".jinja"}


@settings(max_examples=20, deadline=None)
@given(st.text(max_size=60))
def test_any_text_decodes_to_itself(tokenizer, text):
    encoded = tokenizer.encode(text.replace("<", ""), add_special_tokens=False)
    assert tokenizer.decode(encoded) == text.replace("<", "")


def test_a_seed_fixes_weights_without_the_global_generator(tmp_path):
    torch.manual_seed(5)
    expected, weights = torch.rand(3), []
    for name, seed in (("first", 0), ("again", 0), ("other", 1)):
        torch.manual_seed(5)
        demo.train_demo_target(conversations(), tmp_path / name, steps=2, seed=seed)
        assert torch.equal(torch.rand(3), expected)
        weights.append((tmp_path / name / "model.safetensors").read_bytes())
    assert weights[0] == weights[1] != weights[2]


def test_an_interrupted_training_leaves_nothing(tmp_path):
    def interrupt(*_):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        demo.train_demo_target(conversations(), tmp_path / "demo", steps=3, progress=interrupt)
    with pytest.raises(DataError):
        demo.train_demo_target([], tmp_path / "demo")
    assert not list(tmp_path.iterdir())


def test_each_round_learns_every_conversation_once_from_its_start():
    longest = demo_training.POOL_SIZE + 10  # more documents than a pool has
    documents = [torch.arange(1, length) + 100 * length for length in range(3, longest)]
    rows, short = [], []
    for ids_BT, labels_BT in demo_training.batches(documents):
        assert torch.equal(labels_BT[labels_BT >= 0], ids_BT[:, 1:][labels_BT[:, :-1] >= 0])
        for row, labels in zip(ids_BT, labels_BT, strict=True):
            rows.append(row[: int((labels >= 0).sum()) + 1].tolist())
        short = [row for row in rows if len(row) < longest]
        if len(short) == len(documents):
            break
    assert sorted(short) == sorted(document.tolist() for document in documents)
    assert max(map(len, rows)) > longest  # and some rows are long, of several conversations


def test_muon_steps_as_torchs_own_does():
    torch.manual_seed(0)
    shapes = [(12, 12), (20, 12), (12, 20), (12, 12)]
    ours = [torch.nn.Parameter(torch.randn(shape)) for shape in shapes]
    theirs = [torch.nn.Parameter(parameter.detach().clone()) for parameter in ours]
    reference = torch.optim.Muon(theirs, lr=0.1, weight_decay=0.0, momentum=0.95)
    muon = demo_training.Muon(ours, torch.bfloat16)
    for _ in range(3):
        for mine, its in zip(ours, theirs, strict=True):
            mine.grad = torch.randn_like(mine)
            its.grad = mine.grad.clone()
        for group in muon.param_groups:
            group["lr"] = 0.1
        muon.step()
        reference.step()
    for mine, its in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, its, atol=5e-3, rtol=0)
