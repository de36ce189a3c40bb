"""`medusa-distill check`: measure any heads on a target, without a run."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

from rich.console import Console
from typer import Argument, Context, Option

from pipeline.cli.arguments import Gpus, TargetSettings
from pipeline.config.load import target_settings
from pipeline.errors import CheckFailed
from pipeline.formatting import visible
from pipeline.storage.atomic import write_json
from pipeline.storage.run_directory import export_of


class Engine(StrEnum):
    native = "native"
    vllm = "vllm"


def check(
    context: Context,
    heads: Annotated[
        str,
        Argument(
            help="A run directory, or heads in a directory or on the Hub (an export, Medusa,"
            " EAGLE-1 or EAGLE-3)."
        ),
    ],
    target: Annotated[
        str, Option(help="The model that the heads were trained on: a directory or a Hub id.")
    ],
    settings: TargetSettings = None,
    prompts: Annotated[
        Path | None,
        Option(
            exists=True,
            dir_okay=False,
            help="A file of questions (MT-Bench, any form of seeds). Default: bundled ones.",
        ),
    ] = None,
    number: Annotated[
        int, Option(min=1, help="Number of questions to ask; each of their turns is a prompt.")
    ] = 32,
    max_new_tokens: Annotated[int, Option(min=2, help="Maximum tokens per answer.")] = 64,
    engine: Annotated[list[Engine] | None, Option(help="Default: both engines.")] = None,
    draft_tokens: Annotated[
        int | None, Option(min=1, help="vLLM's draft tokens. Default: as the files say.")
    ] = None,
    repeats: Annotated[int, Option(min=1, help="Timed repetitions.")] = 3,
    gpus: Gpus = None,
    out: Annotated[Path | None, Option(help="Write check.json and the answers there.")] = None,
) -> None:
    """Measure any heads on their target: rates, speed, and whether greedy text is unchanged.

    Exit code 1 if greedy text differs other than at ties, no draft token is accepted, or the
    acceleration rate is below 1.

    Example: medusa-distill check FasterDecoding/medusa-vicuna-7b-v1.3 --target lmsys/vicuna-7b-v1.3
    """
    given = target_settings(settings or (), context.params)
    if Path(heads).is_dir():
        heads = str(export_of(Path(heads)))
    import torch  # a wrong setting does not wait for it

    from pipeline.artifacts.json_form import to_json
    from pipeline.config import CheckConfig, TargetConfig
    from pipeline.evaluation.answer_files import write_answers
    from pipeline.evaluation.measuring import BUNDLED, measure_heads
    from pipeline.execution.progress import Meter, ProgressReporter
    from pipeline.report.check_tables import categories_table, check_table
    from pipeline.report.report import Report
    from pipeline.report.text_table import print_tables, print_text
    from pipeline.report.warnings import report_warnings
    from pipeline.report.what_to_serve import what_to_serve_table
    from pipeline.targets.spec import resolve

    decoded = CheckConfig(
        prompts=prompts or BUNDLED,
        engines=tuple(each.value for each in engine or Engine),
        max_new_tokens=max_new_tokens,
        repeats=repeats,
        baselines=(),
    )
    if out:
        out.mkdir(parents=True, exist_ok=True)  # fails before anything is measured
    gpus = min(1, torch.cuda.device_count()) if gpus is None else gpus
    wanted = TargetConfig(model=target, **given)
    with Meter(Console(stderr=True), "check") as meter:
        measured, answers = measure_heads(
            heads,
            resolve(wanted, on_gpu=gpus > 0),
            decoded,
            gpus=gpus,
            num_questions=number,
            draft_tokens=draft_tokens,
            progress=ProgressReporter(show=meter.show),
        )
    report, console = Report(check=measured.check, hardware=measured.hardware), Console()
    found = what_to_serve_table(report), check_table(report), categories_table(report)
    tables = [table for table in found if table.rows]
    title = visible(f"{heads}: {measured.read_as}; target {measured.target}")
    console.print(title, style="bold", highlight=False, markup=False, soft_wrap=True)
    for warning in report_warnings(report):
        print_text(f"- {warning}", console, "yellow")
    print_tables(tables, console)
    if out:
        write_json(out / "check.json", to_json(measured))
        write_answers(out, answers)
    if measured.check.failures:
        raise CheckFailed(
            f"The check failed: {'; '.join(measured.check.failures)}.",
            heads,
            "Give --target the very model that these heads were trained on.",
        )
