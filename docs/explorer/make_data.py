"""Writes the JSON files that the explorer reads, with the library.

    python docs/explorer/make_data.py
    python training/compare.py --tasks causal,masked --schemes t5,kerple,tisa,fire,learned --seeds 0 \
        --max_steps 600 --train_length 64 --save_models true --output_dir outputs/explorer
    python docs/explorer/make_data.py --trained outputs/explorer

The first command takes about a minute. It writes four files to `docs/explorer/data`:

- `options.json`: every registered scheme with its summary and group, and the name, type, default, limits and meaning of
  its options, from the config classes and their docstrings.
- `recorded.json`: what the library computes for the schemes that the page has no formula for (`recorded.py`).
- `tables.json`: what has no formula: seeded initial weights, and part of the position table of a pretrained MiniLM.
- `dog_minilm.json`: the distance between the two dogs in each layer of the pretrained MiniLM, with each scheme.

The third command reads the models that the second one trained, and writes `trained.json`. A new scheme of the library
is in the explorer after the first command. It gets sliders with a name in `FORMULAS` and a file in
`docs/explorer/schemes`.
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import itertools
import json
import re
import sys
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from torch import Tensor

from docs.explorer.recorded import HEADS, LENGTH, entry, needs_scheme
from hf_posenc.cli.catalogue import REQUIRED, meanings_of, summary
from hf_posenc.errors import UnknownNameError, UnsupportedError
from hf_posenc.metrics.dog import SENTENCE
from hf_posenc.plots.schemes.subject import subject_of
from hf_posenc.schemes import (
    BuildContext,
    CrossAttentionConfig,
    NativeConfig,
    PartsConfig,
    SchemeConfig,
    get_scheme,
    registered_configs,
)
from hf_posenc.schemes.arrangement.schedule import LayeredConfig
from hf_posenc.schemes.config import SubConfig
from hf_posenc.schemes.rotary.contextual import ContextualRotation
from hf_posenc.schemes.rotary.scaling import RopeScaling
from hf_posenc.schemes.validation import kind_of

DATA = Path(__file__).resolve().parent / "data"
#: Schemes with a formula in `docs/explorer/schemes`; the library computes the pictures of all others.
FORMULAS = (
    *("none", "integer", "normalized_integer", "binary", "sinusoidal", "learned"),
    *("alibi", "t5", "kerple", "sandwich", "tisa", "fire"),
    *("rope", "p_rope", "hope", "xpos"),
    *("self_extend", "rerope", "dual_chunk", "position_scale", "composed"),
)
#: Every scheme with a page in the reference. The other two stand for the schemes of a model.
SCHEMES = tuple(
    one.name for one in registered_configs() if one not in (NativeConfig, PartsConfig, CrossAttentionConfig)
)
#: What a scheme acts on, in the order of the page's list.
GROUPS = {
    "none": "No positions",
    "added": "Added to the words",
    "bias": "Added to the attention",
    "rotation": "Changes queries and keys",
    "scale": "Changes the temperature",
    "arrangement": "Changes other schemes",
}
SCALINGS = ("linear", "ntk", "dynamic", "yarn", "llama3", "longrope")
#: The place of the page: the widths of `hf_posenc.metrics.properties`, with up to 8 heads.
HIDDEN_SIZE, HEAD_DIM, MOST_HEADS = 64, 64, 8
#: Rows of learned tables, and entries of tables of buckets and bumps, at most.
TABLE_ROWS, MOST_BUCKETS, MOST_KERNELS = 64, 64, 8
DIGITS = 4
#: Schemes whose weights are trained for the page.
TRAINED = ("t5", "kerple", "tisa", "fire", "learned")
#: A small Llama, which sees earlier bytes, and a small BERT, which sees both sides.
TASKS = ("causal", "masked")
_ARXIV = re.compile(r"arXiv:(\d{4}\.\d{4,5})")
#: Options that differ between layers only, or that the page has no room for.
_LEFT_OUT = {"shared", "learnable", "inverse_frequencies", "partial_rotary_factor", "mscale", "mscale_all_dim"}


def option_entries(config_class: type[Any]) -> list[dict[str, Any]]:
    """The options of a config: name, type, default, choices or limits, and the meaning from the docstring."""
    meanings = _all_meanings(config_class)
    entries = []
    for field in dataclasses.fields(config_class):
        if field.name in _LEFT_OUT:
            continue
        default = REQUIRED if field.default is dataclasses.MISSING else field.default
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        entries.append(
            {
                "name": field.name,
                "type": kind_of(field),
                "default": default.name if isinstance(default, SchemeConfig) else default,
                **allowed_values(config_class, field.name),
                "meaning": meanings[field.name].replace("`", ""),
            }
        )
    return entries


def allowed_values(config_class: type[Any], option: str) -> dict[str, Any]:
    """The choices or the limits of an option, read from the error for a value that cannot be right."""
    fields = {field.name: kind_of(field) for field in dataclasses.fields(config_class)}
    required = {name: (2.0,) if fields[name].startswith("tuple") else 2 for name in _required(config_class)}
    try:
        config_class(**required | {option: "@"})
    except UnknownNameError as error:
        # Options that are schemes accept the name of any scheme.
        return {} if option == "scaling" or "SchemeConfig" in fields[option] else {"choices": error.known}
    except ValueError as error:
        limits = re.findall(r"(at least|greater than|at most) (-?\d+(?:\.\d+)?(?:e[+-]?\d+)?)", str(error))
        names = {"at least": "minimum", "greater than": "above", "at most": "maximum"}
        return {names[words]: float(number) for words, number in limits}
    raise AssertionError(f"{config_class.__name__}.{option} accepts any text.")


def scheme_entry(name: str) -> dict[str, Any]:
    """Everything that the page says of a scheme and that the library knows."""
    config_class = get_scheme(name)
    text = inspect.getdoc(config_class) or ""
    papers = _ARXIV.findall(text.split("\n\n")[0]) or _ARXIV.findall(text)
    entry = {
        "summary": summary(config_class).replace("`", ""),
        "formula": _formula(text),
        "paper": papers[0] if papers else None,
        "group": group_of(config_class),
        "formulas": name in FORMULAS,
        "causal_only": _causal_only(name),
        "options": option_entries(config_class),
    }
    return {key: value for key, value in entry.items() if value not in (None, "", False)}


def options_data() -> dict[str, Any]:
    """The content of `options.json`."""
    return {
        "place": {
            "hidden": HIDDEN_SIZE,
            "headDim": HEAD_DIM,
            "mostHeads": MOST_HEADS,
            "tableRows": TABLE_ROWS,
            "mostBuckets": MOST_BUCKETS,
            "mostKernels": MOST_KERNELS,
        },
        "groups": GROUPS,
        "schemes": {name: scheme_entry(name) for name in sorted(SCHEMES, key=_rank)},
        "scalings": {
            kind: {
                "summary": summary(RopeScaling.type_named(kind)).replace("`", ""),  # type: ignore[arg-type]
                "options": option_entries(RopeScaling.type_named(kind)),
            }
            for kind in SCALINGS
        },
    }


def group_of(config_class: type[SchemeConfig]) -> str:
    """What a scheme acts on: a key of `GROUPS`. One with several parts stands under the one that matters most."""
    if needs_scheme(config_class):
        return "arrangement"
    parts = subject_of(config_class.from_options({}), None).parts
    if parts.query_key_map is not None or isinstance(parts.logit_bias, ContextualRotation):
        return "rotation"
    order = {"bias": parts.logit_bias, "added": parts.additive, "scale": parts.logit_scale}
    return next((group for group, part in order.items() if part is not None), "none")


def recorded_data() -> dict[str, Any]:
    """The content of `recorded.json`: the examples of every scheme without a formula."""
    examples = {name: recorded_examples(name) for name in sorted(set(SCHEMES) - set(FORMULAS))}
    return {"sentence": SENTENCE, "heads": HEADS, "length": LENGTH, "schemes": examples}


def recorded_examples(name: str) -> dict[str, Any]:
    """The examples of a scheme: chosen options, and every option with choices at its other values."""
    choices = {
        one["name"]: [value for value in one.get("choices", (False, True)) if value != one["default"]]
        for one in option_entries(get_scheme(name))
        if "choices" in one or one["type"] == "bool"
    }
    return entry(name, choices)


def tables_data() -> dict[str, Any]:
    """The content of `tables.json`: initial weights after `torch.manual_seed(0)`, and rows of MiniLM's table."""
    learned = initial_parameters("learned", num_positions=TABLE_ROWS)["weight"]
    buckets = initial_parameters("t5", num_buckets=MOST_BUCKETS)["weight"]
    kerple = initial_parameters("kerple")
    deviation = BuildContext(HIDDEN_SIZE, 1, HEAD_DIM).initializer_range
    return {
        "source": "The library's initialization after torch.manual_seed(0). Tables that start from a normal "
        "distribution are stored in units of its standard deviation.",
        "integer": {
            "random": rounded(get_scheme("integer")(direction="random").build(place()).additive._fixed.on("cpu"), 7),  # type: ignore[union-attr, call-arg, operator]
            "learned": rounded(initial_parameters("integer", direction="learned")["direction"] / deviation),
        },
        "learned": {"initial": rounded(learned / deviation, 2), "minilm": minilm_rows()},
        "t5": rounded(buckets / deviation),
        # As numbers between 0 and 1; the upper end depends on the variant.
        "kerple": {"r1": rounded(kerple["r1"] / 2), "r2": rounded(kerple["r2"])},
        "tisa": {name: rounded(value) for name, value in initial_parameters("tisa", num_kernels=MOST_KERNELS).items()},
        "fire": {
            name: rounded(value)
            for name, value in initial_parameters("fire").items()
            if name not in ("c", "threshold_factor")
        },
    }


