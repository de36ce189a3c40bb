"""What every stage declares, and which directory holds its result."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pipeline.config import Config
from pipeline.run.context import Context
from pipeline.storage.done import Identity, Summary
from pipeline.storage.fingerprint import fingerprint
from pipeline.storage.stage_directory import StageDirectory


def reads(*names: str) -> Callable[[Config], tuple[str, ...]]:
    """`upstream` of a stage that reads the same stages whatever is configured."""
    return lambda config: names


@dataclass(frozen=True)
class Stage:
    """One stage: a step of a run whose result lies in a directory of its own."""

    name: str
    version: int  # of the code; raised by whoever changes what it makes of the same input
    upstream: Callable[
        [Config], tuple[str, ...]
    ]  # the stages that it reads; a sharded one has a shard for each of the first's
    identity: Callable[[Context], Identity]  # what its result depends on besides them
    run: Callable[[Context, StageDirectory], Summary]  # makes the result exist
    one_line: Callable[[Summary], str]  # what the terminal shows of a finished one
    skipped: Callable[[Config], str | None] = lambda config: (
        None
    )  # why it is no part of a run, "" where that is plain
    asked_for: Callable[[Config], bool] = lambda config: (
        True
    )  # whether a run of this configuration wants it
    sharded: bool = False  # whether the result is shards
    scratch: tuple[
        str, ...
    ] = ()  # files and folders in its directory that do not count once it is done
    parts: tuple[
        str, ...
    ] = ()  # folders in it that are made again alone when one of their files is damaged

    def identity_of(self, context: Context) -> Identity:
        """Everything that the result depends on: code version, settings and their inputs, the
        stages before it.
        """
        upstream = {
            name: context.upstream[name].fingerprint for name in self.upstream(context.config)
        }
        return {"version": self.version, "settings": self.identity(context), "upstream": upstream}

    def locate(self, context: Context) -> StageDirectory:
        """The directory that the stage's fingerprint names; nothing is made."""
        meaning = fingerprint({"stage": self.name, **self.identity_of(context)})
        return context.directory(self.name, meaning, scratch=self.scratch, parts=self.parts)

    def contents(self, context: Context) -> dict[str, str]:
        """Hashes of what the stage reads, by stage."""
        return {name: context.upstream[name].content for name in self.upstream(context.config)}
