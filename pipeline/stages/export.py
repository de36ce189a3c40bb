"""export: write the heads as one directory that engines load unmodified.

The directory holds heads, configuration, tokenizer, tree and model card. The weights file has
exactly the expected tensors; it is read back and compared bit for bit. Further formats are in
subdirectories named after them. With Medusa-2 the tuned backbone is in `backbone/`, and the
configuration names it by its absolute path. If the export is moved, this project uses the
`backbone/` in it.
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
from pipeline.run.context import Context, Stage, reads
from pipeline.storage.receipts import Identity, Summary
from pipeline.storage.stage_directory import StageDirectory
from pipeline.targets.spec import load_tokenizer

NAME = "export"
VERSION = 5


def identity(context: Context) -> Identity:
    """Return what the export stage's result depends on: settings, and the target's name and dtype.

    A tuned backbone is named by its relative path, so that the run can be moved.
    """
    tuned = context.resolved.method.tunes_backbone
    return {
        "settings": context.config.export.model_dump(mode="json"),
        "base_model": BACKBONE_DIRECTORY if tuned else context.target.model,
        "dtype": context.target.dtype,
    }


def run(context: Context, stage: StageDirectory) -> Summary:
    """Write the export of the trained heads with their tree, and return the stage's summary.

    A tuned backbone is hard-linked or copied into the export.
    """
    settings, spec, trained = context.config.export, context.target, context.upstream["train"]
    target, tunes = context.resolved.target_config.to_dict(), context.resolved.method.tunes_backbone
    base = spec.model
    if tunes:
        backbone = stage.path.resolve() / BACKBONE_DIRECTORY
        learned = trained.files_below(BACKBONE_DIRECTORY)
        link_backbone(trained.path / BACKBONE_DIRECTORY, backbone, learned)
        base = str(backbone)
    heads = read_trained_heads(trained.path / HEADS_FILE)
    check_vocabulary(heads.shape, context.resolved.shape.vocab_size)
    calibration = read_calibration(context.upstream["calibrate"].path)
    layout = ExportLayout(
        base_model_name_or_path=base,
        shape=heads.shape,
        format=settings.formats[0],
        dtype=spec.dtype,
        num_speculative_tokens=calibration.num_speculative_tokens,
        dynamic_tree=calibration.dynamic,
    )
    published = None if tunes else base
    card = Published(Report(), context.config, base_model=published, tuned=tunes)
    files = write_export(
        stage.path,
        heads,
        layout,
        target=target,
        tokenizer=load_tokenizer(spec),
        choices=check_choices(calibration.choices, heads.shape.max_depth, heads.shape.vocab_size),
        further=settings.formats[1:],
        card=model_card(card),
    )
    return {
        "bytes": sum(path.stat().st_size for path in files),
        "dtype": layout.dtype,
        "vllm": layout.kind.vllm_refusal(layout.shape, target) is None,
    }


STAGE = Stage(
    NAME,
    VERSION,
    reads("train", "calibrate"),
    identity,
    run,
    {"bytes": "bytes", "dtype": "dtype"},
    scratch=(CARD_FILE,),  # written again with every report
    parts=(BACKBONE_DIRECTORY,),
)
