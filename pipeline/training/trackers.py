"""Where people watch a training: TensorBoard, Trackio, Weights & Biases, each by its own library.

A library is imported only where `train.report_to` names it. A training that resumes goes on with
the same run of each tracker, and no point stands there twice; points that a killed process had not
sent yet are not sent again. A tracker that fails is given up, and training goes on without it.
TensorBoard's files lie beside the heads; Trackio's where its dashboard looks for them; Weights &
Biases' beside the heads, offline or on its server as its own settings say.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import logging
import os
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Protocol

from pipeline.errors import EnvironmentFault
from pipeline.storage.atomic import read_object, write_json

FILE = "tracking.json"  # beside the heads: the runs' id, which a resume continues
PROJECT = "medusa-distill"
SECONDS_TO_START = 30  # what a server that does not answer may cost, once
SECONDS_TO_FINISH = 120  # the same where it has stopped to answer: heads are written after that


@dataclass(frozen=True)
class Watched:
    """A training as trackers see it: the run's name and configuration, and the directory of the
    heads.
    """

    name: str
    directory: Path
    configuration: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Continued:
    """What a tracker goes on with: the run's id, and the last step that it was told, -1 of a new
    run.
    """

    id: str
    reported: int

    @property
    def exists(self) -> bool:
        return self.reported >= 0


class Tracker(Protocol):
    """One service. What it raises ends its part alone."""

    package: ClassVar[str]

    def require_login(self) -> None:
        """Raise EnvironmentFault where points would be refused later."""

    def begin(self, watched: Watched, continued: Continued) -> None: ...
    def log(self, step: int, figures: Mapping[str, float]) -> None: ...

    def finish(self, figures: Mapping[str, Any] | None) -> None:
        """Add the final figures, None where training was interrupted, and let go."""


class TensorBoard:
    package: ClassVar[str] = "tensorboard"

    def require_login(self) -> None:
        """It needs none."""

    def begin(self, watched: Watched, continued: Continued) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(
            str(watched.directory / "tensorboard"), purge_step=continued.reported + 1
        )
        self.step = continued.reported + 1
        self.writer.add_text("run", watched.name, self.step)
        self.writer.add_text("configuration", _as_code(watched.configuration), self.step)

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        self.step = step
        for name, number in figures.items():
            self.writer.add_scalar(name, number, step)

    def finish(self, figures: Mapping[str, Any] | None) -> None:
        if figures is not None:
            self.writer.add_text(
                "final figures", _as_code(figures), self.step
            )  # not 0, which would hide the others
        self.writer.close()


class Trackio:
    package: ClassVar[str] = "trackio"

    def require_login(self) -> None:
        """It needs one where the environment names a Space, and none on this machine."""
        from huggingface_hub import get_token

        if (space := os.environ.get("TRACKIO_SPACE_ID")) and not get_token():
            fix = (
                "Run `hf auth login`, unset TRACKIO_SPACE_ID, or leave trackio out of"
                " train.report_to."
            )
            raise EnvironmentFault(
                f"Trackio is to report to the Space {space}, and nobody is logged in.", KEY, fix
            )

    def begin(self, watched: Watched, continued: Continued) -> None:
        import trackio

        with _quiet():
            self.run = trackio.init(
                project=PROJECT,
                name=f"{watched.name}-{continued.id[:8]}",
                config=dict(watched.configuration),
                resume="allow" if continued.exists else "never",
                embed=False,
                auto_log_gpu=False,
                auto_log_cpu=False,
            )

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        self.run.log(dict(figures), step=step)

    def finish(self, figures: Mapping[str, Any] | None) -> None:
        import trackio

        with _quiet():
            if figures is not None:
                self.run.log({f"final/{name}": value for name, value in scalars(figures)})
            trackio.finish()


class WeightsAndBiases:
    package: ClassVar[str] = "wandb"

    def require_login(self) -> None:
        """It needs one but for offline runs."""
        import wandb

        if wandb.setup().settings.mode == "online" and not wandb.api.api_key:
            fix = (
                "Run `wandb login`, set WANDB_MODE=offline, or leave wandb out of train.report_to."
            )
            raise EnvironmentFault("Nobody is logged in to Weights & Biases.", KEY, fix)

    def begin(self, watched: Watched, continued: Continued) -> None:
        import wandb

        self.run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            name=watched.name,
            id=continued.id,
            resume="allow",
            config=dict(watched.configuration),
            dir=str(watched.directory),
            settings=wandb.Settings(
                silent=True,
                console="off",
                init_timeout=SECONDS_TO_START,
                finish_timeout=SECONDS_TO_FINISH,  # by default it waits for ever
                finish_timeout_raises=True,
            ),
        )

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        self.run.log(dict(figures), step=step)

    def finish(self, figures: Mapping[str, Any] | None) -> None:
        if figures is not None:
            self.run.summary.update({f"final/{name}": value for name, value in scalars(figures)})
        self.run.finish(exit_code=0 if figures is not None else 1)


KEY = "train.report_to"
TRACKERS: dict[str, type[Tracker]] = {
    "tensorboard": TensorBoard,
    "trackio": Trackio,
    "wandb": WeightsAndBiases,
}


class Trackers:
    """Those that a training reports to; used by the first worker alone.

    Args:
        reported: The last step that was reported before, -1 for none; up to it nothing is reported
            again.
    """

    def __init__(self, names: Sequence[str], watched: Watched, reported: int = -1):
        self.reported, self.failed = reported, dict[str, str]()
        self.active = {name: TRACKERS[name]() for name in names}
        if not names:
            return
        id = read_object(watched.directory / FILE).get("id")
        self.reported = reported if isinstance(id, str) else -1
        continued = Continued(id if isinstance(id, str) else uuid.uuid4().hex, self.reported)
        write_json(watched.directory / FILE, {"id": continued.id})
        self._each("begin", watched, continued)

    def log(self, step: int, figures: Mapping[str, Any]) -> None:
        """One step's figures: numbers, lists with an entry per head, and dictionaries of these."""
        if step > self.reported:
            self._each("log", step, dict(scalars(figures)))

    def finish(self, figures: Mapping[str, Any] | None = None) -> None:
        """Add the final figures and let go of all; without them the training was interrupted."""
        self._each("finish", figures)
        self.active.clear()

    def _each(self, act: str, *arguments: Any) -> None:
        """Have each tracker do something; one that cannot is said once, and asked no more."""
        for name, tracker in list(self.active.items()):
            try:
                getattr(tracker, act)(*arguments)
            except Exception as error:  # whatever a library or its server comes up with
                del self.active[name]
                said = " ".join(str(error).split())[:200]
                self.failed[name] = (
                    f"{name} was given up and has not all points: {type(error).__name__}: {said}"
                )
                logging.getLogger(__name__).warning("%s. Training goes on.", self.failed[name])


