"""Training metrics: metrics.jsonl with one line per step, and TensorBoard, W&B.

A resumed training logs no step twice and continues the same run in each tracker; points that a
killed process had not sent are missing in the tracker. A tracker that fails is dropped and training
continues. A library is imported only if `train.report_to` names it. Their files are beside the
heads. Weights & Biases' own settings decide whether it is online.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import logging
import os
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.errors import EnvironmentFault
from pipeline.storage.atomic import read_object, write_json, write_text

if TYPE_CHECKING:
    from pipeline.training.task import TrainSpec

FILE = "metrics.jsonl"
TRACKING_FILE = "tracking.json"  # the id of the trackers' runs, which a resume continues
KEY = "train.report_to"
PROJECT = "medusa-distill"
SECONDS_TO_START = 30  # timeout of an unreachable server at the start
SECONDS_TO_FINISH = 120  # timeout at the end; heads are written afterwards
log = logging.getLogger(__name__)

Line = dict[str, Any]  # of metrics.jsonl


class MetricsLog:
    """Context manager that logs metrics to metrics.jsonl and to the trackers.

    Creating it rewrites metrics.jsonl and starts the trackers. Only the first worker has one.

    Args:
        spec: The training, with its directory and its trackers.
        step: The step that training resumes from. Lines of later steps are dropped; at step 0 all
            lines are. The file is replaced by a rename, so that a worker that outlived its driver
            cannot append to it.
    """

    def __init__(self, spec: TrainSpec, step: int):
        directory = spec.path
        before = list(read_metrics(directory))
        kept = [json.dumps(line) + "\n" for line in before if step and line["step"] <= step]
        write_text(directory / FILE, "".join(kept))
        self._file = (directory / FILE).open("a", encoding="utf-8")
        self._reported = max((line["step"] for line in before), default=-1)
        self._trackers: dict[str, Tracker] = {}
        self._warnings: list[str] = []
        if spec.settings.report_to:
            run_id = read_object(directory / TRACKING_FILE).get("id")
            if run_id is None:
                run_id = uuid.uuid4().hex
                self._reported = -1
            write_json(directory / TRACKING_FILE, {"id": run_id})
            for name in spec.settings.report_to:
                tracker = self._trackers[name] = TRACKERS[name]()
                with self._drop_if_it_fails(name):
                    tracker.begin(spec, run_id, self._reported)

    def __enter__(self) -> MetricsLog:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
        self.finish()

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Write one step's metrics to metrics.jsonl, and to the trackers unless already logged.

        Metrics are numbers, lists with an entry per head, or mappings of these. Raises ValueError
        for a number that is not finite.
        """
        self._file.write(json.dumps({"step": step, **metrics}, allow_nan=False) + "\n")
        self._file.flush()
        if step > self._reported:
            for name, tracker in list(self._trackers.items()):
                with self._drop_if_it_fails(name):
                    tracker.log(step, dict(flatten_metrics(metrics)))

    def finish(self, result: Mapping[str, Any] | None = None) -> list[str]:
        """Log the training's result, close the trackers, and return a warning per failed tracker.

        Without a result, Weights & Biases shows the training as failed. A second call only returns
        the warnings.
        """
        for name, tracker in list(self._trackers.items()):
            with self._drop_if_it_fails(name):
                tracker.finish(result)
        self._trackers.clear()
        return self._warnings

    @contextlib.contextmanager
    def _drop_if_it_fails(self, name: str) -> Iterator[None]:
        """Context manager that drops a training tracker, with one warning, if it raises."""
        try:
            yield
        except Exception as error:  # whatever a library or its server raises
            del self._trackers[name]
            reason = " ".join(str(error).split())[:200]
            warning = f"{name} was dropped and lacks points: {type(error).__name__}: {reason}"
            self._warnings.append(warning)
            log.warning("%s. Training continues.", warning)


