"""`chat`: the same text with the heads and without, free tokens coloured, and an end to every
answer.
"""

from __future__ import annotations

import io
import json
import shutil
import signal
from pathlib import Path

import pytest
import torch
from rich.console import Console
from transformers import AutoTokenizer

from pipeline.cli.chat import ACCEPTED, AnswerSpeed, write
from pipeline.cli.chat_model import ChatModel
from pipeline.conversations.requests import TextStream
from pipeline.decoding.decoder import Decoder
from pipeline.evaluation import overhead
from tests.cli.tables import one_paragraph


@pytest.fixture
def export(finished_run) -> Path:
    return finished_run.latest("export").path


def rename_target(export: Path, name: str) -> None:
    config = json.loads((export / "config.json").read_text())
    (export / "config.json").write_text(json.dumps(config | {"base_model_name_or_path": name}))


@pytest.fixture
def piped(command, export, monkeypatch):
    """Lines on stdin, and how the command ended."""

    def call(lines: str, *words: object):
        monkeypatch.setattr("sys.stdin", io.StringIO(lines))
        return command("chat", export, "--max-new-tokens", 24, *words)

    return call


def test_from_a_pipe_every_line_is_a_question_and_the_heads_change_no_text(piped):
    medusa, plain = piped("why moon\n\nhow\n"), piped("why moon\n\nhow\n", "--plain")
    assert medusa.code == plain.code == 0, medusa.err
    assert medusa.out == plain.out and medusa.out.strip() and "\x1b" not in medusa.out
    paces = [line for line in plain.err.splitlines() if "per step" in line]
    assert len(paces) == 2 and all("1.00 per step" in line for line in paces)


def test_answers_are_written_on_as_many_threads_as_make_plain_steps_fastest(piped, monkeypatch):
    before, seen = torch.get_num_threads(), []
    cost = {1: 3.0, 2: 1.0, 4: 2.0}
    monkeypatch.setattr(overhead, "step_seconds", lambda *_: [0.01 * cost[torch.get_num_threads()]])
    stream = Decoder.stream
    monkeypatch.setattr(
        Decoder,
        "stream",
        lambda *arguments: (seen.append(torch.get_num_threads()), stream(*arguments))[1],
    )
    try:
        torch.set_num_threads(4)
        assert piped("why\nhow\n").code == 0
        assert seen == [2, 2] and torch.get_num_threads() == 4
    finally:
        torch.set_num_threads(before)


def test_a_template_and_its_variables_are_given_as_in_a_run(piped, tmp_path):
    template = (
        "{% for message in messages %}[{{ message['role'] }}] {{ message['content'] }} {% endfor %}"
    )
    (tmp_path / "chat.jinja").write_text(
        template + "{% if add_generation_prompt %}{{ begins }}{% endif %}"
    )
    given = f"target.chat_template={tmp_path / 'chat.jinja'}"
    answers = [
        piped("why\n", given, f"target.template_arguments.begins={begins}")
        for begins in ("moon", "stone")
    ]
    assert [ended.code for ended in answers] == [0, 0], answers[0].err
    assert answers[0].out != answers[1].out


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("target.dtyp=float32", "did you mean 'target.dtype'"),
        ("target.dtype=float31", "'target.dtype'"),
        ("train.lr=1e-3", "Only settings of the target"),
        ("target.model=elsewhere", "Only settings of the target"),
        ("fast", "not an override"),
    ],
)
def test_a_setting_that_is_none_of_the_target_s_is_one_paragraph(piped, words, says):
    ended = piped("why\n", words)
    assert ended.code == 2 and says in one_paragraph(ended.err)


def test_a_system_message_that_is_not_utf8_is_refused(piped):
    ended = piped("why\n", "--system", "be \udcff")  # as Python reads such a byte of a command line
    assert ended.code == 2 and "--system" in one_paragraph(ended.err)


def test_a_seed_samples_one_text_with_the_heads_and_without(piped):
    words = ("--temperature", 1, "--seed", 5)
    sampled = piped("why\n", *words).out
    assert sampled == piped("why\n", *words, "--plain").out
    assert sampled != piped("why\n", "--temperature", 1, "--seed", 6).out


