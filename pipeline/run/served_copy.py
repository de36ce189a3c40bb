"""The copy of the target that will be served, usually a quantized one (`check.served_model`)."""

from __future__ import annotations

from collections.abc import Mapping

from pipeline.config import Config, TargetConfig
from pipeline.errors import ConfigError
from pipeline.targets.loading import require_readable
from pipeline.targets.spec import TargetSpec, model_config, resolve

WHERE = "check.served_model"


def served_model(config: Config, target: TargetSpec, *, on_gpu: bool | None) -> TargetSpec | None:
    """The copy that `check.served_model` names, with the target's template and context; None where
    there is none.

    Its dtype is its own where workers have GPUs; `on_gpu` is as of `resolve`.

    Raises:
        ConfigError: There is no such model, or it has another vocabulary or hidden size than the
            target.
    """
    if config.check.served_model is None:
        return None
    wanted = TargetConfig(
        model=config.check.served_model,
        trust_remote_code=config.target.trust_remote_code,
        chat_template=config.target.chat_template,
        max_tokens=config.target.max_tokens,
    )
    try:
        spec = resolve(wanted, on_gpu=on_gpu)
    except ConfigError as error:
        raise ConfigError(error.what, WHERE, error.fix) from None
    of_copy, of_target = (model_config(each).get_text_config() for each in (spec, target))
    for name, word in (("vocab_size", "vocabulary"), ("hidden_size", "hidden size")):
        if (found := getattr(of_copy, name)) != (own := getattr(of_target, name)):
            what = (
                f"{spec.model} has a {word} of {found}, and the target one of {own}: the heads do"
                " not fit it."
            )
            raise ConfigError(what, WHERE, "Name a copy of the target, such as a quantized one.")
    return spec


def require_served_model(config: Config, target: TargetSpec, *, on_gpu: Mapping[str, bool]) -> None:
    """Refuse a copy that is not the target's, or that an engine of the check cannot read on this
    machine.

    Args:
        on_gpu: Whether each engine's workers have GPUs.

    Raises:
        ConfigError: As `served_model`, and for a format that an engine has no reader of.
        EnvironmentFault: A package or a GPU is missing.
    """
    for engine in config.check.engines:
        if spec := served_model(config, target, on_gpu=on_gpu[engine]):
            require_readable(spec, engine, on_gpu=on_gpu[engine], where=WHERE)
