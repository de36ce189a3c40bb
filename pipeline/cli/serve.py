"""`medusa-distill serve`: serve an export in vLLM's OpenAI server."""

from __future__ import annotations

import shlex
import socket
import sys
import tempfile
from itertools import takewhile
from pathlib import Path
from typing import Annotated, Any

from rich.console import Console
from typer import Argument, Context, Option

from pipeline.cli.arguments import Gpus
from pipeline.config.load import RUN_FILE, load_config, target_settings
from pipeline.config.running import PlainData
from pipeline.errors import ConfigError, EnvironmentFault
from pipeline.storage.run_directory import export_of, run_of

WHERE = "vLLM's server"
# Not `quantization` and `max_tokens`: they are chosen for training.
SERVED_SETTINGS = {"revision", "dtype", "trust_remote_code", "chat_template", "template_arguments"}


def serve(
    context: Context,
    source: Annotated[Path, Argument(help="A run's directory, or an export.")],
    words: Annotated[
        list[str] | None,
        Argument(
            metavar="[SETTINGS]... [-- VLLM_ARGS]...",
            help=(
                "Settings of the target, such as target.dtype=bfloat16. Default: the run's"
                " settings. After --, further arguments of vLLM's server."
            ),
        ),
    ] = None,
    plain: Annotated[bool, Option("--plain", help="Serve the target without the heads.")] = False,
    draft_tokens: Annotated[
        int | None,
        Option(min=1, help="Draft tokens per step. Default: the export's value."),
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

    The command that runs is printed, so that you can run it without medusa-distill. On a CPU, the
    KV cache has 1 GiB, and the context is shortened if two texts of its length do not fit.

    Example: medusa-distill serve runs/demo-recurrent
    Example: medusa-distill serve EXPORT --port 8001 -- --max-num-seqs 8 --api-key SECRET
    """
    words = words or []
    settings = list(takewhile(lambda word: not word.startswith("-"), words))
    vllm_args = words[len(settings) :]
    given = target_settings(settings, context.params)
    from pipeline.targets.vllm_server import (  # a wrong setting does not wait
        SERVER,
        Address,
        running_server,
        server_flags,
    )

    arguments = server_arguments(
        source, base_model, given, gpus=gpus, plain=plain, draft_tokens=draft_tokens
    )
    _require_free_port(host, port)
    flags = [*server_flags(arguments), *vllm_args]
    address = Address(host, port)
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    command = [sys.executable, "-m", SERVER, *flags, "--host", host, "--port", str(port)]
    console.print(shlex.join(command), markup=False)
    number, path = tempfile.mkstemp(prefix="medusa-distill-serve-", suffix=".log")
    fix = f"The server's output is in {path}. Arguments for vLLM follow --."
    starting = console.status("vLLM starts, which takes half a minute or more")
    with open(number, "w+", errors="replace") as log, starting:
        try:
            with running_server(address, flags, log, WHERE, fix) as process:
                starting.stop()
                console.print(
                    f"[green]✓[/] {arguments['served_model_name']} at {address.url}/v1, log in"
                    f" {path}; Ctrl-C ends it"
                )
                code = process.wait()
        except KeyboardInterrupt:
            Path(path).unlink(missing_ok=True)
            raise
    raise EnvironmentFault(f"vLLM's server ended with status {code}.", WHERE, fix)


def server_arguments(
    source: Path,
    base_model: str | None,
    given: PlainData,
    *,
    gpus: int | None,
    plain: bool = False,
    draft_tokens: int | None = None,
) -> dict[str, Any]:
    """Return the arguments of vLLM's server for an export.

    Args:
        source: A run's directory, or an export.
        base_model: The target; None for the target named in the export.
        given: Settings of the target, which override the run's settings.
        gpus: The number of GPUs; None for one if there is one, else 0.
        plain: Whether to serve the target without the heads.
        draft_tokens: The number of draft tokens per step; None for the export's value.

    Raises:
        ConfigError: vLLM cannot serve these heads, or not the target with these settings, or the
            heads cannot draft that many tokens.
        DataError: The source is not an export.
    """
    import torch  # --help does not wait for it

    from pipeline.config import TargetConfig
    from pipeline.export.layout import BACKBONE_DIRECTORY, read_layout, target_of
    from pipeline.targets.spec import model_config, resolve
    from pipeline.targets.vllm_engine import serving_arguments

    run = run_of(source)
    export = export_of(source)
    layout = read_layout(export)
    if plain and draft_tokens:
        raise ConfigError(
            "--draft-tokens has no effect with --plain.", "--draft-tokens", "Leave one out."
        )
    target = base_model or target_of(export)
    gpus = min(1, torch.cuda.device_count()) if gpus is None else gpus
    settings = given if run is None else {**_settings_of_run(run, target), **given}
    config = TargetConfig(model=target, **settings)
    spec = resolve(config, on_gpu=gpus > 0)
    refusal = layout.kind.vllm_refusal(layout.shape, model_config(spec).to_dict())
    if refusal and not plain:
        raise ConfigError(
            refusal, str(export), "Use `medusa-distill chat`, which decodes natively."
        )
    drafting = {} if plain else layout.engine_args(export, target, draft_tokens)
    arguments = serving_arguments(spec, drafting, gpus)
    arguments["chat_template"] = config.chat_template
    arguments["default_chat_template_kwargs"] = config.template_arguments or None
    arguments["trust_remote_code"] = config.trust_remote_code or None
    if target == str(export / BACKBONE_DIRECTORY):
        arguments["served_model_name"] = (run or export).resolve().name
    return arguments


def _settings_of_run(run: Path, target: str) -> PlainData:
    """Return the settings of a run's target that also apply to serving.

    If another model is served than the run's target, its `revision` is left out.
    """
    config = load_config(run / RUN_FILE).target
    settings = config.model_dump(include=SERVED_SETTINGS)
    if target != config.model:
        del settings["revision"]
    return settings


def _require_free_port(host: str, port: int) -> None:
    """Raise EnvironmentFault if a server cannot listen on this address."""
    try:
        with socket.socket() as tried:
            tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            tried.bind((host, port))
    except OSError as error:
        raise EnvironmentFault(
            f"The server cannot listen on {host}:{port}: {error.strerror or error}.",
            "--port",
            "Stop the process that listens there, or choose another port.",
        ) from error
