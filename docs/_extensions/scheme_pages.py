"""A page with figures for every registered scheme, and their index: docs/reference/schemes/, not committed.

The text of a page is the docstring of the scheme's config. This extension adds what a docstring cannot know: figures,
numbers of parameters, what the parts do when they are tried, and what was measured.
"""

from __future__ import annotations

import dataclasses
import hashlib
import shutil
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import torch
from repository_files import write_if_changed
from scheme_facts import facts
from scheme_results import results
from sphinx.application import Sphinx
from sphinx.util.display import status_iterator

import hf_posenc
from hf_posenc.cli.catalogue import summary
from hf_posenc.plots.schemes import FigureKind, Subject, applicable_kinds, draw_kind, kind_named, subject_of
from hf_posenc.plots.schemes.subject import standard_places
from hf_posenc.plots.style import save
from hf_posenc.schemes import CrossAttentionConfig, NativeConfig, PartsConfig, SchemeConfig, registered_configs
from hf_posenc.schemes.rotary.contextual import ContextualRotation

FOLDER = "reference/schemes"
#: The options of the schemes that have required ones, or whose defaults show little.
OPTIONS: dict[str, dict[str, Any]] = {
    "composed": {"parts": ("sinusoidal", "alibi")},
    "cross_attention": {"cross": "alibi"},
    "mrope": {"interleaved": True},
    "position_shift": {"offset": 32},
    "schedule": {"layers": ("rope", "rope", "alibi", "none")},
}
#: Figures beyond the first two kinds that apply.
MORE_FIGURES = {
    "rope": (("frequencies", {"scaling": hf_posenc.YarnScaling(factor=4.0, original_max_positions=2048)}),),
    "sinusoidal": (("dimensions", {}), ("difference", {})),
}
GROUPS = ("No positions", "Added to the embeddings", "Bias on the attention logits", "Queries and keys",
          "Temperature of the logits", "Other positions for another scheme", "Arrangements of schemes")  # fmt: skip


def pages() -> list[type[SchemeConfig]]:
    """The schemes that have a page.

    "native", "parts" and "cross_attention" have none: they only say which schemes are where in a model.
    """
    own = [one for one in registered_configs() if one.__module__.startswith("hf_posenc.")]
    return [one for one in own if one not in (NativeConfig, PartsConfig, CrossAttentionConfig)]


@cache
def drawn(config_class: type[SchemeConfig]) -> Subject:
    """The scheme as its page shows it."""
    return subject_of(config_class.from_options(OPTIONS.get(config_class.name, {})))


def figures(config_class: type[SchemeConfig]) -> Iterator[tuple[FigureKind, Subject]]:
    """The figures of a page, the most telling one first."""
    subject = drawn(config_class)
    yield from ((kind, subject) for kind in applicable_kinds(subject)[:2])
    for kind, options in MORE_FIGURES.get(config_class.name, ()):
        yield kind_named(kind), subject_of(config_class(**options))


def group_of(subject: Subject) -> str:
    """The heading of the index under which a scheme stands."""
    if subject.config.combinator:
        return GROUPS[6]
    if {"position_map", "distance_map"} & {kind.name for kind in applicable_kinds(subject)}:
        return GROUPS[5]
    if isinstance(subject.parts.logit_bias, ContextualRotation):
        return GROUPS[3]
    # A scheme with several parts stands under the one that matters most.
    order = {"query_key_map": 3, "logit_bias": 2, "additive": 1, "logit_scale": 4}
    return GROUPS[next((group for part, group in order.items() if getattr(subject.parts, part) is not None), 0)]


def use(config_class: type[SchemeConfig]) -> str:
    """Code that patches a model with the scheme."""
    name = config_class.name
    around = next(
        (one.name for one in dataclasses.fields(config_class) if one.name in ("inner", "segment", "local")), None
    )
    options = {around: "native"} if around else {}
    options |= {} if name == "mrope" else OPTIONS.get(name, {})
    scheme = f'["native", "{name}"]' if group_of(drawn(config_class)) == GROUPS[4] else f'"{name}"'
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
## Runtimes, cost and results

{results(name)}

## Definition and options

```{{eval-rst}}
.. autoclass:: hf_posenc.{config_class.__name__}
```

## Facts

{listed}

## More figures

{"".join(shown[1:])}
All kinds of figures for it: {kinds} (`hf-posenc plot` or {{py:func}}`hf_posenc.plots.plot_scheme`).
"""


def index(config_classes: list[type[SchemeConfig]], thumbnails: dict[str, str]) -> str:
    """The index of all schemes, with a figure of each."""
    arranged = sum(one.combinator for one in config_classes)
    place = standard_places()[0]
    sections = [
        "# Schemes",
        f"{len(config_classes) - arranged} schemes by what they act on, and {arranged} arrangements, which only say "
        "where other schemes act. "
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
    for dark in (False, True):
        path = folder / f"{stem}{'_dark' * dark}.svg"
        if not path.is_file():
            save(draw_kind(kind, subject, dark), path)
    sentences = [kind.caption_of(subject), subject.place_note, subject.note]
    if (label := subject.config.label) != subject.config.name:
        sentences.insert(1, f"Drawn: `{label}`.")
    alternative = f":alt: {subject.config.name}, {kind.summary}"
    return (
        f"```{{figure}} figures/{stem}.svg\n{alternative}\n\n{' '.join(filter(None, sentences))}\n```\n\n",
        f"```{{image}} figures/{stem}.svg\n{alternative}\n```\n\n",
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
