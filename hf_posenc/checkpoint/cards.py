"""Model cards of patched models, and the section about the scheme in the README.md of a folder.

Every save replaces the section and leaves the text around it as it is. The comment at its beginning lists the tags that
came with it, so a save of a stock model can remove both, and the name of the model if a user or an upload gave one.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import EvalResult, ModelCard, ModelCardData
from torch import nn
from transformers import PreTrainedModel
from transformers.modelcard import TASK_MAPPING

from hf_posenc.checkpoint.atomic_folder import replace_file
from hf_posenc.entry import INSTALL
from hf_posenc.errors import PositionEncodingError, warn_user
from hf_posenc.patching.anatomy.anatomy import unwrapped
from hf_posenc.patching.inspection import engine_problem, unsupported_kind
from hf_posenc.patching.place.encoding import PositionEncoding, current_encoding, encodings
from hf_posenc.schemes.arrangement.of_parts import PartsConfig
from hf_posenc.schemes.config import SchemeConfig, walk
from hf_posenc.schemes.refusals import VLLM
from hf_posenc.version import REPOSITORY, __version__

README = "README.md"
#: Tags of every card, by which patched models can be found.
TAGS = ("hf_posenc", "position-encoding")
#: The section about the scheme between comments, by which a save finds it again.
_END = "<!-- hf_posenc: end of this section -->"
_BEGIN = r"<!-- hf_posenc: [^>]*?(?: Name: (?P<name>[^>]*)\.)? Tags: (?P<tags>[^>]*) -->"
#: If the end of a section was removed by hand, the text after it is not part of the next section.
_SECTION = re.compile(rf"{_BEGIN}(?:(?!<!-- hf_posenc: [^>]* Tags: ).)*?{_END}", re.DOTALL)
#: A sentence in the cards that transformers uploads with every model that has none.
_OF_TRANSFORMERS = "This model card has been automatically generated"
_METADATA = re.compile(r"\A\s*---[ \t]*\r?\n(.*?)^---[ \t]*(?:\r?\n|\Z)", re.DOTALL | re.MULTILINE)
#: The line of code before a patched model is loaded.
_IMPORT = "import hf_posenc  # before from_pretrained"
_TAGS = re.compile(r"^tags[ \t]*:.*\n(?:(?:[ \t]+\S|-(?!--)).*\n)*", re.MULTILINE)


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
    data = card_data(
        model_id, type(inner).__name__, scheme_names(encoding.config), base_model=base, license=license,
        language=language, datasets=datasets, eval_results=eval_results,
        library_name="peft" if adapter else "transformers",
    )  # fmt: skip
    section = _section(model, inner, encoding, model_id, base, named=True)
    others = (f"## {title}\n\n{text}" for title, text in (sections or {}).items())
    return ModelCard(card_text(data, f"# {model_id}", description, section, *others), ignore_metadata_errors=False)


def card_text(data: ModelCardData, *parts: str) -> str:
    """Returns the text of a card: its metadata, and the parts of its text that are not empty."""
    body = "\n\n".join(part.strip() for part in parts if part.strip())
    return f"---\n{data.to_yaml()}\n---\n\n{body}\n"


def has_section(folder: Path) -> bool:
    """Whether the card of a folder describes a scheme."""
    try:
        return _SECTION.search(_read(folder / README) or "") is not None
    except OSError:
        return False


def is_of_transformers(text: str) -> bool:
    """Whether a card is the one that transformers uploads with a model that has none, with tags and nothing else."""
    description = next((line for line in text.splitlines() if _OF_TRANSFORMERS in line), None)
    if description is None:
        return False
    template = ModelCard.from_template(ModelCardData(library_name="transformers"), model_description=description)
    return _TAGS.sub("", text).split() == _TAGS.sub("", str(template)).split()


def write_card(model: Any, folder: Path, name: str | None = None) -> None:
    """Writes the section into the card of a folder, or removes it if the model has no scheme. The file is replaced.

    As huggingface_hub does, it keeps line ends, and writes the file that a link leads to. It warns if the user may not
    write the file, or if it is not text in UTF-8.

    Args:
        model: a model, also one of PEFT or sentence-transformers around a model of transformers.
        folder: where the card is.
        name: hub id or folder that the card names; by default that in the earlier section, or that of `folder`.
    """
    card = folder / README
    try:
        before = _read(card)
        mark = "\ufeff" if before and before.startswith("\ufeff") else ""
        end = "\r\n" if before and 0 < before.count("\n") == before.count("\r\n") else "\n"
        plain = before and before.removeprefix(mark).replace(end, "\n")
        text = _card(model, plain, name, folder.resolve().name)
        if text is None or text == plain:
            return
        if before is not None and not os.access(card, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        replace_file(Path(os.path.realpath(card)), (mark + text.replace("\n", end)).encode(errors="surrogateescape"))
    except OSError as error:
        warn_user(
            f"The {README} in {folder} cannot be replaced ({error.strerror}), so it does not describe the position "
            "encoding of the model that was saved there. The model is complete. Make it a text file in UTF-8 that this "
            "process may write, or remove it, and save again."
        )


def _card(model: Any, before: str | None, name: str | None, folder: str) -> str | None:
    """The new card; `None` if there is nothing to write."""
    earlier_section = _SECTION.search(before or "")
    models = (module for module in model.modules() if isinstance(module, PreTrainedModel))
    inner = next(filter(encodings, models), None)
    if inner is None:
        return before if earlier_section is None else _tagged(_replaced(before or "", ""), remove=_section_tags(before))
    encoding = current_encoding(inner)
    assert encoding is not None
    name = name or (earlier_section and earlier_section["name"])
    section = _section(model, inner, encoding, name or folder, named=name is not None)
    names = scheme_names(encoding.config)
    tags = [*_card_tags(names), *(inner.model_tags or [])]
    whole = isinstance(model, PreTrainedModel) and not _is_adapter(model, inner)
    if whole and (before is None or is_of_transformers(before)):
        base = hub_name(inner)
        data = card_data(name or folder, type(inner).__name__, names, base_model=base if base != name else None)
        text, earlier = card_text(data, f"# {name or folder}", section), _TAGS.search(before or "")
        return _tagged(_TAGS.sub(lambda _: earlier[0], text, count=1) if earlier else text, add=tags)
    text = f"{(before or '').rstrip()}\n\n{section}\n" if earlier_section is None else _replaced(before or "", section)
    return _tagged(text, add=tags, remove=_section_tags(before))


def _section(
    model: nn.Module,
    inner: PreTrainedModel,
    encoding: PositionEncoding,
    name: str,
    base: str | None = None,
    *,
    named: bool,
) -> str:
    """Describes the scheme of a patched model in Markdown, between comments by which a save finds it again.

    It is written at every save, so it uses only what the patch has found. Examples load `name`, which later saves
    keep if it is `named`. `base` is the base model of an adapter.
    """
    class_name, adapter, report = type(inner).__name__, _is_adapter(model, inner), encoding.report
    assert report is not None
    adapters: Any = getattr(model, "peft_config", {}) if adapter else {}
    stated = (config.base_model_name_or_path for config in adapters.values())
    base = base or hub_name(inner) or next(filter(None, stated), None) or "the base model"
    outside: dict[str, str] = {}
    for scheme in walk(encoding.config):
        module = type(scheme).__module__
        if not module.startswith("hf_posenc."):
            outside[module] = f"{outside[module]}, {scheme.name}" if module in outside else scheme.name
    imports = [_IMPORT]
    for module, names in outside.items():
        here = f"# Here, run the code that registers: {names}."
        imports.append(here if module == "__main__" else f"import {module}  # registers {names}")
    package = f"the package [hf_posenc]({REPOSITORY})"
    importable = [module for module in outside if module != "__main__"]
    modules = ", ".join("the program that saved it" if module == "__main__" else f"`{module}`" for module in outside)
    source = f"from {modules}, which extends {package}" if outside else f"from {package}"
    loading = loading_section(name, class_name, imports=imports, base_model=base if adapter else None)
    layers = sum(len(stack.attention_layers) for stack in report.stacks)
    return "\n\n".join(
        (
            "<!-- hf_posenc: save_pretrained replaces everything up to the end of this section."
            f"{f' Name: {name}.' if named else ''} Tags: {', '.join(_card_tags(scheme_names(encoding.config)))} -->",
            f"## Position encoding\n\nThe position encoding of this `{class_name}` is `{encoding.config.label}`, "
            f"{source}.{f' Context: {report.context}.' if report.context else ''}",
            f"### Load it\n\n{loading}",
            f"### Programs that run it\n\n{_programs(inner, name, importable, adapter)}",
            f"### What was replaced\n\n{scheme_section(encoding.config.to_dict(), class_name)}\n\nThe scheme acts in "
            f"{layers} attention layers and has {report.new_parameters} parameters. "
            f"`print(model.position_encoding.report)` lists each place.\n\n{versions_section()}",
            _END,
        )
    )


def _is_adapter(model: nn.Module, inner: PreTrainedModel) -> bool:
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
    return ModelCardData(
        model_name=model_id.rstrip("/").rsplit("/", 1)[-1],
        library_name=library_name,
        pipeline_tag=pipeline_tag(class_name),
        tags=list(dict.fromkeys((*_card_tags(names), *tags))),
        eval_results=list(eval_results) if eval_results else None,
        **{name: value for name, value in fields.items() if value is not None},
    )


def scheme_section(config: Mapping[str, Any], class_name: str) -> str:
    """Describes the scheme with every option, in Markdown."""
    options = json.dumps(dict(config), indent=2, ensure_ascii=False)
    replaced = f"replaced by `{config['scheme']}`"
    if config["scheme"] == PartsConfig.name:
        parts = zip(config["names"], config["schemes"], strict=True)
        replaced = "replaced " + " and ".join(f"in its {part} part by `{chosen['scheme']}`" for part, chosen in parts)
    return f"A stock `{class_name}` whose position encoding was {replaced}. All options:\n\n```json\n{options}\n```"


def _card_tags(names: Iterable[str]) -> list[str]:
    """The tags of every card, and those of schemes."""
    return list(dict.fromkeys((*TAGS, *(name.replace("_", "-") for name in names))))


def scheme_names(config: SchemeConfig) -> list[str]:
    """The name of a scheme, or those of the schemes of parts of a composite model."""
    return [scheme.name for scheme in config.schemes] if isinstance(config, PartsConfig) else [config.name]


def loading_section(
    path: str,
    class_name: str,
    *,
    patched: bool = True,
    tokenizer: bool = False,
    imports: Sequence[str] = (_IMPORT,),
    base_model: str | None = None,
) -> str:
    """Describes how to load a saved model, and what happens without the package, in Markdown.

    Args:
        path: hub id or folder.
        class_name: class of the model.
        patched: whether it has a scheme of this package; a stock model needs no import.
        tokenizer: whether its tokenizer is saved with it.
        imports: lines of code that register the scheme.
        base_model: hub id or folder of the base model, if an adapter is saved.
    """
    names = ["AutoTokenizer", class_name] if tokenizer else [class_name]
    lines = [*imports] if patched else []
    lines += ["from peft import PeftModel"] if base_model else []
    lines += [f"from transformers import {', '.join(names)}", ""]
    lines += [f'base = {class_name}.from_pretrained("{base_model}")'] if base_model else []
    load = "PeftModel.from_pretrained(base, " if base_model else f"{class_name}.from_pretrained("
    lines += [f'model = {load}"{path}")']
    lines += [f'tokenizer = AutoTokenizer.from_pretrained("{path}")'] if tokenizer else []
    lines += ["print(model.position_encoding.config)"] if patched else []
    code = "\n".join(["```python", *lines, "```"])
    if not patched:
        return code
    needs = (
        "The scheme is saved next to the adapter: a stock base model is patched when the adapter is loaded, and a "
        "different base model is refused."
        if base_model
        else f"It needs the package `hf-posenc` (`{INSTALL}`)."
    )
    return f"{code}\n\n{needs} Without the import, loading stops with an error."


def _programs(model: PreTrainedModel, name: str, own_modules: Sequence[str], adapter: bool = False) -> str:
    """Describes which programs run a patched checkpoint of some name, or an adapter, and what to do for others.

    `own_modules` register schemes that are not those of this package.
    """
    command = "hf-posenc" + "".join(f" --import {module}" for module in own_modules)
    lines = [
        f"Programs that are built on transformers, if they import `{'`, `'.join(('hf_posenc', *own_modules))}` first: "
        "`Trainer`, pipelines, PEFT, TRL, sentence-transformers and others. "
        f"`{command} run -- COMMAND` starts a program in this way."
    ]
    quoted = shlex.quote(name)
    export = f"{command} export {quoted} --to TARGET --output DIR"
    if adapter:
        export += " --merge-adapters"
    elif model.can_generate():
        kind, problem = unsupported_kind(model.config), engine_problem(model, VLLM)
        lines += [
            f"`{command} serve {quoted}`: a server with an OpenAI-compatible API.",
            f"`vllm serve {quoted}`, if `hf_posenc` is installed next to vLLM."
            if not kind and not problem
            else f"vLLM does not run it: {problem or kind}.",
        ]
    lines.append(
        "Programs without hf_posenc can run an export, if they can express the scheme: plain transformers (`--to "
        "stock` or, with `trust_remote_code=True`, `--to remote_code`), llama.cpp (`--to gguf`), ONNX Runtime (`--to "
        f"onnx`), ExecuTorch (`--to executorch`). `{export}` writes it."
    )
    lines.append(
        "Other programs refuse this checkpoint, except those that load its weights without reading its `config.json`: "
        "they would run it with stock positions."
    )
    return "\n".join(f"- {line}" for line in lines)


def versions_section() -> str:
    """Returns the versions of the packages in this process that decide what a model does, in Markdown."""
    loaded = (sys.modules.get(name) for name in ("torch", "transformers", "peft"))
    lines = [f"- {module.__name__} {module.__version__}" for module in loaded if module is not None]
    return "\n".join([f"- hf_posenc {__version__}", *lines])


def pipeline_tag(class_name: str) -> str | None:
    """Returns the hub task of a model class, such as "text-generation"; `None` for a base model."""
    return next((task for task, names in TASK_MAPPING.items() if class_name in names.values()), None)


def hub_name(model: PreTrainedModel) -> str | None:
    """Returns the hub id that the model was loaded from, `owner/name` or a bare name; `None` for a path."""
    name = str(getattr(model, "name_or_path", "") or "")
    is_path = name.startswith((".", "/", "~")) or "\\" in name or name.count("/") > 1 or Path(name).exists()
    return None if not name or is_path else name


def _read(path: Path) -> str | None:
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    data = path.read_bytes() if path.is_file() else None
    if data is not None and b"\0" in data:  # as in UTF-16
        raise OSError(errno.EILSEQ, "not in UTF-8")
    # Bytes of other encodings survive.
    return None if data is None else data.decode(errors="surrogateescape")


def _replaced(text: str, section: str) -> str:
    """The text with the section in place of its first one. Others, such as those of a pasted card, are removed."""
    start, *rest = _SECTION.split(text)
    after = "".join(rest[_SECTION.groups :: _SECTION.groups + 1])
    if section:
        return f"{start}{section}{after}"
    return f"{start.rstrip()}\n\n{after.lstrip()}".rstrip("\n") + "\n"


def _section_tags(text: str | None) -> list[str]:
    """The tags that came with the sections in a card."""
    return [tag for section in _SECTION.finditer(text or "") for tag in section["tags"].split(", ")]


def _tagged(text: str, add: Iterable[str] = (), remove: Iterable[str] = ()) -> str:
    """Changes the tags in the metadata of a card, and nothing else in it.

    Metadata in which they cannot be replaced is left as it is, such as metadata that is not YAML.
    """
    match = _METADATA.match(text)
    metadata = match[1] if match else ""
    try:
        fields = yaml.safe_load(metadata) or {}
        tags = fields.get("tags") or []
        before = tags if isinstance(tags, list) else [tags]
        removed = set(remove) - set(add)
        after = list(dict.fromkeys([*(tag for tag in before if tag not in removed), *add]))
        if after == before:
            return text
        line = yaml.safe_dump({"tags": after}, allow_unicode=True, width=float("inf")) if after else ""
        old = _TAGS.search(metadata)
        start, end = old.span() if old else (len(metadata), len(metadata))
        metadata = f"{metadata[:start]}{line}{metadata[end:]}"
        fields = {name: value for name, value in fields.items() if name != "tags"} | ({"tags": after} if after else {})
        if yaml.safe_load(metadata) not in (fields, None):
            return text
    except (yaml.YAMLError, AttributeError, TypeError):
        return text
    if match:
        return f"{text[: match.start(1)]}{metadata}{text[match.end(1) :]}" if metadata else text[match.end() :].lstrip()
    return f"---\n{metadata}---\n\n{text.lstrip()}"
