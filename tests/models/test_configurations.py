"""Configurations fit where they claim to, by `plan`'s estimate of published sizes; docs/models.md
says the same.
"""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path

import pytest

from benchmarks.families import FAMILIES, REFUSED
from pipeline.config.load import load_config
from pipeline.run.estimate import target_sizes
from tests.flows.tiny import resolved
from tests.models.published import PUBLISHED, write

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "models.md").read_text()
sys.path.insert(0, str(ROOT / "scripts"))
import write_costs  # noqa: E402
import write_models  # noqa: E402

FITS_ON = {  # GPUs and their GB, as the first lines of each file say
    "vicuna-7b.yaml": (1, 24),
    "vicuna-7b-medusa-1.yaml": (1, 24),
    "zephyr-7b.yaml": (1, 48),
    "vicuna-13b.yaml": (1, 48),
    "vicuna-33b.yaml": (4, 48),
}
FILES = sorted(path.name for path in (ROOT / "configs").glob("*.yaml") if "demo" not in path.name)


@pytest.mark.parametrize("hub_id", PUBLISHED)
def test_sizes_make_the_parameters_that_authors_state(hub_id, make_config, tmp_path):
    target = write(hub_id, tmp_path / "target")
    sizes = target_sizes(resolved(make_config(tmp_path, target__model=str(target))))
    assert sizes.parameters / 1e9 == pytest.approx(PUBLISHED[hub_id]["billions"], rel=0.01)


@pytest.mark.parametrize("name", FILES)
def test_a_configuration_fits_where_it_says(name, tmp_path):
    config = load_config(ROOT / "configs" / name)
    gpus, gb = FITS_ON.get(name, (1, 80))
    assert write_models.fits(name, write(config.target.model, tmp_path), gb)
    for placed in config.placement.of_stages().values():
        assert placed.workers == "auto" or (placed.gpus_per_worker or 1) * placed.workers <= gpus


@pytest.mark.slow
def test_the_page_s_table_and_the_file_are_the_estimate():
    rows = write_models.grid()
    with write_models.GRID.open(newline="") as file:
        assert [*csv.reader(file)] == [write_models.COLUMNS, *rows]
    written = write_models.between(PAGE, "models", write_models.table(rows))
    assert written == PAGE, "run python scripts/write_models.py"
    usual = ("lmsys/", "HuggingFaceH4/")  # of the paper
    assert {name for name in PUBLISHED if not name.startswith(usual)} <= {row[0] for row in rows}


def test_the_page_says_what_the_benchmark_found():
    result = json.loads((ROOT / "benchmarks" / "results" / "architectures.json").read_text())
    found = result["facts"]["families"]
    assert found.keys() == {*FAMILIES, *REFUSED}, "run benchmarks.run architectures"
    kept = {name for name, row in found.items() if row["flow"] == "kept"}
    assert kept == {*FAMILIES}
    for row in (found[name] for name in kept):
        for identical, _, prompts in (cell.partition(" of ") for cell in row.values()):
            assert identical == prompts or not prompts, row
    for name in kept | {*REFUSED}:
        assert name.partition(",")[0].removesuffix(" with pictures") in PAGE, name


@pytest.mark.slow
def test_the_costs_page_is_the_script_s_arithmetic():
    page = write_costs.PAGE.read_text()
    written = write_models.between(page, "costs", write_costs.table())
    assert written == page, "run python scripts/write_costs.py"


@pytest.mark.slow
def test_hours_on_an_h100_are_the_products_by_hand(tmp_path):
    """Llama-3.1-8B: 6.98B parameters in its layers, 4,096 wide, 128,256 tokens, 26M tokens."""
    costs = write_costs.Costs(write_costs.MACHINES["8B, H100 (80 GB)"], tmp_path)
    times = costs.hours.stages()
    layers = 32 * (2 * 4096**2 + 2 * 4096 * 1024 + 3 * 4096 * 14336)
    rate = 0.4 * 989.5e12
    worker, trainer, engine = 4.7, 14, 14  # starts
    assert times["features"] == pytest.approx(worker + 2 * layers * 26e6 / rate)
    cell, lm_head = 14 * 4096**2, 128256 * 4096
    training = 2 * 19.6e6 * (5 * (6 * cell + 4 * lm_head) + 2 * lm_head) / rate
    assert times["train"] == pytest.approx(trainer + training, rel=1e-3)
    step = (16.06e9 + 256 * 650 * 2 * 2 * 32 * 1024) / (0.49 * 3350e9)
    generating = engine + 20e6 / 256 * step + 2 * layers * 6e6 / rate
    assert times["generate"] == pytest.approx(generating, rel=1e-3)
    natively = 4 * (1 + 3) * 32  # a warm-up that captures every CUDA graph, three passes
    served = (3 * 3 + 1) * (1 + 8)  # all prompts at once is one answer's steps
    check = costs.run.config.check
    checking = (natively + served) * check.max_new_tokens * 16.06e9 / (0.49 * 3350e9)
    assert times["check"] == pytest.approx(worker + 4 * engine + checking, rel=1e-3)
    assert len(check.baselines) == 2 and len(check.engine_baselines) == 1
