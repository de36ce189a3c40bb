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
from rich.console import Console

from pipeline.api.models import load_target
from pipeline.cli.chat_session import ChatSession, Sampling
from pipeline.decoding.acceptance import greedy_acceptance
from pipeline.decoding.decoder import Decoder
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


def test_every_line_of_a_pipe_is_a_question(piped):
    """And the heads change no text, greedy or sampled."""
    medusa, plain = piped("why moon\n\nhow\n"), piped("why moon\n\nhow\n", "--plain")
    assert medusa.code == plain.code == 0, medusa.err
    assert medusa.out == plain.out and medusa.out.strip() and "\x1b" not in medusa.out
    assert plain.err.count("per step") == plain.err.count("1.00 per step") == 2
    words = ("--temperature", 1, "--seed")
    sampled = piped("why\n", *words, 5).out
    assert sampled == piped("why\n", *words, 5, "--plain").out
    assert sampled != piped("why\n", *words, 6).out


def test_template_and_variables_are_given_as_in_a_run(piped, tmp_path):
    (tmp_path / "chat.jinja").write_text(
        "{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }} {% endfor %}"
        "{% if add_generation_prompt %}{{ begins }}{% endif %}"
    )
    given, answers = f"target.chat_template={tmp_path / 'chat.jinja'}", set()
    for begins in ("moon", "stone"):
        ended = piped("why\n", given, f"target.template_arguments.begins={begins}")
        assert ended.code == 0, ended.err
        answers.add(ended.out)
    assert len(answers) == 2


@pytest.mark.parametrize(
    ("words", "key"),
    [
        (("target.dtyp=float32",), "target.dtype"),
        (("train.lr=1e-3",), "train.lr"),
        (("target.model=elsewhere",), "target.model"),
        (("fast",), "fast"),
    ],
)
def test_a_wrong_setting_is_refused(piped, words, key):
    ended = piped("why\n", *words)
    assert ended.code == 2 and key in one_paragraph(ended.err)


def test_the_chat_continues_after_refusing_a_too_long_question(piped):
    ended = piped(f"{'stone ' * 400}\nwhy\n")
    assert ended.code == 0 and "cannot be asked" in ended.err
    assert ended.err.count("per step") == 1


def damaged(export: Path, damage: str) -> None:
    if damage == "absent":
        shutil.rmtree(export)
    elif damage == "target":
        rename_target(export, "/gone")
    else:
        (export / "medusa_choices.json").write_text(damage)


@pytest.mark.parametrize(
    ("damage", "code", "key"),
    [
        ("absent", 2, "no such directory"),
        ("[[0, 0", 3, "medusa_choices.json"),
        ("[[0, 0]]", 2, "[0, 0]"),
        ("target", 2, "--base-model"),
    ],
)
def test_a_damaged_export_is_refused(command, export, tmp_path, damage, code, key):
    copy = shutil.copytree(export, tmp_path / "export")
    damaged(copy, damage)
    ended = command("chat", copy)
    assert ended.code == code and key in one_paragraph(ended.err)


def test_a_moved_export_finds_its_target(
    piped, command, export, tiny_target, tmp_path, monkeypatch
):
    """By --base-model, or a tuned backbone beside its heads."""
    expected = piped("why\n").out
    assert piped("why\n", "--base-model", tiny_target).out == expected
    copy = shutil.copytree(export, tmp_path / "moved")
    rename_target(copy, "/gone/backbone")
    (copy / "backbone").symlink_to(tiny_target)
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

    def stream(*_):
        yield [10]
        yield [11, 12]
        signal.raise_signal(signal.SIGINT)
        raise AssertionError("asked for more after Ctrl-C")

    monkeypatch.setattr("sys.stdin", Person())
    monkeypatch.setattr("builtins.input", types)
    monkeypatch.setattr(Decoder, "stream", stream)
    ended = command("chat", export)
    assert ended.code == 0 and next(asked, None) is None
    printed = ended.out + ended.err
    assert printed.count("3 tokens, 2.00 per step") == printed.count("(stopped)") == 2
    assert "Ctrl-D ends the chat" in printed


def test_accepted_tokens_are_coloured_and_control_characters_shown(tiny_target, monkeypatch):
    target = load_target(tiny_target, gpus=0)
    a, b, c, d = target.tokenizer.convert_tokens_to_ids(list("abcd"))
    (escape,) = target.tokenizer("\x1b")["input_ids"]
    console = Console(file=io.StringIO(), force_terminal=True, color_system="standard")
    session = ChatSession(
        target, target.decoder(), Sampling(8, greedy_acceptance, 0), None, console, console
    )
    steps = (step for step in ([a], [b, c], [d, escape]))
    monkeypatch.setattr(Decoder, "stream", lambda *_: steps)
    answer = session.decode([1])
    assert answer.ids == [a, b, c, d, escape] and answer.num_steps == 2
    green, off = "\x1b[32m", "\x1b[0m"
    printed = f"ab{green}c{off}d{green}\N{SYMBOL FOR ESCAPE}{off}\n"
    assert console.file.getvalue() == printed
