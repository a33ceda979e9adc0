"""A page with figures for every registered scheme, and their index: docs/reference/schemes/, not committed.

The text of a page is the docstring of the scheme's config. This extension adds what a docstring cannot know: figures,
numbers of parameters, and what the parts do when they are tried.
"""

from __future__ import annotations

import dataclasses
import hashlib
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from repository_files import write_if_changed
from sphinx.application import Sphinx
from sphinx.util.display import status_iterator

import hf_posenc
from hf_posenc.cli.catalogue import summary
from hf_posenc.plots.schemes import FigureKind, Subject, applicable_kinds, draw_kind, kind_named, subject_of
from hf_posenc.plots.schemes.probes import added_bias, visible
from hf_posenc.plots.schemes.subject import standard_places
from hf_posenc.plots.style import styled
from hf_posenc.schemes import BuildContext, NativeConfig, PairwiseBias, Positions, SchemeConfig, registered_configs
from hf_posenc.schemes.arrangement.schedule import LayeredConfig
from hf_posenc.schemes.labels import scheme_label

FOLDER = "reference/schemes"
#: Where learned parameters are counted: the sizes of BERT-base and GPT-2 small.
COUNTED_LAYERS = 12
COUNTED_PLACE = BuildContext(hidden_size=768, num_heads=12, head_dim=64, max_positions=512, num_key_value_heads=12)
#: The options of the schemes that have required ones, or whose defaults show little.
OPTIONS: dict[str, dict[str, Any]] = {
    "composed": {"parts": ("sinusoidal", "alibi")},
    "mrope": {"interleaved": True},
    "position_shift": {"offset": 32},
    "schedule": {"layers": ("rope", "rope", "alibi", "none")},
}
#: Figures beyond the first two kinds that apply.
MORE_FIGURES = {
    "rope": (("frequencies", {"scaling": hf_posenc.YarnScaling(factor=4.0, original_max_positions=2048)}),),
    "sinusoidal": (("dimensions", {}), ("difference", {})),
}
ACTS_ON = {
    "additive": "the token embeddings",
    "query_key_map": "queries and keys",
    "logit_bias": "the attention logits",
    "logit_scale": "the temperature of the attention logits",
}
GROUPS = ("No positions", "Other positions for another scheme", "Queries and keys", "Bias on the attention logits",
          "Added to the embeddings", "Temperature of the logits", "Arrangements of schemes")  # fmt: skip


def pages() -> list[type[SchemeConfig]]:
    """The schemes that have a page. "native" has none, because it stands for the scheme of a model."""
    return [one for one in registered_configs() if one.__module__.startswith("hf_posenc.") and one is not NativeConfig]


def drawn(config_class: type[SchemeConfig], **options: Any) -> Subject:
    """The scheme as the figures of its page show it."""
    return subject_of(config_class.from_options(OPTIONS.get(config_class.name, {}) | options))


def figures(config_class: type[SchemeConfig]) -> Iterator[tuple[FigureKind, Subject]]:
    """The figures of a page, the most telling one first."""
    subject = drawn(config_class)
    yield from ((kind, subject) for kind in applicable_kinds(subject)[:2])
    for kind, options in MORE_FIGURES.get(config_class.name, ()):
        yield kind_named(kind), drawn(config_class, **options)


def group_of(subject: Subject) -> str:
    """The heading of the index under which a scheme stands."""
    if subject.config.combinator:
        return GROUPS[6]
    if {"position_map", "distance_map"} & {kind.name for kind in applicable_kinds(subject)}:
        return GROUPS[1]
    order = ("query_key_map", "logit_bias", "additive", "logit_scale")
    return next(
        (GROUPS[2 + at] for at, part in enumerate(order) if getattr(subject.parts, part) is not None), GROUPS[0]
    )


def facts(subject: Subject) -> list[str]:
    """What is found out by building the scheme and trying its parts."""
    config, parts = subject.config, subject.parts
    if isinstance(config, LayeredConfig):
        return ["Acts on what the schemes of its layers act on, and adds no parameters."]
    acts_on = [words for part, words in ACTS_ON.items() if getattr(parts, part) is not None]
    found = [f"Acts on: {', '.join(acts_on) or 'nothing'}.", f"Learned parameters: {_parameters(config)}."]
    if undecayed := _undecayed(subject):
        found.append(f"Trained without weight decay, with `hf_posenc.recipes.parameter_groups`: {undecayed}.")
    try:
        config.build(dataclasses.replace(subject.context, causal=False))
        found.append("For causal and bidirectional models.")
    except ValueError as refusal:
        found.append(f"For causal models only: {refusal}")
    if any(part.length_dependent for part in parts):
        found.append("The encoding of a token depends on the length of the sequence, which limits the use of a cache.")
    if isinstance(parts.logit_bias, PairwiseBias):
        found.append(f"The bias depends on {_bias_inputs(subject)}.")
    elif parts.logit_bias is not None:
        found.append("The bias depends on distance only, and is computed once per distance.")
    return found