def place(causal: bool = False) -> BuildContext:
    """The place of the page, with as many heads as it can have."""
    return BuildContext(HIDDEN_SIZE, MOST_HEADS, HEAD_DIM, causal=causal, max_positions=TABLE_ROWS)


def initial_parameters(name: str, **options: Any) -> dict[str, Tensor]:
    """The parameters of a scheme as the library draws them after `torch.manual_seed(0)`."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        parts = get_scheme(name)(**options).build(place())
    return {key: value.detach() for part in parts for key, value in part.named_parameters()}


def minilm_rows() -> list[list[float]]:
    """The first rows and components of the position table of the pretrained MiniLM."""
    from safetensors.torch import load_file

    from eval.packaged_models import MINILM

    weights = load_file(MINILM.locate() / MINILM.weights)
    name = next(name for name in weights if name.endswith("position_embeddings.weight"))
    return rounded(weights[name][:TABLE_ROWS, :HIDDEN_SIZE].float())


def dog_minilm_data() -> dict[str, Any]:
    """The content of `dog_minilm.json`, as `hf-posenc eval dog` measures it."""
    from transformers import AutoModel, AutoTokenizer

    from eval.packaged_models import MINILM
    from hf_posenc.metrics import dog_test

    folder = str(MINILM.locate())
    # Most arrangements repeat their default inner scheme within five tokens.
    own = (name for name in SCHEMES if name in FORMULAS or not needs_scheme(get_scheme(name)))
    schemes = ["native", *(name for name in own if not _causal_only(name) and name != "composed")]
    result = dog_test(AutoModel.from_pretrained(folder), AutoTokenizer.from_pretrained(folder), schemes)
    rounding = result.settings["tolerance"]
    distances: dict[str, list[float]] = {}
    for record in result.of(quantity="relative_l2"):
        value = record.value or 0.0
        # What is below the rounding of the model's dtype differs between machines.
        distances.setdefault(record.subject, []).append(rounded_number(value, 3) if value > rounding else 0.0)
    return {
        "model": "all-MiniLM-L6-v2",
        "sentence": result.settings["sentence"],
        "word": result.settings["word"],
        "rounding": rounding,
        "layers": max(map(len, distances.values())) - 1,
        "distances": {scheme.split(" ")[0]: values for scheme, values in distances.items()},
    }


def trained_data(run: Path) -> dict[str, Any]:
    """The content of `trained.json`: the first layer's position weights of the models in the folder of a study."""
    from safetensors.torch import load_file

    schemes: dict[str, Any] = {name: {} for name in TRAINED}
    for task, name in itertools.product(TASKS, TRAINED):
        weights = load_file(run / "models" / f"{task}-{name}-seed0" / "model.safetensors")
        # Layers are numbered; in this order the first one is the last to be stored.
        own = {
            key.rpartition(".")[2]: value.float()
            for key, value in sorted(weights.items(), reverse=True)
            if "position_encoding" in key and value.is_floating_point()
        }
        if name == "learned":
            own = {"weight": own["weight"][:TABLE_ROWS, :HIDDEN_SIZE]}
        schemes[name][task] = {key: rounded(value, 3) for key, value in own.items()}
    results = json.loads((run / "results.json").read_text(encoding="utf-8"))
    return {"command": results["command"], "versions": results["versions"], "schemes": schemes}


