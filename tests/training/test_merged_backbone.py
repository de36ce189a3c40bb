"""The tuned backbone on disk: a whole model directory, written once, with the target's own
tokenizer and settings.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from pipeline.export import backbone as writing
from pipeline.export.backbone import link_backbone
from pipeline.targets.spec import TargetSpec, eos_token_ids, load_tokenizer
from pipeline.training.adapted_backbone import merge_backbone
from tests.targets.adapters import logits_with_adapter_on, save_adapter

IDS_BT = torch.arange(24).view(2, 12)


@pytest.fixture
def backbone(tiny_target, tmp_path) -> Path:
    """The path for the backbone in a train stage's directory, as the trainer leaves it."""
    save_adapter(tiny_target, tmp_path / "train" / "adapter")
    return tmp_path / "train" / "backbone"


def merge(target: TargetSpec, backbone: Path) -> dict[str, tuple[int, int]]:
    """Merge; return the identity of each file."""
    merge_backbone(target, str(backbone.parent))
    return identities(backbone)


def identities(directory: Path) -> dict[str, tuple[int, int]]:
    stats = {path.name: path.stat() for path in directory.iterdir()}
    return {name: (stat.st_mtime_ns, stat.st_ino) for name, stat in stats.items()}


def test_it_computes_what_target_and_adapter_compute(backbone, tiny_target):
    spec, merged = TargetSpec(str(tiny_target)), TargetSpec(str(backbone))
    files = merge(spec, backbone)
    expected = logits_with_adapter_on(tiny_target, backbone.with_name("adapter"), IDS_BT)
    model = AutoModelForCausalLM.from_pretrained(backbone)
    torch.testing.assert_close(model(input_ids=IDS_BT).logits, expected, atol=1e-4, rtol=1e-5)
    assert eos_token_ids(merged) == eos_token_ids(spec) == (1,)
    ours, theirs = (AutoTokenizer.from_pretrained(each.model) for each in (merged, spec))
    assert ours.get_vocab() == theirs.get_vocab() and ours.chat_template == theirs.chat_template
    expected = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json"}
    assert files.keys() >= expected | {"chat_template.jinja"}
    readable = (backbone / "config.json").stat().st_mode & 0o044
    for path in backbone.iterdir():
        assert str(tiny_target).encode() not in path.read_bytes(), path
        assert path.stat().st_mode & 0o044 == readable


def test_dtype_chat_template_and_generation_settings_are_kept(backbone, tiny_target, tmp_path):
    shutil.copytree(tiny_target, tmp_path / "target")
    # As Vicuna ships them, without do_sample, which saving refuses.
    unusual = '{"eos_token_id": 7, "temperature": 0.9, "top_p": 0.6}'
    (tmp_path / "target" / "generation_config.json").write_text(unusual)
    template = "{{ messages[0].content }}!"
    spec = TargetSpec(str(tmp_path / "target"), dtype="bfloat16", chat_template=template)
    merge(spec, backbone)
    assert AutoModelForCausalLM.from_pretrained(backbone).dtype == torch.bfloat16
    assert (backbone / "generation_config.json").read_text() == unusual
    assert load_tokenizer(TargetSpec(str(backbone))).chat_template == spec.chat_template


def test_a_merge_that_breaks_off_is_made_whole_on_resume(backbone, tiny_target, monkeypatch):
    def broken(*_: object) -> None:
        raise KeyboardInterrupt

    spec = TargetSpec(str(tiny_target))
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "copyfile", broken)  # after the weights
        with pytest.raises(KeyboardInterrupt):
            merge(spec, backbone)
    assert not backbone.exists()
    whole = merge(spec, backbone)
    assert whole.keys() >= {"generation_config.json", "model.safetensors", "tokenizer.json"}


@pytest.mark.parametrize("has_hard_links", [True, False])
def test_a_link_to_it_takes_room_only_without_hard_links(
    backbone, tiny_target, tmp_path, monkeypatch, has_hard_links
):
    files, linked = merge(TargetSpec(str(tiny_target)), backbone), tmp_path / "export" / "backbone"
    linked.mkdir(parents=True)
    (linked / "left-over.safetensors").write_text("of an earlier one")
    if not has_hard_links:

        def refuse(*_: object) -> None:
            raise OSError("no hard links here")

        monkeypatch.setattr(writing.os, "link", refuse)
    link_backbone(backbone, linked, files)
    assert {path.name for path in linked.iterdir()} == files.keys()
    for path in linked.iterdir():
        assert path.read_bytes() == (backbone / path.name).read_bytes()
        assert path.samefile(backbone / path.name) == has_hard_links
