"""Each thing that a machine can lack: its exit code, one paragraph that says what to do, nothing
lost.
"""

from __future__ import annotations

import sys

import pytest

from pipeline.errors import EnvironmentFault
from tests.flows.tiny import latest, run_again, stages_run

pytest_plugins = ["tests.flows.failing"]


def test_a_result_that_needs_another_machine_is_kept(
    copied_run, make_config, tmp_path, monkeypatch
):
    import torch

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    config = make_config(tmp_path, placement__train={"gpus_per_worker": 1})
    trained = latest(copied_run, "train").path / "heads.safetensors"
    before = trained.read_bytes()
    assert stages_run(run_again(config)) == []
    with pytest.raises(EnvironmentFault, match=r"placement\.train"):
        run_again(config, fresh="train")
    assert trained.read_bytes() == before


@pytest.mark.parametrize("word", ["generate.engine=vllm", "features.engine=vllm"])
def test_vllm_that_cannot_be_imported(intact, run_fails, tmp_path, monkeypatch, word):
    package = tmp_path / "site" / "vllm"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(
        "raise ImportError('libcudart.so.12: cannot open\\nshared object file')"
    )
    monkeypatch.syspath_prepend(package.parent)
    monkeypatch.delitem(sys.modules, "vllm", raising=False)
    said = run_fails(4, word)
    assert "vLLM is not importable" in said and "libcudart" in said and "Install" in said


def test_a_run_root_that_cannot_be_made(run_fails, tmp_path):
    (tmp_path / "file").write_text("")
    said = run_fails(4, run__root=str(tmp_path / "file" / "runs"))
    assert "run.root" in said