class TensorBoard:
    """Tracker that writes training metrics to TensorBoard's event files."""

    def begin(self, spec: TrainSpec, run_id: str, reported: int) -> None:
        """Open TensorBoard's event files and log the configuration of the run.

        `reported` is the last step that is already logged. TensorBoard hides points of later steps
        that a killed training has logged.
        """
        from torch.utils.tensorboard import SummaryWriter

        self.step = reported + 1
        self.writer = SummaryWriter(spec.path / "tensorboard", purge_step=self.step)
        self.writer.add_text("configuration", json.dumps(spec.configuration), self.step)

    def log(self, step: int, numbers: dict[str, float]) -> None:
        """Log a training step's metrics to TensorBoard."""
        self.step = step
        for name, number in numbers.items():
            self.writer.add_scalar(name, number, step)

    def finish(self, result: Mapping[str, Any] | None) -> None:
        """Log the training's result, if there is one, and close the event files."""
        if result is not None:
            # At the last step: step 0 would hide the others.
            self.writer.add_text("final figures", json.dumps(result), self.step)
        self.writer.close()


class WeightsAndBiases:
    """Tracker that logs training metrics to Weights & Biases."""

    def begin(self, spec: TrainSpec, run_id: str, reported: int) -> None:
        """Start the training's Weights & Biases run, or continue it."""
        import wandb

        self.run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            name=spec.run_name,
            id=run_id,
            resume="allow",
            config=spec.configuration,
            dir=spec.path,
            settings=wandb.Settings(
                silent=True,
                console="off",
                init_timeout=SECONDS_TO_START,
                finish_timeout=SECONDS_TO_FINISH,  # by default it waits forever
                finish_timeout_raises=True,
            ),
        )

    def log(self, step: int, numbers: dict[str, float]) -> None:
        """Log a training step's metrics to Weights & Biases."""
        self.run.log(numbers, step=step)

    def finish(self, result: Mapping[str, Any] | None) -> None:
        """Log the training's result and end the run, as failed if there is no result."""
        if result is not None:
            self.run.summary.update(dict(flatten_metrics(result, "final")))
        self.run.finish(exit_code=1 if result is None else 0)


Tracker = TensorBoard | WeightsAndBiases
TRACKERS: dict[str, type[Tracker]] = {
    "tensorboard": TensorBoard,
    "wandb": WeightsAndBiases,
}


def require_trackers(names: Sequence[str]) -> None:
    """Check that the trackers are installed, and that Weights & Biases is logged in or offline.

    Raises:
        EnvironmentFault: A tracker is not installed, or Weights & Biases is online without a login.
    """
    for name in names:
        try:
            importlib.import_module(name)
        except ImportError as error:
            raise EnvironmentFault(
                f"{name} is not installed here.",
                KEY,
                f"Install it (pip install {name}), or leave it out.",
            ) from error
    if "wandb" in names:
        import wandb

        if wandb.setup().settings.mode == "online" and not wandb.api.api_key:
            raise EnvironmentFault(
                "Nobody is logged in to Weights & Biases.",
                KEY,
                "Run `wandb login`, set WANDB_MODE=offline, or leave wandb out.",
            )


def flatten_metrics(figures: Any, name: str = "") -> Iterator[tuple[str, float]]:
    """Yield each number in nested metrics with its full name, such as `held_out/head_2/top1`.

    `name` is a prefix of all names. Values other than numbers are left out.
    """
    if isinstance(figures, Mapping):
        for key, value in figures.items():
            yield from flatten_metrics(value, f"{name}/{key}" if name else key)
    elif isinstance(figures, list):
        for head, value in enumerate(figures):
            yield from flatten_metrics(value, f"{name}/head_{head}")
    elif isinstance(figures, int | float):
        yield name, figures


def read_metrics(directory: Path) -> Iterator[Line]:
    """Yield the lines of metrics.jsonl as dictionaries; nothing if the file does not exist.

    Lines that are not JSON are skipped, since a kill may cut a line short.
    """
    path = directory / FILE
    if not path.is_file():
        return
    for line in path.read_bytes().splitlines():
        with contextlib.suppress(ValueError):
            yield json.loads(line)