def _parameters(config: SchemeConfig) -> str:
    for place in standard_places(COUNTED_PLACE):
        try:
            parts = config.build(place)
            break
        except ValueError:
            continue
    shapes = {name: tuple(one.shape) for part in parts for name, one in part.named_parameters()}
    copies = COUNTED_LAYERS if config.per_layer else 1
    counts = [one.numel() * (1 if part is parts.additive else copies) for part in parts for one in part.parameters()]
    if not shapes:
        return "none"
    described = ", ".join(f"`{name}` {shape}" for name, shape in shapes.items())
    owner = "in each of 12 layers" if copies > 1 else "shared by all layers"
    return (
        f"{sum(counts):,} ({described}, {owner}; hidden size {place.hidden_size}, {place.num_heads} heads of "
        f"{place.head_dim} dimensions, {place.max_positions} positions)"
    )


def _undecayed(subject: Subject) -> str:
    modules = [module for part in subject.parts for module in part.modules()]
    owned = {(name, module) for module in modules for name, _ in module.named_parameters(recurse=False)}
    return ", ".join(sorted({f"`{name}`" for name, module in owned if name in getattr(module, "no_weight_decay", ())}))


def _bias_inputs(subject: Subject) -> str:
    """Names the inputs that change the bias, by replacing one at a time."""
    length = 24
    usual, others = (subject.random_heads(length, seed=seed) for seed in (1, 2))

    def biases(ids: torch.Tensor, replaced: int | None = None) -> torch.Tensor:
        positions = Positions(ids.unsqueeze(0), ids[-1:].unsqueeze(0) + 1, token_ids=ids.unsqueeze(0) % 16)
        given = [(others if index == replaced else usual)[index] for index in range(3)]
        return added_bias(subject, positions, *given)[..., visible(subject, length)]

    found = dict.fromkeys(("positions", "queries", "keys", "hidden states"), False)
    # Near and far positions: a bias may act on one of them only.
    for step in (1, 20, 200):
        ids = torch.arange(length) * step
        shifted = biases(ids + (torch.arange(length) >= length // 2) * step)
        for name, one in zip(found, [shifted, *(biases(ids, index) for index in range(3))], strict=True):
            found[name] |= not torch.allclose(biases(ids), one, rtol=1e-3, atol=1e-3)
    names = [name for name in found if found[name]] + ([] if found["positions"] else ["the order of the tokens"])
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))


def use(config_class: type[SchemeConfig]) -> str:
    """Code that patches a model with the scheme."""
    name = config_class.name
    around = next(
        (one.name for one in dataclasses.fields(config_class) if one.name in ("inner", "segment", "local")), None
    )
    options = {around: "native"} if around else {}
    options |= {} if name == "mrope" else OPTIONS.get(name, {})
    scheme = f'["native", "{name}"]' if group_of(drawn(config_class)) == GROUPS[5] else f'"{name}"'
    if "layers" in options:
        # `patch_model` has an argument of this name.
        scheme, options = str({"scheme": name, **options}), {}
    call = ", ".join(["model", scheme, *(f"{option}={value!r}" for option, value in options.items())]).replace("'", '"')
    return f"from hf_posenc import patch_model, unpatch_model\n\npatch_model({call})\nunpatch_model(model)"


def page(config_class: type[SchemeConfig], shown: list[str], has_explorer: bool) -> str:
    """The page of a scheme, with the Markdown of its figures."""
    name, subject = config_class.name, drawn(config_class)
    listed = "\n".join(f"- {fact}" for fact in facts(subject))
    kinds = ", ".join(f"`{kind.name}`" for kind in applicable_kinds(subject))
    explorer = f' <a href="../../explorer/index.html#{name}">Try it in the explorer.</a>' if has_explorer else ""
    native = '\n\n`"native"` stands for the scheme that the model has.' if '"native"' in use(config_class) else ""
    return f"""# {name}

{summary(config_class)}{explorer}

```python
{use(config_class)}
```{native}

{"".join(shown[:1])}
## Definition and options

```{{eval-rst}}
.. autoclass:: hf_posenc.{config_class.__name__}
```

## Facts

{listed}

{"".join(shown[1:])}
All kinds of figures for it: {kinds} (`hf-posenc plot` or {{py:func}}`hf_posenc.plots.plot_scheme`).
"""


