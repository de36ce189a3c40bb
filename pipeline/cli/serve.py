"""`medusa-distill serve`: serve an export in vLLM's OpenAI server."""

from __future__ import annotations

import os
import shlex
import socket
import tempfile
import time
from pathlib import Path
from typing import Annotated

from rich.console import Console
from typer import Argument, Option

from pipeline.cli.arguments import Gpus
from pipeline.errors import ConfigError, EnvironmentFault

WHERE = "vLLM's server"


def serve(
    source: Annotated[Path, Argument(help="A run's directory, or an export.")],
    vllm_args: Annotated[
        list[str] | None, Argument(help="Further arguments of vLLM's server, after --.")
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
    import torch  # --help does not wait for it

    from pipeline.config import TargetConfig
    from pipeline.export.layout import read_layout, target_of
    from pipeline.targets.spec import model_config, resolve
    from pipeline.targets.vllm_engine import serving_arguments
    from pipeline.targets.vllm_server import SERVER, Address, running_server, server_flags

    export = source
    if (source / "latest" / "export").is_dir():
        export = source / "latest" / "export"
    layout = read_layout(export)
    target = base_model or target_of(export)
    gpus = min(1, torch.cuda.device_count()) if gpus is None else gpus
    spec = resolve(TargetConfig(model=target), on_gpu=gpus > 0)
    refusal = layout.kind.vllm_refusal(layout.shape, model_config(spec).to_dict())
    if refusal:
        raise ConfigError(
            refusal, str(export), "Use `medusa-distill chat`, which decodes natively."
        )
    _require_free_port(host, port)
    arguments = serving_arguments(spec, layout.engine_args(export, target), gpus)
    flags = [*server_flags(arguments), *(vllm_args or [])]
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
