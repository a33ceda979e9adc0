"""Model cards of patched models: the scheme, how to load the model, and evaluation results."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData
from torch import nn
from transformers import PreTrainedModel
from transformers.modelcard import TASK_MAPPING

from hf_posenc.errors import PositionEncodingError
from hf_posenc.patching.place.encoding import current_encoding
from hf_posenc.patching.place.model_checks import unwrapped
from hf_posenc.schemes.arrangement.of_parts import PartsConfig
from hf_posenc.schemes.config import SchemeConfig
from hf_posenc.version import installed

#: Tags of every card, by which patched models can be found.
TAGS = ("hf_posenc", "position-encoding")


def model_card(
    model: nn.Module,
    *,
    model_id: str,
    description: str = "",
    sections: Mapping[str, str] | None = None,
    base_model: str | None = None,
    license: str | None = None,
    language: str | Sequence[str] | None = None,
    datasets: Sequence[str] | None = None,
    eval_results: Sequence[EvalResult] | None = None,
) -> ModelCard:
    """Creates a card for a patched model, to save or push with it.

        card = model_card(model, model_id="me/llama-alibi", base_model="HuggingFaceTB/SmolLM2-135M")
        card.save("llama-alibi/README.md")

    It describes the scheme and its options, the replaced parts of the stock model, and that `hf_posenc` must be
    imported before `from_pretrained`. Use `sections` for other information (training data, intended use, limits).

    Args:
        model: a patched model, or a PEFT model around one. PEFT writes its own card into the folder of an adapter,
            without the scheme: save this card after `save_pretrained`.
        model_id: hub id or folder, for the title and the loading example.
        description: a paragraph below the title.
        sections: additional sections, from title to Markdown text, in this order.
        base_model: hub id of the model that was patched; by default the one it was loaded from, unless that is a local
            path.
        license: identifier of the licence, such as "apache-2.0".
        language: code or codes, such as "en".
        datasets: hub ids of the training data.
        eval_results: results for the model-index of the card.

    Raises:
        PositionEncodingError: for a model that is not patched.
        TypeError: for something that is not a transformers model.
    """
    inner = unwrapped(model)
    encoding = current_encoding(inner)
    if encoding is None:
        raise PositionEncodingError(
            f"This {type(inner).__name__} is not patched, so there is no scheme to describe. Call patch_model first, "
            "or create a huggingface_hub.ModelCard."
        )
    adapter = model is not inner
    base = base_model or hub_name(inner)
    if base == model_id:  # A model that was loaded from the repository that it is pushed to.
        base = None
    if adapter and base is None:
        raise PositionEncodingError(
            "The card of an adapter must name the base model: give base_model, its hub id or folder."
        )
    class_name = type(inner).__name__
    data = card_data(
        model_id, class_name, scheme_names(encoding.config), base_model=base, license=license, language=language,
        datasets=datasets, eval_results=eval_results, library_name="peft" if adapter else "transformers",
    )  # fmt: skip
    loading = adapter_loading(model_id, class_name, str(base)) if adapter else loading_section(model_id, class_name)
    parts = [
        f"# {model_id}",
        description,
        f"## Position encoding\n\n{scheme_section(encoding.config.to_dict(), class_name)}",
        "" if encoding.report is None else f"What was replaced:\n\n```\n{encoding.report}\n```",
        f"## Loading\n\n{loading}",
        "" if adapter else f"## Programs that run it\n\n{programs_section()}",
        *(f"## {title}\n\n{text}" for title, text in (sections or {}).items()),
        f"### Framework versions\n\n{versions_section()}",
    ]
    body = "\n\n".join(part.strip() for part in parts if part.strip())
    return ModelCard(f"---\n{data.to_yaml()}\n---\n\n{body}\n", ignore_metadata_errors=False)


def card_data(
    model_id: str,
    class_name: str,
    scheme: str | Sequence[str],
    *,
    tags: Sequence[str] = (),
    eval_results: Sequence[EvalResult] | None = None,
    library_name: str = "transformers",
    **fields: Any,
) -> ModelCardData:
    """Returns the YAML metadata of a card: library, task, tags with the scheme, and results.

    Args:
        model_id: hub id or folder; its last part names the model in the model-index.
        class_name: class of the model, such as "LlamaForCausalLM".
        scheme: name of the scheme, or of the scheme of each part of a composite model; they become tags.
        tags: additional tags.
        eval_results: for the model-index.
        library_name: the library that loads it.
        fields: fields of `huggingface_hub.ModelCardData`; `None` values are omitted.
    """
    names = [scheme] if isinstance(scheme, str) else scheme
    every_tag = [*TAGS, *(name.replace("_", "-") for name in names), *tags]
    return ModelCardData(
        model_name=model_id.rstrip("/").rsplit("/", 1)[-1],
        library_name=library_name,
        pipeline_tag=pipeline_tag(class_name),
        tags=list(dict.fromkeys(every_tag)),
        eval_results=list(eval_results) if eval_results else None,
        **{name: value for name, value in fields.items() if value is not None},
    )


def scheme_section(config: Mapping[str, Any], class_name: str) -> str:
    """Describes the scheme with every option, in Markdown."""
    options = json.dumps(dict(config), indent=2, ensure_ascii=False)
    replaced = f"replaced by `{config['scheme']}`"
    if config["scheme"] == PartsConfig.name:
        parts = zip(config["names"], config["schemes"], strict=True)
        replaced = "replaced " + " and ".join(f"in its {part} part by `{one['scheme']}`" for part, one in parts)
    return (
        f"A stock `{class_name}` whose position encoding was {replaced} of the package `hf_posenc`. All options:\n\n"
        f"```json\n{options}\n```"
    )


def scheme_names(config: SchemeConfig) -> list[str]:
    """The name of a scheme, or those of the schemes of parts of a composite model."""
    return [one.name for one in config.schemes] if isinstance(config, PartsConfig) else [config.name]


def loading_section(path: str, class_name: str, *, patched: bool = True, tokenizer: bool = False) -> str:
    """Describes how to load a saved model, and what happens without the package, in Markdown.

    Args:
        path: hub id or folder.
        class_name: class of the model.
        patched: whether it has a scheme of this package; a stock model needs no import.
        tokenizer: whether its tokenizer is saved with it.
    """
    names = ["AutoTokenizer", class_name] if tokenizer else [class_name]
    lines = ["import hf_posenc  # before from_pretrained"] if patched else []
    lines += [f"from transformers import {', '.join(names)}", "", f'model = {class_name}.from_pretrained("{path}")']
    lines += [f'tokenizer = AutoTokenizer.from_pretrained("{path}")'] if tokenizer else []
    lines += ["print(model.position_encoding.config)"] if patched else []
    code = "\n".join(["```python", *lines, "```"])
    if not patched:
        return code
    return (
        f"{code}\n\nIt needs the package `hf-posenc` (`pip install .` in a clone of its repository). Without the "
        "import, loading stops with an error and never returns a model with other positions."
    )


def programs_section() -> str:
    """Describes which programs run a patched checkpoint, and what to do for others, in Markdown."""
    return (
        "Programs that are built on transformers run it if they import `hf_posenc` first: `Trainer`, pipelines, PEFT, "
        "TRL, sentence-transformers and others. `hf-posenc run` starts a program in this way, and `hf-posenc serve` "
        "starts `transformers serve`.\n\nEvery other program refuses this checkpoint. An export writes it in a form "
        "that runs without the package, or says why the scheme cannot be expressed there:\n\n```python\n"
        'hf_posenc.export_model(model, "exported", to="stock")  # a plain transformers checkpoint\n```\n\n'
        "The documentation of `export_model` lists the other targets."
    )


def adapter_loading(path: str, class_name: str, base_model: str) -> str:
    """Describes how to load an adapter of a patched model, in Markdown."""
    return (
        "```python\nimport hf_posenc # before from_pretrained\nfrom peft import PeftModel\nfrom transformers import "
        f'{class_name}\n\nbase = {class_name}.from_pretrained("{base_model}")\nmodel = PeftModel.from_pretrained(base, '
        f'"{path}")\n```\n\nThe scheme is saved next to the adapter: a stock base model is patched when the adapter is '
        "loaded, and a different base model is refused. Without the import, loading stops with an error and never "
        "returns a model with other positions."
    )


def versions_section() -> str:
    """Returns the installed versions, in Markdown."""
    return "\n".join(f"- {one}" for one in installed())


def pipeline_tag(class_name: str) -> str | None:
    """Returns the hub task of a model class, such as "text-generation"; `None` for a base model."""
    return next((task for task, names in TASK_MAPPING.items() if class_name in names.values()), None)


def hub_name(model: PreTrainedModel) -> str | None:
    """Returns the hub id that the model was loaded from, `owner/name` or a bare name; `None` for a path."""
    name = str(getattr(model, "name_or_path", "") or "")
    is_path = name.startswith((".", "/", "~")) or "\\" in name or name.count("/") > 1 or Path(name).exists()
    return None if not name or is_path else name