def test_a_question_that_does_not_fit_is_refused_and_the_chat_goes_on(piped):
    ended = piped(f"{'stone ' * 400}\nwhy\n")
    assert (
        ended.code == 0
        and "cannot be asked" in ended.err
        and ended.err.count("the first after") == 1
    )


@pytest.mark.parametrize(
    ("damage", "code", "says"),
    [
        (lambda path: shutil.rmtree(path), 3, "no config.json"),
        (
            lambda path: (path / "medusa_choices.json").write_text("[[0, 0"),
            3,
            "tree cannot be read",
        ),
        (
            lambda path: (path / "medusa_choices.json").write_text("[[0, 0]]"),
            2,
            "its parent is missing",
        ),
        (lambda path: rename_target(path, "/gone"), 2, "--base-model"),
    ],
)
def test_an_export_that_cannot_be_talked_to_is_told_in_one_paragraph(
    command, export, tmp_path, damage, code, says
):
    copy = shutil.copytree(export, tmp_path / "export")
    damage(copy)
    ended = command("chat", copy)
    assert ended.code == code and says in one_paragraph(ended.err)


def test_a_copied_export_finds_its_target_where_it_is_told(piped, tiny_target):
    assert piped("why\n", "--base-model", tiny_target).out == piped("why\n").out


def test_a_moved_export_with_a_tuned_backbone_finds_it_beside_its_heads(
    piped, command, export, tiny_target, tmp_path, monkeypatch
):
    copy = shutil.copytree(export, tmp_path / "moved")
    rename_target(copy, "/gone/backbone")
    (copy / "backbone").symlink_to(tiny_target)
    expected = piped("why\n").out
    monkeypatch.setattr("sys.stdin", io.StringIO("why\n"))
    assert command("chat", copy, "--max-new-tokens", 24).out == expected


def test_ctrl_c_ends_the_answer_and_ctrl_d_the_chat(command, export, monkeypatch):
    class Person(io.StringIO):
        def isatty(self):
            return True

    asked = iter(["why", KeyboardInterrupt(), "how", EOFError()])

    def types(prompt: str) -> str:
        line = next(asked)
        if isinstance(line, BaseException):
            raise line
        return line

    def stream(model, prompt, *rest):
        yield [10]
        signal.raise_signal(signal.SIGINT)
        yield [11, 12]
        raise AssertionError("asked for more after Ctrl-C")

    monkeypatch.setattr("sys.stdin", Person())
    monkeypatch.setattr("builtins.input", types)
    monkeypatch.setattr(ChatModel, "stream", stream)
    ended = command("chat", export)
    assert ended.code == 0 and next(asked, None) is None
    assert (ended.out + ended.err).count("3 tokens, 2.00 per step") == 2
    assert (ended.out + ended.err).count(
        "(stopped)"
    ) == 2 and "Ctrl-D ends the chat" in ended.out + ended.err


def test_tokens_beyond_the_first_of_a_step_are_coloured_and_control_characters_shown(tiny_target):
    tokenizer = AutoTokenizer.from_pretrained(tiny_target)
    ids = {word: tokenizer.convert_tokens_to_ids(word) for word in "abcd"} | {
        "\x1b": tokenizer("\x1b")["input_ids"][0]
    }
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, color_system="standard")
    steps = [[ids["a"]], [ids["b"], ids["c"]], [ids["d"], ids["\x1b"]]]
    written, speed = write(
        (new_ids for new_ids in steps), TextStream(tokenizer), console, lambda: False
    )
    assert written == [token for step in steps for token in step] and speed.num_steps == 2
    green, off = "\x1b[32m", "\x1b[0m"
    assert (
        ACCEPTED == "green"
        and file.getvalue() == f"ab{green}c{off}d{green}\N{SYMBOL FOR ESCAPE}{off}\n"
    )


def test_the_prefill_and_its_token_are_no_part_of_the_pace():
    speed = AnswerSpeed(started=0.0, first=0.1, last=1.1, num_tokens=6, num_steps=2)
    assert str(speed) == "6 tokens, 2.50 per step, 5.0 tokens/s, the first after 100 ms"
    prefill_alone = AnswerSpeed(started=0.0, first=2.0, last=2.0, num_tokens=1, num_steps=0)
    assert str(prefill_alone) == "1 token, the first after 2.0 s"
