"""The models of a study. Each is a stock transformers class."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from huggingface_hub.errors import StrictDataclassError
from transformers import CONFIG_MAPPING, PreTrainedConfig, PreTrainedTokenizerBase, set_seed

from hf_posenc import patch_model, unpatch_model
from hf_posenc.metrics.forward import native_capacity
from hf_posenc.metrics.generalization.examples import end_token
from hf_posenc.recipes import Swap, frozen_teacher
from training.errors import SettingsError, settings_errors
from training.starting_model import build_model as starting_model, check_overrides, unknown_architecture, weights_digest
from training.study.corpus import starting_arguments
from training.study.settings import StudySettings, TrainingSettings

if TYPE_CHECKING:
    from training.study.cells import Cell
    from training.study.tasks import StudyTask
    from training.study.tasks.task import CellData

#: Larger than BERT's 0.02, which is meant for 768 dimensions. With 128, attention would stay uniform for too long.
INITIALIZER_RANGE = 0.05
_NOT_BUILT = (
    ValueError, TypeError, KeyError, AttributeError, ArithmeticError, ImportError, RuntimeError, StrictDataclassError,
)  # fmt: skip
#: Fields of a config that a study sets, and the setting for each.
_SET = {
    "hidden_size": "--hidden_size", "num_hidden_layers": "--num_layers", "num_attention_heads": "--num_heads",
    "model_type": "--model_type", "vocab_size": "the tokenizer", "num_labels": "the pictures",
    "image_size": "--train_resolution", "patch_size": "--patch_size",
}  # fmt: skip


def task_model(study: StudySettings, task: StudyTask, tokenizer: PreTrainedTokenizerBase) -> tuple[str, str | None]:
    """Returns the class of a task's models, and a digest of pretrained weights; `None` for new weights."""
    if not task.pretrained:
        return type(task.new_model(task.settings, tokenizer, task.lengths[-1])).__name__, None
    model = starting_model(starting_arguments(study), tokenizer, task.causal, seed=0, loader=task.loader)
    return type(model).__name__, weights_digest(model)


def new_model(task: StudyTask, settings: TrainingSettings, tokenizer: PreTrainedTokenizerBase, positions: int) -> Any:
    """Returns a model with new weights, and the sizes of the study if its architecture has fields for them."""
    padding, inner = tokenizer.pad_token_id or 0, 2 * settings.hidden_size
    wanted: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "num_key_value_heads": settings.num_heads,
        "head_dim": settings.hidden_size // settings.num_heads,
        # Some tables (RoBERTa's) begin after the row of the padding token.
        "max_position_embeddings": positions + (padding + 1 if task.settings.model_type and not task.causal else 0),
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "tie_word_embeddings": True,
    } | ({"use_cache": False} if task.causal or task.encoder_decoder else {})
    required: dict[str, Any] = {}
    if task.encoder_decoder:
        for part in ("encoder", "decoder"):
            wanted |= {f"{part}_layers": settings.num_layers, f"{part}_attention_heads": settings.num_heads}
            wanted |= {f"{part}_ffn_dim": inner}
        # In Marian, T5 and models derived from them.
        wanted |= {"decoder_vocab_size": len(tokenizer), "num_decoder_layers": settings.num_layers, "d_ff": inner}
        wanted |= {"init_std": INITIALIZER_RANGE, "forced_eos_token_id": None}
        # Not every config has a field for it. Some decoders mask a padding token even if it is the first token.
        required["decoder_start_token_id"] = end_token(tokenizer)
    needed = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")
    return _built(task, settings, "llama" if task.causal else "bert", wanted, needed, required=required)


def new_image_model(task: StudyTask, settings: TrainingSettings, classes: int) -> Any:
    """Returns an image classifier with new weights and the sizes of the study."""
    wanted = {"image_size": settings.train_resolution, "patch_size": settings.patch_size}
    needed = ("hidden_size", "num_hidden_layers", "image_size", "patch_size")
    return _built(task, settings, "vit", wanted, needed, classes=classes)


