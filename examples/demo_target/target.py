"""The demo target: a small chat model of Llama's architecture, for use without a network.

It has a tokenizer, a chat template, and weights that vLLM and transformers load like any other's.
It is trained on a few hundred conversations, and only knows their topics. All tokens of a
conversation are learned, also the user's, so that self-talk works. See train_target.py for the
training.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from rich.console import Console

from examples.demo_target.train_target import ReportStep, train
from pipeline.artifacts.seed_rows import read_seeds
from pipeline.config import Config
from pipeline.conversations.conversation import Conversation
from pipeline.errors import DataError
from pipeline.execution.progress import Meter, Progress, print_stage
from pipeline.formatting import duration
from pipeline.storage.atomic import atomic_directory, read_json, remove, write_json
from pipeline.storage.run_directory import RunDirectory

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

CONTEXT_LENGTH = 1024
VOCAB_SIZE = 2048
NUM_STEPS = 500  # 40 to 70 seconds on two idle cores

MARK = "demo_target.json"  # in each demo target: the seeds that it was trained on

BOS, EOS = "<s>", "</s>"
ROLE_MARKS = ["<|system|>", "<|user|>", "<|assistant|>"]
CHAT_TEMPLATE = (
    "{%- for message in messages %}"
    "{{- '<|' + message['role'] + '|>\\n' + message['content'] + eos_token + '\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|assistant|>\\n' }}{%- endif %}"
)


def ensure_demo_target(run: RunDirectory, config: Config) -> None:
    """Train the demo target at `target.model`, unless it was trained on the run's seeds already.

    It is trained on the seeds' train split. An outdated demo target is replaced. A directory
    without `demo_target.json` is another model, and is left unchanged.
    """
    from transformers.utils import logging

    directory = Path(config.target.model)
    seeds = run.latest("seeds")
    assert seeds is not None, "the demo target is trained from the seeds stage"
    made_from = {"seeds": seeds.content, "seed": config.run.seed}
    mark = read_json(directory / MARK)
    if directory.exists() and (mark is None or mark["made_from"] == made_from):
        return
    remove(directory)
    console = Console()
    logging.disable_progress_bar()
    with Meter(console, "target") as meter:

        def show(step: int, total: int, loss: float) -> None:
            meter.show(Progress("", step, total, "steps", f"loss {loss:.2f}"))

        facts = train_demo_target(
            list(read_seeds(seeds.shards(), "train")),
            directory,
            seed=config.run.seed,
            progress=show,
        )
    write_json(directory / MARK, {"made_from": made_from, **facts})
    parameters = (
        f"{facts['parameters'] / 1e6:.1f}M parameters, {facts['steps']} steps, loss"
        f" {facts['final_loss']:.2f}"
    )
    print_stage(console, "[green]✓[/]", "target", f"{duration(facts['seconds']):<10} {parameters}")


def train_demo_target(
    conversations: Sequence[Conversation],
    directory: Path,
    *,
    seed: int = 0,
    steps: int = NUM_STEPS,
    progress: ReportStep | None = None,
) -> dict:
    """Train a chat model on conversations, and write it to a directory by one rename.

    Args:
        conversations: The training data, without held-out conversations.
        directory: Must not exist. It becomes a transformers model with safetensors weights.
        seed: Seed of the weights and of the order of the data.
        progress: Called after each training step.

    Returns:
        The number of parameters, and the seconds, beside the figures that `train` returns.

    Raises:
        DataError: There are no conversations.
        FileExistsError: The directory exists.
    """
    started = time.monotonic()
    if not conversations:
        raise DataError("There are no conversations to train the demo target from.")
    if directory.exists():
        raise FileExistsError(directory)
    tokenizer = train_tokenizer(conversations)
    documents = tokenize(conversations, tokenizer)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = new_model(tokenizer)
        record = train(model, documents, num_steps=steps, progress=progress)
    with atomic_directory(directory) as unfinished:
        model.save_pretrained(unfinished, safe_serialization=True)
        tokenizer.save_pretrained(unfinished)
    return record | {"parameters": model.num_parameters(), "seconds": time.monotonic() - started}


def train_tokenizer(conversations: Sequence[Conversation]) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer on the conversations; it can encode any text."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE())
    # Digits are single tokens; Han characters are split, or whole phrases would become tokens.
    pieces = Regex(r"\p{Han}{1,4}|\p{N}| ?[^\s\p{L}\p{N}]+| ?[\p{L}&&\P{Han}]+|\s")
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(pieces, "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[BOS, EOS, *ROLE_MARKS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(
        (message.content for each in conversations for message in each.messages), trainer
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=EOS,
        extra_special_tokens=ROLE_MARKS,
        chat_template=CHAT_TEMPLATE,
        model_max_length=CONTEXT_LENGTH,
        clean_up_tokenization_spaces=False,
    )


def tokenize(
    conversations: Sequence[Conversation], tokenizer: PreTrainedTokenizerFast
) -> list[torch.Tensor]:
    """Return the token ids of each conversation, rendered by the chat template."""
    texts = [
        tokenizer.apply_chat_template(
            [asdict(message) for message in each.messages], tokenize=False
        )
        for each in conversations
    ]
    return [torch.tensor(ids) for ids in tokenizer(texts, add_special_tokens=False)["input_ids"]]


def new_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """Create the untrained model, with 1.7 million parameters.

    Its attention heads have size 64, which vLLM's CPU attention supports. It has two layers, which
    learn to copy names from the question into the answer. With four layers, only half as many
    training steps fit into the time, and the answers contain other names.
    """
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=3,
        num_key_value_heads=3,
        head_dim=64,
        max_position_embeddings=CONTEXT_LENGTH,
        tie_word_embeddings=False,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    model = LlamaForCausalLM(config)
    model.generation_config = GenerationConfig(
        bos_token_id=config.bos_token_id,
        eos_token_id=config.eos_token_id,
        pad_token_id=config.pad_token_id,
    )
    return model
