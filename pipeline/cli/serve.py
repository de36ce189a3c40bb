"""`medusa-distill serve`: serve an export in vLLM's OpenAI server."""

from __future__ import annotations

import os
import shlex
import socket
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

from rich.console import Console
from typer import Argument, Option

from pipeline.cli.arguments import Gpus
from pipeline.config.running import PlainData
from pipeline.errors import ConfigError, EnvironmentFault

WHERE = "vLLM's server"


def serve(
    source: Annotated[Path, Argument(help="A run's directory, or an export.")],
    words: Annotated[
        list[str] | None,
        Argument(
            metavar="[target.KEY=VALUE]... [-- VLLM_ARGS]...",
            help=(
                "Settings of the target, such as target.chat_template=chat.jinja; after --, further"
                " arguments of vLLM's server. Default: the target's settings of the run."
            ),
        ),
    ] = None,
    base_model: Annotated[
        str | None,
        Option(
            help="The target as a directory or a Hub id. Default: the target named in the export."
        ),
    ] = None,
    host: Annotated[str, Option(help="The address to listen on.")] = "127.0.0.1",
    port: Annotated[int, Option(min=1, max=65535, help="The port to listen on.")] = 8000,
    gpus: Gpus = None,
) -> None:
    """Serve an export's target and heads in vLLM's OpenAI server, until Ctrl-C.

    The command that runs is printed, so that you can run it without medusa-distill. On a CPU, 1 GiB
    is for the keys and values of texts, and the context is cut if two texts of its length need
    more.

    Example: medusa-distill serve runs/demo-recurrent
    Example: medusa-distill serve EXPORT --port 8001 -- --max-num-seqs 8 --api-key SECRET
    """
    from pipeline.targets.vllm_server import SERVER, Address, running_server, server_flags

    words = words or []
    settings = [word for word in words if word.startswith("target.")]
    vllm_args = [word for word in words if word not in settings]
    arguments = _server_arguments(source, base_model, settings, gpus)
    _require_free_port(host, port)
    flags = [*server_flags(arguments), *vllm_args]
    address = Address(host, port)
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    command = ["python", "-m", SERVER, *flags, "--host", host, "--port", str(port)]
    console.print(shlex.join(command), markup=False)
    number, path = tempfile.mkstemp(prefix="medusa-distill-serve-", suffix=".log")
    fix = f"Its output is in {path}. Further arguments of vLLM come after --."
    with open(number, "w+", errors="replace") as log, console.status("vLLM starts") as status:
        started = time.monotonic()

        def show_seconds() -> None:
            """Show how long the start has taken."""
            status.update(f"vLLM starts, {time.monotonic() - started:.0f} s")

        with running_server(address, flags, log, WHERE, fix, show_seconds) as process:
            status.stop()
            console.print(
                f"[green]✓[/] {arguments['served_model_name']} at {address.url}/v1, log in {path};"
                " Ctrl-C ends it"
            )
            code = process.wait()
    raise EnvironmentFault(f"vLLM's server ended with status {code}.", WHERE, fix)


def _server_arguments(
    source: Path, base_model: str | None, words: list[str], gpus: int | None
) -> dict[str, Any]:
    """Return the arguments of vLLM's server for an export.

    Args:
        source: A run's directory, or an export.
        base_model: The target; None for the target named in the export.
        words: Settings of the target, which override those of the run.
        gpus: The number of GPUs; None for one if there is one, else 0.

    Raises:
        ConfigError: A setting is wrong, or vLLM cannot serve these heads.
        DataError: The source is not an export.
    """
    import torch  # --help does not wait for it

    from pipeline.config import TargetConfig
    from pipeline.config.load import target_settings
    from pipeline.export.layout import BACKBONE_DIRECTORY, read_layout, target_of
    from pipeline.targets.spec import model_config, resolve
    from pipeline.targets.vllm_engine import serving_arguments

    export, run = source, source.parent.parent  # RUN_DIR/latest/export, or a copy of it
    if (source / "latest" / "export").is_dir():
        export, run = source / "latest" / "export", source
    layout = read_layout(export)
    target = base_model or target_of(export)
    gpus = min(1, torch.cuda.device_count()) if gpus is None else gpus
    settings = {**_settings_of_run(run, target), **target_settings(words)}
    config = TargetConfig(model=target, **settings)
    spec = resolve(config, on_gpu=gpus > 0)
    refusal = layout.kind.vllm_refusal(layout.shape, model_config(spec).to_dict())
    if refusal:
        raise ConfigError(
            refusal, str(export), "Use `medusa-distill chat`, which decodes natively."
        )
    arguments = serving_arguments(spec, layout.engine_args(export, target), gpus)
    arguments["chat_template"] = config.chat_template
    arguments["default_chat_template_kwargs"] = config.template_arguments or None
    arguments["trust_remote_code"] = config.trust_remote_code or None
    if Path(target).name == BACKBONE_DIRECTORY:
        arguments["served_model_name"] = source.resolve().name
    return arguments


def _settings_of_run(run: Path, target: str) -> PlainData:
    """Return the settings of the target in a run; none if the directory is no run's.

    If another model is served than the run's target, its `revision` is left out.
    """
    from pipeline.config.load import RUN_FILE, load_config

    file = run / RUN_FILE
    if not file.is_file():
        return {}
    config = load_config(file).target
    settings = config.model_dump(exclude_unset=True, exclude={"model"})
    if target != config.model:
        settings.pop("revision", None)
    return settings


def _require_free_port(host: str, port: int) -> None:
    """Raise EnvironmentFault if a server cannot listen on this address."""
    try:
        with socket.socket() as tried:
            tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            tried.bind((host, port))
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else str(error)
        raise EnvironmentFault(
            f"Nothing can listen on {host}:{port}: {reason}.",
            "--port",
            "End what listens there, or choose another port.",
        ) from error