def rounded(values: Tensor, digits: int = DIGITS) -> Any:
    """Nested lists of numbers with this many significant digits."""
    return json.loads(
        json.dumps(values.tolist()), parse_float=lambda text: rounded_number(float(text), digits), parse_int=int
    )


def rounded_number(value: float, digits: int) -> float:
    """A number with this many significant digits."""
    return float(f"{value:.{digits}g}")


def write(name: str, content: dict[str, Any]) -> None:
    """Writes one file, one line per entry of the first two levels, so that changes can be read."""
    DATA.mkdir(exist_ok=True)
    (DATA / name).write_text(encoded(content), encoding="utf-8")
    print(f"{name}: {(DATA / name).stat().st_size / 1000:.0f} KB")


def encoded(content: dict[str, Any]) -> str:
    """JSON with one line per entry of the first two levels."""

    def lines(value: Any, depth: int) -> str:
        if depth == 0 or not isinstance(value, dict):
            return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
        inside = ",\n".join(f"{json.dumps(key)}: {lines(one, depth - 1)}" for key, one in value.items())
        return "{\n" + inside + "\n}"

    return lines(content, 2) + "\n"


def _required(config_class: type[Any]) -> list[str]:
    return [
        field.name
        for field in dataclasses.fields(config_class)
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    ]


