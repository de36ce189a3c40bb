"""The methods in vLLM that the heads are compared with."""

from __future__ import annotations

from pipeline.config import CheckConfig
from pipeline.evaluation.prompts import CheckRequest
from pipeline.evaluation.vllm_methods import compared_configs
from pipeline.targets.spec import TargetSpec

CHAIN = {"method": "eagle", "model": "export", "num_speculative_tokens": 5}


def test_every_method_has_a_configuration_of_its_own():
    settings = CheckConfig(
        engine_baselines=["draft-model"], assistant_model="small", draft_tokens=[5, 3]
    )
    request = CheckRequest(
        TargetSpec("large"),
        "export",
        [],
        settings,
        assistant=TargetSpec("small"),
        speculative_config=CHAIN,
    )
    found = compared_configs(request)
    assert list(found) == ["heads with 3 drafts", "draft-model"], "five are the export's own"
    assert found["heads with 3 drafts"] == {**CHAIN, "num_speculative_tokens": 3}
    assert (found["draft-model"]["method"], found["draft-model"]["model"]) == (
        "draft_model",
        "small",
    )
