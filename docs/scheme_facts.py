"""What a scheme's page says besides its docstring: options, facts, use."""

from __future__ import annotations

import dataclasses
import inspect
from pathlib import Path

import torch
from scheme_docstrings import linked, options, table_cell
from scheme_pages import Page, default_config

from hf_posenc.plots.schemes import Subject, applicable_kinds, subject_of
from hf_posenc.plots.schemes.probes import added_bias, visible
from hf_posenc.plots.schemes.subject import standard_places
from hf_posenc.report.tables import markdown_table
from hf_posenc.schemes import BuildContext, PairwiseBias, Positions, SchemeConfig, SchemeParts
from hf_posenc.schemes.arrangement.schedule import LayeredConfig
from hf_posenc.schemes.parts import SeparableBias

ROOT = Path(__file__).resolve().parent.parent
#: Where learned parameters are counted: the sizes of BERT-base and GPT-2 small.
COUNTED_LAYERS = 12
COUNTED_PLACE = BuildContext(hidden_size=768, num_heads=12, head_dim=64, max_positions=512, num_key_value_heads=12)


def options_text(config_class: type[SchemeConfig]) -> str:
    """The table of options."""
    found = options(config_class)
    if not found:
        return "None."
    cells = [
        (f"`{option.name}`", f"`{table_cell(option.type)}`", table_cell(option.default), table_cell(option.meaning))
        for option in found
    ]
    return markdown_table(("option", "type", "default", "meaning"), cells)


def facts_text(page: Page) -> str:
    """Where the scheme acts, what it learns, and what it demands of a model."""
    config = page.subject.config
    facts = [f"Config class: `hf_posenc.{page.config_class.__name__}`, in {_source_link(page.config_class)}."]
    if isinstance(config, LayeredConfig):
        facts.append("Acts on: whatever the schemes of its layers act on. It has no parameters of its own.")
        return _bullets(facts)
    parts = page.subject.parts
    facts.append(f"Acts on: {acts_on(parts)}.")
    facts.append(_parameters_text(config))
    decay_free = sorted({name for part in parts for module in part.modules() for name in _no_weight_decay(module)})
    if decay_free:
        facts.append(f"Trained without weight decay: {', '.join(f'`{name}`' for name in decay_free)}.")
    refusal = _bidirectional_refusal(config)
    facts.append(
        "Causal and bidirectional models."
        if refusal is None
        else f"Causal models only. Elsewhere it raises: {linked(refusal)}"
    )
    if any(part.length_dependent for part in parts):
        facts.append(
            "The encoding of a token depends on the length of the sequence, so a cache can be extended only where that "
            "does not change the tokens in it; anything else raises."
        )
    bias = parts.logit_bias
    if isinstance(bias, PairwiseBias):
        how = (
            "is one number per key, less that of the query's own token"
            if isinstance(bias, SeparableBias)
            else "is computed for every pair of tokens"
        )
        facts.append(f"The bias reads {_what_a_bias_reads(page.subject)}, and {how}.")
        if bias.num_features:
            facts.append(f"Cached beside each key: {bias.num_features} number(s) per head.")
    elif bias is not None:
        facts.append("The bias is a function of distance alone, and is computed once per distance.")
    return _bullets(facts)