def _all_meanings(config_class: type[Any]) -> dict[str, str]:
    """The meanings of all options; an option of a base class may be described there."""
    meanings: dict[str, str] = {}
    for kind in reversed(config_class.__mro__):
        if issubclass(kind, SchemeConfig | SubConfig) or kind.__module__.startswith("hf_posenc"):
            meanings |= meanings_of(inspect.cleandoc(kind.__doc__ or ""))
    return meanings


def _formula(text: str) -> str:
    """The first indented block after a double colon."""
    found = re.search(r"::\n\n((?: +.*\n|\n)+)", text)
    return inspect.cleandoc("\n" + found.group(1)).strip() if found else ""


def _causal_only(name: str) -> bool:
    if _required(get_scheme(name)) or issubclass(get_scheme(name), LayeredConfig):
        return False
    try:
        get_scheme(name)().build(place(causal=False))
    except UnsupportedError:
        return True
    return False


def _rank(name: str) -> tuple[int, str]:
    """The order of the page's list: by group, then by name."""
    return list(GROUPS).index(group_of(get_scheme(name))), name


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="Writes the JSON files that the explorer reads.")
    parser.add_argument("--trained", type=Path, help="Folder of a study; writes only trained.json.")
    options = parser.parse_args()
    if options.trained:
        write("trained.json", trained_data(options.trained))
        return
    write("options.json", options_data())
    write("recorded.json", recorded_data())
    write("tables.json", tables_data())
    write("dog_minilm.json", dog_minilm_data())


if __name__ == "__main__":
    main()
