"""Loading of models and tokenizers by hub id or folder, for commands, scripts and the `evaluate` module."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from hf_posenc.entry import ADAPTER_CONFIG, CLASS_PREFIX
from hf_posenc.errors import UsageError
from hf_posenc.installation import require


def model_class(config: Any) -> Any:
    """Returns the class of transformers that a config names; `AutoModel` if it names none.

    Raises:
        UsageError: if transformers has no such model, because a bare model would drop its head.
    """
    import transformers

    architectures = getattr(config, "architectures", None)
    if not architectures:
        return transformers.AutoModel
    wanted = architectures[0].removeprefix(CLASS_PREFIX)
    candidate = getattr(transformers, wanted, None)
    if isinstance(candidate, type) and issubclass(candidate, transformers.PreTrainedModel):
        return candidate
    raise UsageError(
        f"transformers has no model {wanted!r}, and loading it as a bare model would drop its head. In Python, load it "
        "with its own class and call hf_posenc.patch_model."
    )


def load_model(model: str, *, config_only: bool = False) -> Any:
    """Loads the model of a hub id or local folder, in evaluation mode.

    With `config_only`, it is built from its config, with random weights.

    Raises:
        UsageError: if it cannot be found, or the folder holds adapters and no model.
    """
    if Path(model, ADAPTER_CONFIG).is_file() and not Path(model, "config.json").is_file():
        raise UsageError(
            f"{model} contains PEFT adapters and no model. Merge them into their base model first: `hf-posenc export "
            f"{model} --merge-adapters`, or merge_and_unload() and save_pretrained() in Python."
        )
    config = load_config(model)
    auto_class = model_class(config)
    if not config_only:
        return _load(auto_class.__name__, model).eval()
    build = auto_class.from_config if auto_class.__name__ == "AutoModel" else auto_class._from_config
    return build(config).eval()


def load_with_adapters(adapters: str) -> tuple[Any, str]:
    """Loads the PEFT adapters of a folder around the base model that they name, in evaluation mode.

    Returns the PEFT model, and the hub id or folder of its base model.

    Raises:
        UsageError: if the folder has no adapters, or PEFT is not installed.
    """
    if not Path(adapters, ADAPTER_CONFIG).is_file():
        raise UsageError(
            f"{missing_folder(adapters)}{adapters} has no {ADAPTER_CONFIG}, so there are no adapters to merge."
        )
    require(f"{adapters} holds PEFT adapters", "peft")
    from peft import PeftConfig, PeftModel

    base = PeftConfig.from_pretrained(adapters).base_model_name_or_path
    if not isinstance(base, str) or not base:
        raise UsageError(
            f"The {ADAPTER_CONFIG} of {adapters} has base_model_name_or_path {base!r}. Write the hub id or folder of "
            "the base model there."
        )
    return PeftModel.from_pretrained(load_model(base), adapters).eval(), base


def missing_folder(model: str) -> str:
    """Returns a sentence with a trailing space if the folder does not exist, otherwise an empty string."""
    if Path(model).exists():
        return ""
    if _may_be_on_hub(model):
        return f"There is no folder {model}, so it was looked up on the hub. "
    return f"The folder {model} does not exist. "


def _may_be_on_hub(model: str) -> bool:
    """Whether a name has the form `owner/name` or `name`."""
    parts = model.split("/")
    return len(parts) <= 2 and all(part and part[0] not in ".~" for part in parts)


def _load(loader: str, model: str) -> Any:
    """Loads with a class of transformers, which would look on the hub for a folder that does not exist."""
    if not _may_be_on_hub(model) and (missing := missing_folder(model)):
        raise UsageError(missing)
    import transformers
    from huggingface_hub.errors import StrictDataclassError

    try:
        return getattr(transformers, loader).from_pretrained(model)
    except (OSError, ValueError, StrictDataclassError) as error:
        raise UsageError(f"{loader} cannot load {model!r}. {missing_folder(model)}{error}") from error


#: Load the config, the tokenizer, or the processor of a hub id or local folder. A processor prepares the inputs of a
#: model for images or sound, and may be for one modality only. A `UsageError` is raised if there is none.
load_config, load_tokenizer, load_processor = (
    partial(_load, loader) for loader in ("AutoConfig", "AutoTokenizer", "AutoProcessor")
)
