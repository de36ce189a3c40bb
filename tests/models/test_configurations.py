"""Configurations fit where they claim to, by `plan`'s estimate of published sizes; docs/models.md
says the same.
"""

from __future__ import annotations

import json
import re
import runpy
import sys
from pathlib import Path

import pytest

from benchmarks.families import FAMILIES, REFUSED, WORDS
from pipeline.config.load import load_config
from pipeline.run.estimate import target_sizes
from tests.flows.tiny import resolved
from tests.models.published import BY_ID, PUBLISHED

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "scripts"))
import write_models  # noqa: E402

FITS_ON = {  # GPUs and their GB, as the first lines of each file say
    "vicuna-7b.yaml": (1, 24),
    "vicuna-7b-medusa-1.yaml": (1, 24),
    "zephyr-7b.yaml": (1, 48),
    "vicuna-13b.yaml": (1, 48),
    "vicuna-33b.yaml": (4, 48),
}
FILES = [
    path.name
    for path in sorted((ROOT / "configs").glob("*.yaml"))
    if not path.name.startswith("demo")
]


@pytest.mark.parametrize("model", PUBLISHED, ids=lambda model: model.hub_id)
def test_sizes_make_the_parameters_that_the_authors_state(model, make_config, tmp_path):
    config = make_config(tmp_path, target__model=str(model.write(tmp_path / "target")))
    sizes = target_sizes(resolved(config))
    assert sizes is not None and sizes.parameters / 1e9 == pytest.approx(model.billions, rel=0.01)


@pytest.mark.parametrize("name", FILES)
def test_a_configuration_fits_where_it_says_with_every_stage(name, tmp_path):
    config = load_config(ROOT / "configs" / name)
    gpus, gb = FITS_ON.get(name, (1, 80))
    target = BY_ID[config.target.model].write(tmp_path)
    assert write_models.fits(name, target, gb)
    placed = [each for each in config.placement.of_stages().values() if each.workers != "auto"]
    assert all((each.gpus_per_worker or 1) * each.workers <= gpus for each in placed)


@pytest.mark.parametrize("name", [name for name in FILES if name not in FITS_ON])
def test_what_is_trained_follows_from_the_rule_and_not_from_taste(name):
    config = load_config(ROOT / "configs" / name)
    assert config.train == type(config.train)(), "everything under train is as the defaults have it"
    assert {each.workers for each in config.placement.of_stages().values()} == {"auto"}


def rows() -> list[list[str]]:
    page = (
        (ROOT / "docs" / "models.md")
        .read_text()
        .partition("<!-- models -->\n")[2]
        .partition("\n<!-- /models -->")[0]
    )
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in page.splitlines()[2:]]


@pytest.mark.slow
def test_every_row_of_the_page_is_what_the_estimate_says(tmp_path):
    seen = set()
    for row in rows():
        model, link, heads, weights = row[:4]
        name = re.findall(r"\[(.*?)\]", link)[0]
        assert row == write_models.row(name, model, BY_ID[model].write(tmp_path / model), heads)
        assert float(weights.split()[0]) == pytest.approx(
            BY_ID[model].billions * 2e9 / 2**30, abs=1.1
        )
        seen.add(model)
    assert seen >= {
        model.hub_id
        for model in PUBLISHED
        if "vicuna" not in model.hub_id and "zephyr" not in model.hub_id
    }


def test_what_the_page_says_is_kept_and_refused_is_what_the_benchmark_found():
    page = (ROOT / "docs" / "models.md").read_text()
    found = json.loads(write_models.RESULT.read_text())["facts"]["families"]
    assert page == write_models.between(page, "kept", write_models.kept_table(found))
    assert found.keys() == {*FAMILIES, *REFUSED}, (
        "python -m benchmarks.run architectures, then scripts/write_models.py"
    )


def test_the_text_model_is_stored_as_the_page_says_it_is(tmp_path, monkeypatch):
    """The page's own lines, on Gemma 3 in miniature: the text model's logits are the whole
    model's.
    """
    import torch
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import (
        AutoModelForCausalLM,
        Gemma3Config,
        Gemma3ForConditionalGeneration,
        PreTrainedTokenizerFast,
    )

    small = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    text = {**small, "num_key_value_heads": 1, "head_dim": 32, "vocab_size": 300}
    pictures = {
        **small,
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "image_size": 28,
        "patch_size": 14,
    }
    torch.manual_seed(0)
    whole = Gemma3ForConditionalGeneration(
        Gemma3Config(
            text_config=text, vision_config=pictures, mm_tokens_per_image=4, image_token_index=292
        )
    ).eval()
    whole.save_pretrained(tmp_path / "google/gemma-3-12b-it")
    words = Tokenizer(
        WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token=WORDS[0])
    )
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(
        tmp_path / "google/gemma-3-12b-it"
    )
    page = (ROOT / "docs" / "models.md").read_text()
    lines = next(
        block
        for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL)
        if "Gemma3ForCausalLM" in block
    )
    (tmp_path / "store.py").write_text(lines)
    monkeypatch.chdir(tmp_path)
    runpy.run_path("store.py")
    stored = AutoModelForCausalLM.from_pretrained("gemma-3-12b-text").eval()
    ids_1T = torch.arange(1, 20)[None]
    with torch.inference_mode():
        torch.testing.assert_close(stored(input_ids=ids_1T).logits, whole(input_ids=ids_1T).logits)
