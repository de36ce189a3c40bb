"""export: one directory that engines load unmodified.

Promises: exactly the expected tensors and shapes, read back and compared bit for bit; heads,
tokenizer, configuration, tree and model card together; further formats in directories of their
names. With Medusa-2 the tuned backbone lies in `backbone/`, and the configuration names it by its
absolute path, where it was made: of an export that was moved since, that directory is meant all the
same.
"""

from __future__ import annotations

from pipeline.artifacts.trained_heads import HEADS_FILE, read_trained_heads
from pipeline.artifacts.tree_file import read_calibration
from pipeline.decoding.tree import check_choices
from pipeline.export.backbone import link_backbone
from pipeline.export.card import Published, model_card
from pipeline.export.directory import write_export
from pipeline.export.layout import BACKBONE_DIRECTORY, CARD_FILE, ExportLayout, check_vocabulary
from pipeline.report.report import Report
from pipeline.run.context import Context, Stage, StageFiles, reads
from pipeline.storage.receipts import Identity, Summary
from pipeline.storage.stage_directory import StageDirectory
from pipeline.targets.spec import load_tokenizer, model_config
from pipeline.training.methods import method_of

NAME = "export"
VERSION = 5


def identity(context: Context) -> Identity:
    """The format, the dtype, and what the export calls its target; a tuned backbone is wherever the
    export is.
    """
    tuned = method_of(context.config.train).tunes_backbone
    return {
        "settings": context.config.export.model_dump(mode="json"),
        "base_model": BACKBONE_DIRECTORY if tuned else context.target.model,
        "dtype": context.target.dtype,
    }


def run(context: Context, stage: StageDirectory) -> Summary:
    settings, spec = context.config.export, context.target
    train, backbone = context.upstream["train"].path, stage.path.resolve() / BACKBONE_DIRECTORY
    tunes = method_of(context.config.train).tunes_backbone
    trained = context.upstream["train"].files_below(BACKBONE_DIRECTORY)
    tuned = link_backbone(train / BACKBONE_DIRECTORY, backbone, trained) if tunes else []
    heads = read_trained_heads(train / HEADS_FILE)
    target = model_config(spec)
    check_vocabulary(heads.shape, target.get_text_config().vocab_size)
    calibration = read_calibration(context.upstream["calibrate"].path)
    layout = ExportLayout(
        base_model_name_or_path=str(backbone) if tuned else spec.model,
        shape=heads.shape,
        format=settings.formats[0],
        dtype=spec.dtype if settings.dtype == "auto" else settings.dtype,
        num_speculative_tokens=calibration.num_speculative_tokens,
        dynamic_tree=calibration.dynamic,
    )
    base = None if tuned else spec.model
    files = write_export(
        stage.path,
        heads,
        layout,
        target=target.to_dict(),
        tokenizer=load_tokenizer(spec),
        choices=check_choices(calibration.choices, heads.shape.max_depth, heads.shape.vocab_size),
        further=settings.formats[1:],
        card=model_card(Published(Report(), context.config, base_model=base, tuned=tunes)),
    )
    return {
        "files": [path.relative_to(stage.path).as_posix() for path in files],
        "bytes": sum(path.stat().st_size for path in files),
        "dtype": layout.dtype,
        "formats": list(settings.formats),
        "vllm": layout.kind.not_served(layout.shape, target.to_dict()) is None,
        **({"backbone_bytes": sum(path.stat().st_size for path in tuned)} if tuned else {}),
    }


def one_line(summary: Summary) -> str:
    tuned = (
        f"; the tuned backbone, {summary['backbone_bytes'] / 1e6:,.1f} MB"
        if "backbone_bytes" in summary
        else ""
    )
    heads = f"{len(summary['files'])} files, {summary['bytes'] / 1e6:,.1f} MB, {summary['dtype']}"
    return f"{heads}, read back and compared{tuned}"


STAGE = Stage(
    NAME,
    VERSION,
    reads("train", "calibrate"),
    identity,
    run,
    one_line,
    files=StageFiles(
        scratch=(CARD_FILE,),  # written again with every report
        parts=(BACKBONE_DIRECTORY,),
    ),
)