def require_trackers(names: Sequence[str]) -> None:
    """Refuse trackers that would take no points, before anything starts.

    Raises:
        EnvironmentFault: One is not installed, or nobody is logged in where it asks for that.
    """
    for name in names:
        tracker = TRACKERS[name]()
        try:
            importlib.import_module(tracker.package)
        except ImportError as error:
            fix = (
                f"Install it (pip install {tracker.package}, or medusa-distill[trackers]), or leave"
                " it out."
            )
            raise EnvironmentFault(f"{tracker.package} is not installed here.", KEY, fix) from error
        tracker.require_login()


def scalars(figures: Any, name: str = "") -> Iterator[tuple[str, float]]:
    """Flat names and numbers: `held_out/head_2/top1`; what is no number is left out."""
    if isinstance(figures, Mapping):
        for key, value in figures.items():
            yield from scalars(value, f"{name}/{key}" if name else key)
    elif isinstance(figures, list):
        for head, value in enumerate(figures):
            yield from scalars(value, f"{name}/head_{head}")
    elif isinstance(figures, int | float):
        yield name, figures


def _as_code(data: Mapping[str, Any]) -> str:
    """Data as TensorBoard's Markdown shows it."""
    lines = json.dumps(data, indent=2, default=str, ensure_ascii=False).splitlines()
    return "\n".join(f"    {line}" for line in lines)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without what a library prints for people that started it themselves."""
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        yield
