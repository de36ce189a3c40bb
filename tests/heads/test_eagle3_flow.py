"""EAGLE-3 heads through the whole flow, and recurrent heads from the same cache."""

from __future__ import annotations

from safetensors.torch import load_file

from tests.flows.tiny import STAGES, latest, report_of, run_again, stages_run


def test_the_whole_flow_changes_no_token_and_its_cache_serves_recurrent_heads(
    make_config, tmp_path
):
    run = run_again(make_config(tmp_path, train__heads="eagle3"))
    assert all(latest(run, name).done for name in (*STAGES, "row-features"))
    native = report_of(run)["check"]["native"]
    assert native["greedy_match"]["identical"] == 8
    trained = load_file(latest(run, "train").path / "heads.safetensors")
    assert trained["fc.weight"].any() and trained["layers.0.self_attn.o_proj.weight"].any()

    run = run_again(make_config(tmp_path, train__heads="recurrent"))
    assert stages_run(run)[0] == "train"
