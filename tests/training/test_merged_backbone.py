"""The tuned backbone on disk: a whole model directory, written once, with the target's own
tokenizer and settings.
"""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

from pipeline.export import backbone as writing
from pipeline.export.backbone import link_backbone
from pipeline.targets.spec import TargetSpec, eos_token_ids, load_tokenizer
from pipeline.training.adapted_backbone import merge_backbone
from tests.targets.adapters import logits_with_adapter_on, save_adapter
from tests.targets.hub_cache import COMMIT, cached_at_commit

IDS_BT = torch.arange(24).view(2, 12)


@pytest.fixture
def trained(tiny_target, tmp_path) -> Path:
    """A train stage's directory as the trainer leaves it."""
    save_adapter(tiny_target, tmp_path / "train" / "adapter")
    return tmp_path / "train"


def files_of(directory: Path) -> dict[str, tuple[int, int]]:
    return {
        path.name: (path.stat().st_mtime_ns, path.stat().st_ino) for path in directory.iterdir()
    }


def test_it_loads_as_any_model_does_and_says_what_target_and_adapter_say(trained, tiny_target):
    spec = TargetSpec(str(tiny_target))
    merge_backbone(spec, str(trained))
    expected = logits_with_adapter_on(tiny_target, trained / "adapter", IDS_BT)
    merged = TargetSpec(str(trained / "backbone"))
    model = AutoModelForCausalLM.from_pretrained(merged.model)
    torch.testing.assert_close(model(input_ids=IDS_BT).logits, expected, atol=1e-4, rtol=1e-5)
    assert eos_token_ids(merged) == eos_token_ids(spec) == (1, *range(100, 108))
    ours, theirs = (
        AutoTokenizer.from_pretrained(directory) for directory in (merged.model, tiny_target)
    )
    assert ours.get_vocab() == theirs.get_vocab() and ours.chat_template == theirs.chat_template
    assert set(files_of(Path(merged.model))) >= {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "chat_template.jinja",
    }
    for path in (trained / "backbone").iterdir():
        assert str(tiny_target).encode() not in path.read_bytes(), path
        assert (
            path.stat().st_mode & 0o044 == (trained / "backbone/config.json").stat().st_mode & 0o044
        )


def test_a_chat_template_from_the_settings_and_generation_settings_that_saving_refuses_come_along(
    trained, tiny_target, tmp_path
):
    shutil.copytree(tiny_target, tmp_path / "target")
    # as Vicuna ships them: without do_sample
    unusual = '{"eos_token_id": 7, "temperature": 0.9, "top_p": 0.6}'
    (tmp_path / "target" / "generation_config.json").write_text(unusual)
    spec = TargetSpec(str(tmp_path / "target"), chat_template="{{ messages[0].content }}!")
    merge_backbone(spec, str(trained))
    assert (trained / "backbone" / "generation_config.json").read_text() == unusual
    assert load_tokenizer(TargetSpec(str(trained / "backbone"))).chat_template == spec.chat_template


def test_large_weights_are_split_and_stay_in_the_target_s_dtype(trained, tiny_target, monkeypatch):
    monkeypatch.setattr(writing, "SHARD_SIZE", "50KB")
    merge_backbone(TargetSpec(str(tiny_target), dtype="bfloat16"), str(trained))
    shards = sorted((trained / "backbone").glob("model-*.safetensors"))
    assert len(shards) > 2 and (trained / "backbone" / "model.safetensors.index.json").is_file()
    for shard in shards:
        with safe_open(shard, "pt") as file:
            assert {file.get_slice(name).get_dtype() for name in file.offset_keys()} == {"BF16"}
    assert AutoModelForCausalLM.from_pretrained(trained / "backbone").dtype == torch.bfloat16


def test_it_is_written_once_and_again_only_for_another_adapter_or_dtype(trained, tiny_target):
    spec = TargetSpec(str(tiny_target))
    merge_backbone(spec, str(trained))
    first = files_of(trained / "backbone")
    merge_backbone(spec, str(trained))
    assert files_of(trained / "backbone") == first
    save_adapter(tiny_target, trained / "adapter", seed=1)
    merge_backbone(spec, str(trained))
    second = files_of(trained / "backbone")
    assert second != first
    merge_backbone(replace(spec, dtype="float16"), str(trained))
    assert files_of(trained / "backbone") != second


def test_another_commit_of_a_hub_target_is_merged_anew(trained, tiny_target, tmp_path, monkeypatch):
    model = cached_at_commit(tiny_target, tmp_path / "cache", monkeypatch)
    merge_backbone(TargetSpec(model, "tried"), str(trained))
    first = files_of(trained / "backbone")
    expected = logits_with_adapter_on(tiny_target, trained / "adapter", IDS_BT)
    merged = AutoModelForCausalLM.from_pretrained(trained / "backbone")
    torch.testing.assert_close(merged(input_ids=IDS_BT).logits, expected, atol=1e-4, rtol=1e-5)
    merge_backbone(TargetSpec(model, COMMIT), str(trained))
    assert files_of(trained / "backbone") != first


def test_a_merge_that_breaks_off_leaves_nothing(trained, tiny_target, monkeypatch):
    def broken(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "copyfile", broken)  # after the weights
        with pytest.raises(KeyboardInterrupt):
            merge_backbone(TargetSpec(str(tiny_target)), str(trained))
    assert [path.name for path in trained.iterdir()] == ["adapter"]
    merge_backbone(TargetSpec(str(tiny_target)), str(trained))
    assert (trained / "backbone" / "generation_config.json").is_file()


@pytest.mark.parametrize("has_hard_links", [True, False])
def test_another_name_of_it_takes_room_only_where_there_are_no_hard_links(
    trained, tiny_target, tmp_path, monkeypatch, has_hard_links
):
    merge_backbone(TargetSpec(str(tiny_target)), str(trained))
    source, directory = trained / "backbone", tmp_path / "export" / "backbone"
    directory.mkdir(parents=True)
    (directory / "left-over.safetensors").write_text("of an earlier one")
    if not has_hard_links:
        monkeypatch.setattr(
            writing.os, "link", lambda *_: (_ for _ in ()).throw(OSError("no hard links here"))
        )
    assert {path.name for path in link_backbone(source, directory, files_of(source))} == set(
        files_of(source)
    )
    for path in directory.iterdir():
        assert path.read_bytes() == (source / path.name).read_bytes()
        assert path.samefile(source / path.name) == has_hard_links