def _built(
    task: StudyTask, settings: TrainingSettings, by_default: str, wanted: dict[str, Any], needed: tuple[str, ...],
    required: dict[str, Any] | None = None, classes: int | None = None,
) -> Any:  # fmt: skip
    """Returns a model with new weights. Config fields have the names of the architecture, such as `n_embd`."""
    model_type, overrides = task.settings.model_type or by_default, task.settings.config_overrides
    if model_type not in CONFIG_MAPPING:
        raise SettingsError(f"--model_type: {unknown_architecture(model_type)}")
    with settings_errors(f"--model_type {model_type} has no default config to start from", *_NOT_BUILT):
        stock: PreTrainedConfig = CONFIG_MAPPING[model_type]()
    wanted |= {
        "hidden_size": settings.hidden_size,
        "num_hidden_layers": settings.num_layers,
        "num_attention_heads": settings.num_heads,
        "intermediate_size": 2 * settings.hidden_size,
        "initializer_range": INITIALIZER_RANGE,
    }
    lacking = [name for name in needed if not hasattr(stock, name)]
    if lacking:
        raise SettingsError(f"--model_type {model_type} has no {lacking[0]} to set: its models cannot be made small.")
    fields = {
        name: 0.0
        for name, value in stock.to_dict().items()
        if isinstance(value, float) and ("dropout" in name or "layerdrop" in name or name.endswith("_pdrop"))
    }
    fields |= {name: value for name, value in wanted.items() if hasattr(stock, name)}
    names = stock.attribute_map
    check_overrides(stock, overrides)
    for name in overrides:
        setting = next((how for field, how in _SET.items() if names.get(field, field) == names.get(name, name)), None)
        if setting is not None:
            raise SettingsError(f"--config_overrides sets {name}, which {setting} determines.")
    given = {names.get(name, name): value for name, value in (fields | (required or {}) | overrides).items()}
    what = f"--model_type {stock.model_type} cannot be used for the task {task.name!r}"
    with settings_errors(what, *_NOT_BUILT, with_kind=True):
        config = type(stock)(**given)
        if classes is not None:
            config.num_labels = classes
        model = task.loader.from_config(config)
    for name, value in overrides.items():
        built = getattr(config, name)
        if built != value and not (isinstance(built, dict) and built.items() >= value.items()):
            raise SettingsError(f"--config_overrides: {type(config).__name__} turns {name} = {value!r} into {built!r}.")
    return model


class Beginning(NamedTuple):
    """The start of a training: the model with its scheme; the frozen model before the swap, if the training learns from
    it; and the swap from the old scheme, `None` for a plain patch.
    """

    model: Any
    teacher: Any = None
    swap: Swap[Any] | None = None


def begin(cell: Cell, data: CellData, tokenizer: PreTrainedTokenizerBase) -> Beginning:
    """Returns the model of a cell at the start of its training.

    New weights are drawn from the cell's seed before the patch, so that every scheme starts from the same weights. They
    are built for all evaluated positions: a learned table also has rows for positions that training never reaches.
    """
    task, config, swap = cell.task, cell.config, cell.asked.swap
    set_seed(cell.seed)
    if cell.start is not None:
        model = task.loader.from_pretrained(cell.start.model_folder)
    elif task.pretrained:
        arguments = starting_arguments(cell.study)
        model = starting_model(arguments, tokenizer, task.causal, cell.seed, loader=task.loader)
    else:
        classes = 1 if data.pictures is None else len(data.pictures.classes)
        model = task.new_model(cell.settings, tokenizer, data.positions, classes)
    teacher = frozen_teacher(model) if swap.distill or task.has_teacher else None
    started = None if cell.start is None else cell.start.result()
    if started is not None and started["config"] == cell.head()["config"] and not swap.swaps:
        return Beginning(model, teacher)  # keep a scheme that is equal, as it was trained
    if config is None:
        # "native" keeps the scheme of a pretrained model, and removes that of another cell.
        return Beginning(model if cell.start is None else unpatch_model(model), teacher)
    if not swap.swaps:
        return Beginning(patch_model(model, config), teacher)
    length = min(cell.settings.train_length, native_capacity(model) or cell.settings.train_length)
    sample = None if swap.initialization == "default" else task.sample(data, length)
    # By name, so that missing options can be taken from the old scheme.
    return Beginning(model, teacher, swap.swap(model, config.name, sample, cell.options))
