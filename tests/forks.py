"""Processes forked from a server that has the pipeline, torch and transformers loaded: one costs less than a second,
and not the six to eight that their imports take."""

from __future__ import annotations

import multiprocessing

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["pipeline.cli.app", "pipeline.flow", "transformers.models.llama.modeling_llama"])
PATIENCE = 120  # seconds