def _what_a_bias_reads(subject: Subject) -> str:
    """In words, which inputs change the bias: each is replaced while the others stay."""
    length = 24
    query, key, hidden = subject.random_heads(length, seed=1)
    other_query, other_key, other_hidden = subject.random_heads(length, seed=2)
    inputs = {
        "positions": (query, key, hidden),
        "queries": (other_query, key, hidden),
        "keys": (query, other_key, hidden),
        "hidden states": (query, key, other_hidden),
    }

    def biases(ids: torch.Tensor, *tensors: torch.Tensor) -> torch.Tensor:
        positions = Positions(ids.unsqueeze(0), ids[-1:].unsqueeze(0) + 1, token_ids=ids.unsqueeze(0) % 16)
        return added_bias(subject, positions, *tensors)[..., visible(subject, length)]

    found = []
    for name, tensors in inputs.items():
        # Near and far positions: a bias may act on one of them only.
        for step in (1, 20, 200):
            ids = torch.arange(length) * step
            changed = ids + (torch.arange(length) >= length // 2) * step if name == "positions" else ids
            if not torch.allclose(biases(ids, query, key, hidden), biases(changed, *tensors), rtol=1e-3, atol=1e-3):
                found.append(name)
                break
    if "positions" not in found:
        found.append("the order of the tokens")
    return " and ".join(filter(None, (", ".join(found[:-1]), found[-1])))


def acts_on(parts: SchemeParts) -> str:
    """In words, what the parts act on."""
    named = (
        (parts.additive, "the token embeddings (added)"),
        (parts.query_key_map, "queries and keys (mapped by their position)"),
        (parts.logit_bias, "the attention logits (bias)"),
        (parts.logit_scale, "the attention logits (factor per query)"),
    )
    return ", ".join(words for part, words in named if part is not None) or "nothing"


def _parameters_text(config: SchemeConfig) -> str:
    first_refusal: ValueError | None = None
    for place in standard_places(COUNTED_PLACE):
        try:
            parts = config.build(place)
        except ValueError as refusal:
            first_refusal = first_refusal or refusal
            continue
        shapes = {name: parameter for part in parts for name, parameter in part.named_parameters()}
        if not shapes:
            return "Learned parameters: none."
        additive = sum(parameter.numel() for parameter in parts.additive.parameters()) if parts.additive else 0
        total = sum(parameter.numel() for part in parts for parameter in part.parameters())
        copies = COUNTED_LAYERS if config.per_layer else 1
        count = additive + copies * (total - additive)
        owner = f"each of the {COUNTED_LAYERS} layers owns its own" if copies > 1 else "shared by all layers"
        described = ", ".join(f"`{name}` {tuple(parameter.shape)}" for name, parameter in shapes.items())
        return (
            f"Learned parameters: {count:,} in a model of hidden size {place.hidden_size}, {place.num_heads} heads of "
            f"{place.head_dim} dimensions, {COUNTED_LAYERS} layers and {place.max_positions} positions ({owner}: "
            f"{described})."
        )
    assert first_refusal is not None
    raise first_refusal


def _no_weight_decay(module: torch.nn.Module) -> set[str]:
    """The names that exist: some are learned only where an option says so."""
    learned = {name for name, _ in module.named_parameters(recurse=False)}
    return learned & getattr(module, "no_weight_decay", frozenset())


def _bidirectional_refusal(config: SchemeConfig) -> str | None:
    place = dataclasses.replace(subject_of(config).context, causal=False)
    try:
        config.build(place)
    except ValueError as refusal:
        return str(refusal)
    return None


def use_text(page: Page) -> str:
    """How to patch a model with the scheme, alone and with others."""
    sentences = [_native_hint(page)]
    if isinstance(page.subject.config, LayeredConfig):
        sentences.append(
            "It is an arrangement of layers: composing happens inside its layers, each of which takes any other scheme "
            "or a list of schemes."
        )
    else:
        sentences.append(_composition_hint(page))
    sentences.append(f"Options are the fields of `hf_posenc.{page.config_class.__name__}`.")
    if any(_no_weight_decay(module) for part in page.subject.parts for module in part.modules()):
        sentences.append(
            "`Trainer` decides by name what it decays; for the parameters trained without weight decay, hand it "
            "`optimizers=(torch.optim.AdamW(hf_posenc.recipes.parameter_groups(model, 0.1), lr=3e-4), None)`."
        )
    code = "\n".join(["import hf_posenc", "from hf_posenc import patch_model", "", *_examples(page)])
    return f"```python\n{code}\n```\n\n{' '.join(filter(None, sentences))}"


def _examples(page: Page) -> list[str]:
    """Calls of `patch_model`, the one that most people want first."""
    options, layered = _native_options(page.config_class), isinstance(page.subject.config, LayeredConfig)
    if _is_scale(page):
        return [
            f'model = patch_model(model, ["native", "{page.name}"])  # with the positions the model has',
            f'model = patch_model(model, ["rope", "{page.name}"])  # with another scheme',
            f'model = patch_model(model, ["native", "{page.name}"], layers=[0, 1])',
        ]
    if options:
        shown = _changed(page.subject.config) | options
        arguments = "".join(f", {name}={_value_code(shown[name])}" for name in dict.fromkeys([*options, *shown]))
        alone = f'"{page.name}"{arguments}'
        inside = f"hf_posenc.{page.config_class.__name__}({arguments.removeprefix(', ')})"
    else:
        alone = inside = f'"{page.name}"'
        if default_config(page.config_class) is None:
            alone = inside = f"hf_posenc.{_code(page.subject.config)}"
    needs = "  # needs config.layer_types: Gemma 3, Cohere 2" if page.name == "local_global" else ""
    lines = [f"model = patch_model(model, {alone}){needs}"]
    if layered:
        return lines
    if "inner" in options:
        lines.append(lines[0].replace('inner="native"', 'inner="alibi"'))
    if not page.config_class.combinator and page.name != "none":
        lines.append(f'model = patch_model(model, [{inside}, "{_companion(page)}"])  # with another scheme')
        if page.subject.parts.additive is None:
            lines.append(f'model = patch_model(model, {alone}, layers=[0, 1], elsewhere="none")')
    return lines


def _native_options(config_class: type[SchemeConfig]) -> dict[str, str]:
    """The option of a scheme around another one which is the model's own in most uses."""
    fields = {field.name: field for field in dataclasses.fields(config_class)}
    for option in ("inner", "segment", "local"):
        if option in fields and "SchemeConfig" in str(fields[option].type):
            return {option: "native"}
    return {}


def _native_hint(page: Page) -> str:
    """What happens to the positions that the model already has."""
    for option in _native_options(page.config_class):
        default = getattr(default_config(page.config_class) or page.subject.config, option)
        return (
            f'With `{option}="native"` the model keeps its own scheme there. The default is `{default.name}` with '
            f"theta {default.theta:g}, whatever the model was trained with."
        )
    if _is_scale(page):
        return (
            f'The name alone, `patch_model(model, "{page.name}")`, replaces the positions the model has, so none are '
            "left."
        )
    return ""


def _is_scale(page: Page) -> bool:
    return list(page.subject.parts) == [page.subject.parts.logit_scale]


def _companion(page: Page) -> str:
    other = "alibi" if page.name != "alibi" and page.subject.parts.logit_bias is None else "rope"
    return "sinusoidal" if page.subject.parts.query_key_map is not None and other == "rope" else other


def _composition_hint(page: Page) -> str:
    parts = page.subject.parts
    if page.config_class.combinator:
        return 'A list does the same: `patch_model(model, ["sinusoidal", "alibi"])`. Compositions do not nest.'
    if parts.query_key_map is not None:
        hint = "It maps queries and keys, which one scheme of a composition may do. Added vectors, biases and scales go"
        if parts.query_key_map.width_factor != 1:
            return f"{hint} with it, but for biases that read queries or keys: it changes the width of a head."
        return f"{hint} with it."
    if not list(parts):
        return "There is nothing to compose: any other scheme takes its place."
    return "It goes with any other scheme: added vectors and biases sum, scales multiply."


def command_text(page: Page) -> str:
    """How to draw all kinds of figures."""
    kinds = ", ".join(f"`{kind.name}`" for kind in applicable_kinds(page.subject))
    if default_config(page.config_class) is None:
        return (
            f"Kinds of figures that apply to this example: {kinds}. `hf_posenc.plots.schemes.plot_scheme` draws them."
        )
    return f"`hf-posenc plot {page.name}` draws every kind that applies: {kinds}."


def _code(config: SchemeConfig) -> str:
    """The config as an expression, with the options that differ from their defaults."""
    arguments = [f"{name}={_value_code(value)}" for name, value in _changed(config).items()]
    return f"{type(config).__name__}({', '.join(arguments)})"


def _changed(config: SchemeConfig) -> dict[str, object]:
    """The options that differ from their defaults."""
    default = default_config(type(config))
    values = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    return {name: value for name, value in values.items() if default is None or value != getattr(default, name)}


def _value_code(value: object) -> str:
    if isinstance(value, SchemeConfig):
        return f"hf_posenc.{_code(value)}"
    if isinstance(value, tuple):
        return "(" + ", ".join(_value_code(item) for item in value) + ("," if len(value) == 1 else "") + ")"
    return f'"{value}"' if isinstance(value, str) else repr(value)


def _source_link(config_class: type[SchemeConfig]) -> str:
    source = Path(inspect.getfile(config_class)).resolve().relative_to(ROOT).as_posix()
    return f"[{source}](../../{source})"


def _bullets(items: list[str]) -> str:
    return "\n".join(f"- {item}" for item in items)
