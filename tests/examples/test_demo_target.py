"""The demo target is a model like any other: whole on disk or not there, and what its configuration
says it is.
"""

from __future__ import annotations

import math

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
        seconds=600,
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


def test_transformers_loads_a_llama_with_heads_of_64(model, trained):
    config = model.config
    assert config.architectures == ["LlamaForCausalLM"]
    assert (config.max_position_embeddings, config.head_dim) == (1024, 64)
    assert 1e6 < model.num_parameters() < 6e6
    assert trained[1]["parameters"] == model.num_parameters()


def test_its_weights_are_full_precision_safetensors(model, trained):
    suffixes = {path.suffix for path in trained[0].iterdir()}
    assert ".safetensors" in suffixes
    assert suffixes <= {".safetensors", ".json", ".jinja"}
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


def test_every_engine_learns_the_same_end_of_text(model, tokenizer):
    assert tokenizer.eos_token == "</s>"
    assert (
        model.generation_config.eos_token_id == model.config.eos_token_id == tokenizer.eos_token_id
    )


def test_its_template_reads_like_zephyrs(tokenizer):
    messages = [
        {"role": role, "content": text}
        for role, text in [
            ("system", "Be kind."),
            ("user", "Hello"),
            ("assistant", "Hi"),
            ("user", "Bye"),
        ]
    ]
    rendered = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert (
        rendered == "<|system|>\nBe"
        " kind.</s>\n<|user|>\nHello</s>\n<|assistant|>\nHi</s>\n<|user|>\nBye</s>\n<|assistant|>\n"
    )


def test_roles_and_turn_ends_are_single_tokens(tokenizer):
    for mark in ("<|system|>", "<|user|>", "<|assistant|>", "</s>"):
        assert len(tokenizer.encode(mark, add_special_tokens=False)) == 1


def test_the_vocabulary_fits_the_model(model, tokenizer):
    assert max(tokenizer.get_vocab().values()) < model.config.vocab_size == len(tokenizer)
    assert (
        model.lm_head.weight.shape == model.model.embed_tokens.weight.shape == (len(tokenizer), 192)
    )


@settings(max_examples=50, deadline=None)
@given(st.text(max_size=60))
def test_any_text_decodes_to_itself(tokenizer, text):
    encoded = tokenizer.encode(text.replace("<", ""), add_special_tokens=False)
    assert tokenizer.decode(encoded) == text.replace("<", "")


def test_the_model_reads_all_of_its_context(model):
    with torch.inference_mode():
        logits = model(torch.randint(5, 300, (1, 1024))).logits
    assert torch.isfinite(logits).all()


def test_training_learns_and_reports_each_step(trained):
    _, record, seen = trained
    assert seen == list(range(1, 13)) and record["steps"] == 12
    assert record["final_loss"] < math.log(
        500
    )  # an untrained model of this vocabulary of 400-odd tokens is at its log
    assert record["tokens"] > 0 and record["precision"] in ("bfloat16", "float32")


def test_a_seed_fixes_weights_without_the_global_generator(tmp_path):
    torch.manual_seed(5)
    expected = torch.rand(3)
    for name, seed in [("first", 0), ("again", 0), ("other", 1)]:
        torch.manual_seed(5)
        demo.train_demo_target(conversations(), tmp_path / name, seconds=600, steps=2, seed=seed)
        assert torch.equal(torch.rand(3), expected)
    first, again, other = (
        (tmp_path / name / "model.safetensors").read_bytes() for name in ("first", "again", "other")
    )
    assert first == again != other


def test_training_ends_when_its_time_is_up_whatever_the_steps(tmp_path):
    record = demo.train_demo_target(conversations(), tmp_path / "demo", seconds=1, steps=10**9)
    assert record["steps"] < 10**9
    assert (tmp_path / "demo" / "model.safetensors").exists()


def test_an_interrupted_training_leaves_nothing(tmp_path):
    def interrupt(*_):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        demo.train_demo_target(conversations(), tmp_path / "demo", steps=3, progress=interrupt)
    assert not list(tmp_path.iterdir())


def test_a_target_is_never_overwritten(trained):
    with pytest.raises(FileExistsError):
        demo.train_demo_target(conversations(), trained[0], steps=1)


def test_no_conversations_are_bad_data(tmp_path):
    with pytest.raises(DataError):
        demo.train_demo_target([], tmp_path / "demo")


def test_each_round_learns_every_conversation_once_from_its_start():
    longest = demo_training.POOL_SIZE + 10  # more documents than a pool has
    documents = [torch.arange(1, length) + 100 * length for length in range(3, longest)]
    rows = []
    for ids_BT, labels_BT in demo_training.batches(documents):
        assert torch.equal(labels_BT[labels_BT >= 0], ids_BT[:, 1:][labels_BT[:, :-1] >= 0])
        rows += [
            row[: int((labels >= 0).sum()) + 1].tolist()
            for row, labels in zip(ids_BT, labels_BT, strict=True)
        ]
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


def test_an_orthogonalized_matrix_keeps_its_singular_vectors():
    torch.manual_seed(0)
    matrices_NRC = torch.randn(3, 9, 6)
    left, _, right = torch.linalg.svd(matrices_NRC, full_matrices=False)
    values = left.mT @ demo_training.orthogonalize(matrices_NRC, torch.float32) @ right.mT
    diagonal = values.diagonal(dim1=1, dim2=2)
    assert torch.allclose(values, torch.diag_embed(diagonal), atol=1e-5)
    assert diagonal.min() > 0.5 and diagonal.max() < 1.3


def test_the_learning_rate_rises_stays_and_falls():
    shares = [demo_training.learning_rate_share(step / 100, 0.0) for step in range(100)]
    assert shares[0] < 0.1 and max(shares) == shares[20] == 1 and shares[99] < 0.05
    assert all(0 < share <= 1 for share in shares)


def test_the_nearer_end_sets_the_learning_rate():
    for step in range(100):
        alone = demo_training.learning_rate_share(step / 100, 0.0)
        assert demo_training.learning_rate_share(step / 100, 0.9 * step / 100 + 0.03) == alone
    assert demo_training.learning_rate_share(0.1, 0.99) < 0.05
