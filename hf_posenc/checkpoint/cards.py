"""Model cards of patched models: the scheme, how to load the model, and evaluation results."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData
from torch import nn
from transformers import PreTrainedModel
from transformers.modelcard import TASK_MAPPING

from hf_posenc.entry import INSTALL
from hf_posenc.errors import PositionEncodingError
from hf_posenc.patching.anatomy.anatomy import unwrapped
from hf_posenc.patching.inspection import engine_problem, unsupported_kind
from hf_posenc.patching.place.encoding import current_encoding
from hf_posenc.schemes.arrangement.of_parts import PartsConfig
from hf_posenc.schemes.config import SchemeConfig
from hf_posenc.schemes.labels import scheme_label
from hf_posenc.schemes.refusals import VLLM
from hf_posenc.version import REPOSITORY, installed

#: Tags of every card, by which patched models can be found.
TAGS = ("hf_posenc", "position-encoding")
#: The section about the scheme between comments, by which a save finds it again.
_END = "<!-- hf_posenc: end of this section -->"
_BEGIN = "<!-- hf_posenc: [^>]* Tags: (?P<tags>[^>]*) -->"
#: If the end of a section was removed by hand, the text behind it is not part of the next section.
MARKED = re.compile(rf"{_BEGIN}(?:(?!<!-- hf_posenc: [^>]* Tags: ).)*?{_END}", re.DOTALL)


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

    It says what the scheme is, how long sequences may be, how to load the model, and which programs run it.
    `save_pretrained` writes the same section into the README.md of its folder, and replaces it with every save. Use
    this function for a card with other information (training data, intended use, limits, results).

    Args:
        model: a patched model, or a PEFT model around one.
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
    parts = [
        f"# {model_id}",
        description,
        marked_section(model, inner, model_id, base),
        *(f"## {title}\n\n{text}" for title, text in (sections or {}).items()),
    ]
    body = "\n\n".join(part.strip() for part in parts if part.strip())
    return ModelCard(f"---\n{data.to_yaml()}\n---\n\n{body}\n", ignore_metadata_errors=False)


def marked_section(model: nn.Module, inner: PreTrainedModel, name: str, base: str | None = None) -> str:
    """Describes the scheme of a patched model in Markdown, between comments by which a save finds it again.

    Args:
        model: the model, or what is around it.
        inner: the patched model of transformers.
        name: hub id or folder that the examples load.
        base: of an adapter, the hub id or folder of its base model.
    """
    encoding = current_encoding(inner)
    assert encoding is not None
    class_name, adapter = type(inner).__name__, is_adapter(model, inner)
    adapters: Any = getattr(model, "peft_config", {}) if adapter else {}
    stated = (one.base_model_name_or_path for one in adapters.values())
    base = base or hub_name(inner) or next(filter(None, stated), None) or "the base model"
    loading = adapter_loading(name, class_name, base) if adapter else loading_section(name, class_name)
    length = "" if encoding.lengths is None else f" Context: {encoding.lengths}."
    return "\n\n".join(
        (
            "<!-- hf_posenc: save_pretrained replaces everything up to the end of this section. Tags: "
            f"{', '.join(card_tags(inner))} -->",
            f"## Position encoding\n\nThe position encoding of this `{class_name}` is "
            f"`{scheme_label(encoding.config)}`, from the package [hf_posenc]({REPOSITORY}).{length}",
            f"### Load it\n\n{loading}",
            f"### Programs that run it\n\n{programs_section(inner, name, adapter)}",
            f"### What was replaced\n\n{scheme_section(encoding.config.to_dict(), class_name)}\n\n"
            f"```\n{encoding.report}\n```\n\n{versions_section()}",
            _END,
        )
    )


def is_adapter(model: nn.Module, inner: PreTrainedModel) -> bool:
    """Whether a save of a model around a patched one, or of the patched one itself, writes an adapter only."""
    inside = getattr(inner, "_hf_peft_config_loaded", False)
    return bool(inside) if model is inner else hasattr(model, "peft_config")


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


def card_tags(model: PreTrainedModel) -> list[str]:
    """The tags of a patched model: those of every card, and its schemes."""
    encoding = current_encoding(model)
    assert encoding is not None
    return list(dict.fromkeys((*TAGS, *(name.replace("_", "-") for name in scheme_names(encoding.config)))))


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
        f"{code}\n\nIt needs the package `hf-posenc` (`{INSTALL}`). Without the "
        "import, loading stops with an error and never returns a model with other positions."
    )


def programs_section(model: PreTrainedModel, name: str, adapter: bool = False) -> str:
    """Describes which programs run a patched checkpoint, and what to do for others, in Markdown.

    Args:
        model: the patched model.
        name: hub id or folder of the checkpoint.
        adapter: whether it is a PEFT adapter.
    """
    lines = [
        "Programs that are built on transformers, if they import `hf_posenc` first: `Trainer`, pipelines, PEFT, TRL, "
        "sentence-transformers and others. `hf-posenc run -- COMMAND` starts a program in this way."
    ]
    export = f"hf-posenc export {name} --to gguf --output DIR"
    if adapter:
        export += " --merge-adapters"
    elif model.can_generate():
        kind, problem = unsupported_kind(model.config), engine_problem(model, VLLM)
        lines += [
            f"`hf-posenc serve {name}`: a server with the API of OpenAI.",
            f"`vllm serve {name}`, if `hf_posenc` is installed beside vLLM."
            if not kind and not problem
            else f"vLLM does not run it: {problem or kind}.",
        ]
    lines.append(
        f"llama.cpp (`--to gguf`), ONNX Runtime (`--to onnx`), ExecuTorch (`--to executorch`) and programs that read "
        f"plain transformers checkpoints (`--to stock`) run an export, where they can express the scheme: `{export}`."
    )
    return "\n".join(f"- {line}" for line in lines) + "\n\nEvery other program refuses this checkpoint."


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