def index(config_classes: list[type[SchemeConfig]], thumbnails: dict[str, str]) -> str:
    """The index of all schemes, with a figure of each."""
    arranged = sum(one.combinator for one in config_classes)
    place = standard_places()[0]
    sections = [
        "# Schemes",
        f"{len(config_classes) - arranged} schemes and {arranged} arrangements of schemes, by what they act on. "
        f"Figures show a causal model of {place.num_heads} heads of {place.head_dim} dimensions before any training, "
        'unless a caption says otherwise. `"native"` stands for the scheme that a model has, and has no page.',
    ]
    for group in GROUPS:
        cards = [
            f":::{{grid-item-card}} {one.name}\n:link: {one.name}\n:link-type: doc\n\n{thumbnails[one.name]}"
            f"{summary(one)}\n:::"
            for one in config_classes
            if group_of(drawn(one)) == group
        ]
        sections += [f"## {group}", "::::{grid} 1 2 2 3\n:gutter: 3\n\n" + "\n".join(cards) + "\n::::"]
    names = "\n".join(one.name for one in config_classes)
    return "\n\n".join([*sections, f"```{{toctree}}\n:hidden:\n{names}\n```"]) + "\n"


def sources() -> str:
    """A digest of all code that figures depend on."""
    digest = hashlib.sha256(Path(__file__).read_bytes())
    for folder in ("schemes", "plots", "metrics"):
        for path in sorted((Path(hf_posenc.__file__).parent / folder).rglob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()


def draw(kind: FigureKind, subject: Subject, folder: Path, stem: str) -> tuple[str, str]:
    """Draws a figure, unless it is there; returns the Markdown that shows it in a page, and in the index."""
    path = folder / f"{stem}.svg"
    if not path.is_file():
        with styled():
            draw_kind(kind, subject).savefig(path, metadata={"Date": None})
    sentences = [kind.caption_of(subject), subject.place_note, subject.note]
    if (label := scheme_label(subject.config)) != subject.config.name:
        sentences.insert(1, f"Drawn: `{label}`.")
    alternative = f":alt: {subject.config.name}, {kind.summary}"
    return (
        f"```{{figure}} figures/{path.name}\n{alternative}\n\n{' '.join(filter(None, sentences))}\n```\n\n",
        f"```{{image}} figures/{path.name}\n{alternative}\n```\n\n",
    )


def write(app: Sphinx) -> None:
    """Writes the pages and the figures that are missing or older than the code that draws them."""
    torch.set_num_threads(1)
    folder = Path(app.srcdir) / FOLDER
    figure_folder = folder / "figures"
    stamp, digest = figure_folder / "sources.txt", sources()
    if not stamp.is_file() or stamp.read_text() != digest:
        shutil.rmtree(folder, ignore_errors=True)
        figure_folder.mkdir(parents=True)
        stamp.write_text(digest)
    has_explorer = (Path(app.srcdir) / "explorer" / "index.html").is_file()
    thumbnails: dict[str, str] = {}
    wanted = app.config.scheme_figures or [one.name for one in pages()]
    for config_class in status_iterator(pages(), "drawing schemes... ", length=len(pages()), stringify_func=str):
        name = config_class.name
        shown = [
            draw(kind, subject, figure_folder, f"{name}_{kind.name}")
            for kind, subject in (figures(config_class) if name in wanted else ())
        ]
        thumbnails[name] = shown[0][1] if shown else ""
        write_if_changed(folder / f"{name}.md", page(config_class, [one for one, _ in shown], has_explorer))
    write_if_changed(folder / "index.md", index(pages(), thumbnails))


def setup(app: Sphinx) -> dict[str, Any]:
    """Registers the extension."""
    # The names of the schemes whose figures are drawn; all if it is empty.
    app.add_config_value("scheme_figures", [], "env", types=(list,))
    app.connect("builder-inited", write)
    return {"parallel_read_safe": True}
