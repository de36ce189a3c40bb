"""Recurrent heads beside untied Medusa heads of as many steps: training from the cache, and what a
decoding step costs.

Claim: they train at least twice as fast, in less memory. Measured: positions per second of whole
optimizer steps, in turns, on the demo's target and on a random one of 50M parameters with a
vocabulary of 32,000; and the most memory of one step, each kind in a process of its own. Decoding:
the overhead of a step over a plain one, by nodes (a tree of `NUM_HEADS` levels) and by depth
(chains). Untrained heads will do: a step's cost does not depend on what is accepted.
"""

from __future__ import annotations

import multiprocessing
import tempfile
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter

import torch

from benchmarks import rows, targets
from benchmarks.arithmetic import peak_memory_gb, reset_peak_memory
from benchmarks.claims import Claim, Result, in_turns, ratio, speed_ratio
from benchmarks.decoding import PROMPT_TOKENS, seconds_per_step
from benchmarks.gpu_decoding import ACCURACY_KR, NUM_HEADS
from pipeline.config import FeaturesConfig, TrainConfig
from pipeline.decoding.decoder import Decoder, plain_decoder
from pipeline.decoding.tree import cartesian_tree, greedy_tree
from pipeline.heads.kind import TargetWeights
from pipeline.heads.kinds import head_kind
from pipeline.stages.features import Worker
from pipeline.targets.loading import lm_head_weight, load_causal_lm
from pipeline.targets.spec import TargetSpec
from pipeline.training.heads_only import HeadsLearner
from pipeline.training.task import TrainSpec, Workers
from pipeline.training.trainer import Trainer

AIM, ROUNDS = 2.0, 5
NAMES = ("medusa", "recurrent")
LARGE = targets.BACKBONE | {"vocab_size": 32_000}
SIZES, ROW_TOKENS = (7, 15, 31, 63), 128


def measure(*, tiny: bool = False) -> Result:
    """Both kinds on both targets."""
    claims: list[Claim] = []
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(temporary)
        large = targets.random_target(directory / "large", targets.TINY if tiny else LARGE)
        cases = {
            "the demo's target": targets.demo_target(directory / "demo"),
            "50M parameters, V = 32,000": large,
        }
        for what, target in cases.items():
            specs = _specs(target, directory / f"rows-{len(claims)}", num_rows=4 if tiny else 8)
            claims += [_speed(specs, what, rounds=1 if tiny else ROUNDS), _memory(specs, what)]
            claims += _overheads(
                target, what, SIZES[: 1 if tiny else None], rounds=1 if tiny else ROUNDS
            )
    return Result(claims, {"num_heads": NUM_HEADS, "row_tokens": ROW_TOKENS})


def _specs(target: TargetSpec, directory: Path, num_rows: int) -> dict[str, TrainSpec]:
    """A training of each kind from the same cached rows, one step an epoch."""
    directory.mkdir()
    made = rows.equal_rows(num_rows, 1, ROW_TOKENS, 200)
    (task,) = rows.features_tasks(directory, [made])
    Worker(target, FeaturesConfig(tokens_per_batch=4096), gpus=0)(task)
    specs = {}
    for name in NAMES:
        settings = TrainConfig(
            heads=name, num_heads=NUM_HEADS, batch_tokens=1 << 20, epochs=1, lr=1e-3, warmup_steps=0
        )
        specs[name] = rows.train_spec(target, settings, directory, [task], torch.device("cpu"))
    return specs


class Steps:
    """One optimizer step on the same batch, again and again."""

    def __init__(self, spec: TrainSpec):
        learner = HeadsLearner(spec, Workers(), torch.device("cpu"))
        self.trainer, (self.batches,) = Trainer(learner), learner.steps(0)

    def __call__(self) -> float:
        started = perf_counter()
        self.trainer.step(0, self.batches)
        return perf_counter() - started


def _speed(specs: dict[str, TrainSpec], what: str, rounds: int) -> Claim:
    sides = {name: Steps(spec) for name, spec in specs.items()}
    taken = in_turns(sides, rounds)
    positions = sum(map(len, sides["medusa"].batches))
    ours_first = {name: taken[name] for name in reversed(NAMES)}
    return speed_ratio(
        f"training recurrent heads over Medusa's, {what}", ours_first, positions, "positions", AIM
    )


def _memory(specs: dict[str, TrainSpec], what: str) -> Claim:
    processes = multiprocessing.get_context(
        "forkserver"
    )  # each begins with the imports, and with nothing of ours
    processes.set_forkserver_preload([__name__])
    with processes.Pool(1, maxtasksperchild=1) as pool:
        used = {name: pool.apply(_step_memory, (spec,)) for name, spec in specs.items()}
    sides = {f"{name}, GB": gigabytes for name, gigabytes in used.items()}
    share = used["recurrent"] / used["medusa"]
    return Claim(
        f"memory of a step of recurrent heads over Medusa's, {what}",
        share,
        aim=1.0,
        at_most=True,
        sides=sides,
    )


def _step_memory(spec: TrainSpec) -> float:
    """The most memory of two steps, weights and optimizer included, in GB."""
    torch.set_num_threads(1)
    before = reset_peak_memory(torch.device("cpu"))
    steps = Steps(spec)
    for _ in range(2):
        steps()
    return peak_memory_gb(torch.device("cpu")) - before


def _overheads(target: TargetSpec, what: str, sizes: Sequence[int], rounds: int) -> list[Claim]:
    model = load_causal_lm(target, "cpu", 1)
    matrices = TargetWeights(
        lambda: lm_head_weight(model), lambda: model.get_input_embeddings().weight.detach()
    )
    prompt = torch.randint(
        2, 200, (PROMPT_TOKENS,), generator=torch.Generator().manual_seed(0)
    ).tolist()
    trees = {f"{size} nodes": greedy_tree(ACCURACY_KR, size) for size in sizes}
    trees |= {
        f"a chain of {depth}": cartesian_tree([1] * depth) for depth in range(1, NUM_HEADS + 1)
    }
    size, vocabulary = model.config.hidden_size, model.config.vocab_size
    decoders = {"plain": plain_decoder(model, eos_token_ids=())}
    for name in NAMES:
        kind = head_kind(name)
        shape = kind.shape_of(TrainConfig(heads=name, num_heads=NUM_HEADS), size, vocabulary)
        heads = kind.initial(shape, matrices).eval()
        decoders |= {
            f"{tree}, {name}": Decoder(model, heads, paths, eos_token_ids=())
            for tree, paths in trees.items()
        }
    with torch.inference_mode():
        taken = in_turns(
            {name: _side(decoder, prompt) for name, decoder in decoders.items()}, rounds
        )
    plain = taken.pop("plain")
    return [
        ratio(f"overhead, {name}, {what}", seconds, plain, {}) for name, seconds in taken.items()
    ]


def _side(decoder: Decoder, prompt: Sequence[int]):
    return lambda: seconds_per_step(decoder, [prompt])
