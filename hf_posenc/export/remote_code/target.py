"""The target "remote_code": a checkpoint with one file of code, which plain transformers loads after consent.

The file is a copy of `modeling_positions.py` in this folder, with classes of the model at its end. The config says
which parts of it act.
"""

from __future__ import annotations

import math
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import transformers
from torch import Tensor, nn

from hf_posenc.entry import REMOTE_CODE
from hf_posenc.errors import UnsupportedError
from hf_posenc.export.carriers import Carrier
from hf_posenc.export.comparison import float32_reference
from hf_posenc.export.layers import ModelParts, rotations_of
from hf_posenc.export.programs import padded, plain_checks, run_plain
from hf_posenc.export.records import Check
from hf_posenc.export.stock.form import StockForm, current_config, stock_state
from hf_posenc.export.stock.rope_parameters import fold
from hf_posenc.export.stock.target import TOLERANCE, StockExport
from hf_posenc.patching.anatomy.discovery import native_pairing, native_rotary_dim
from hf_posenc.schemes.additive.learned import LearnedEncoding
from hf_posenc.schemes.additive.sinusoidal import SinusoidalEncoding, frequencies_of
from hf_posenc.schemes.bias.alibi import AlibiBias
from hf_posenc.schemes.bias.forget_gate import ConstantForgetGateBias, ForgetGateBias
from hf_posenc.schemes.bias.kerple import KerpleBias
from hf_posenc.schemes.bias.t5 import T5Bias

TEMPLATE = Path(__file__).with_name("modeling_positions.py")
#: Where the attention layers are in the base model, and the heads that these models have besides `AutoModel`.
_DECODER = "layers.{}.self_attn"
_ENCODER = "encoder.layer.{}.attention.self"
#: Largest difference of decoding, which sums in another order than a whole forward: the gates of SmolLM2 by 1.1e-5.
_DECODED = 5e-5
#: Number of tokens of a compared call with padding.
_PADDED = 24
_HEADS = {
    _DECODER: ("CausalLM", "SequenceClassification", "TokenClassification", "QuestionAnswering"),
    _ENCODER: ("MaskedLM", "SequenceClassification", "TokenClassification", "QuestionAnswering", "MultipleChoice"),
}


@dataclass(frozen=True)
class RemoteForm(StockForm):
    """A class of the file, with its config and weights.

    Args:
        code: the text of the file.
    """

    code: str


@dataclass
class RemoteCodeExport(StockExport):
    """Writes a checkpoint with `modeling_positions.py`, which `trust_remote_code=True` runs.

    It is for decoders like Llama and encoders like BERT, and needs transformers 5.17 or newer. A model with a bias has
    the attention implementations "sdpa" and "eager", and generates with a dynamic cache.

    Args:
        max_shard_size: as in `save_pretrained`.
        variant: as in `save_pretrained`.
    """

    def carriers(self) -> list[Carrier[StockForm]]:
        """The classes in the file are the only ones."""
        return [Carrier("its own code", remote_code)]

    def write(self, form: StockForm) -> None:
        """Saves the model and its code."""
        assert isinstance(form, RemoteForm)
        super().write(form)
        (self.draft / TEMPLATE.name).write_text(form.code, encoding="utf-8")

    def checks(self, form: StockForm) -> Iterator[Check]:
        """Compares with padding, too, on the side where heads expect it: left in a decoder, right in an encoder."""
        for check in super().checks(form):
            yield replace(check, allowed=_DECODED) if check.mode == "decode" else check
        mask = padded(_PADDED, _PADDED // 3)
        masks = [mask if self.parts.stacks[0][0].causal else mask.flip(-1)]
        written, runtime = self._loaded(form), f"transformers {transformers.__version__}"
        reference = float32_reference(self.model)
        yield from plain_checks(reference, masks, lambda inputs, _: run_plain(written, inputs), runtime, TOLERANCE)

    def usage(self, form: StockForm) -> str:
        """The Auto class that loads it."""
        auto = next(auto for auto, name in form.config.auto_map.items() if name.endswith(form.model_class.__name__))
        return (
            f"Read `{TEMPLATE.name}` before you run it. It is the code of this model.\n\n```python\nfrom transformers "
            f'import {auto}\n\nmodel = {auto}.from_pretrained("{{folder}}", trust_remote_code=True)\n```'
        )


def remote_code(parts: ModelParts) -> RemoteForm:
    """Returns a class of the file with the parts of the scheme in its config, and their weights.

    Raises:
        UnsupportedError: if the file has no such part, or no place for it in a model like this.
    """
    model, name = parts.model, parts.name
    if parts.placed is None:
        raise UnsupportedError(f"This {name} has its stock positions, which need no code. Use save_pretrained.")
    kind = _kind(parts)
    stack, encoding = parts.stacks[0]
    state, prefix = stock_state(model), f"{stack.path}." if stack.path else ""
    for table in stack.tables:
        del state[f"{prefix}{table.path}.weight"]
    if any(layer.parts.logit_scale is not None for layer in parts.layers):
        raise UnsupportedError("The file cannot multiply logits by a factor, as the scheme does.")
    width = model.get_input_embeddings().embedding_dim
    if encoding.additive is not None and width != stack.hidden_size:
        raise UnsupportedError(f"The file adds vectors to the token embeddings, which are {width} wide in a {name}.")
    biases = [layer.parts.logit_bias for layer in parts.layers]
    distinct = list({id(bias): bias for bias in biases}.values())
    if len(distinct) not in (1, len(biases)) or len({repr(_options(_BIASES, bias)) for bias in biases}) > 1:
        raise UnsupportedError("The layers have different biases, but the file has one kind of bias for all layers.")
    config = _config(parts, kind)
    of_file = {
        "scheme": parts.label,
        "vectors": _options(_VECTORS, encoding.additive),
        "rotation": _rotation(parts, kind, state),
        "bias": _options(_BIASES, biases[0]),
        "shared": len(distinct) == 1,
        "first_row": stack.tables[0].origin if stack.tables else 0,
    }
    setattr(config, REMOTE_CODE, of_file)
    learned: dict[str, nn.Module | None] = {"vectors": encoding.additive}
    learned |= {f"biases.{index}": bias for index, bias in enumerate(distinct)}
    for place, part in learned.items():
        for key, weight in ({} if part is None else part.state_dict()).items():
            state[f"{prefix}positions.{place}.{key}"] = weight
    module = sys.modules[type(config).__module__]
    model_class = getattr(module, f"Positioned{name}", None)
    if model_class is None:
        raise UnsupportedError(f"No class of the file has the head of a {name}.")
    return RemoteForm(
        model_class, config, state, code=module.CODE, carrier=f"{model_class.__name__} in {TEMPLATE.name}"
    )


def _kind(parts: ModelParts) -> str:
    """Where the layers of the model are, if it is one of those that the file is written for."""
    base, stack = parts.model.base_model, parts.stacks[0][0]
    kind, place = (_DECODER, base) if stack.causal else (_ENCODER, getattr(base, "embeddings", None))
    paths = [kind.format(index) for index in range(parts.model.config.num_hidden_layers)]
    has_place = hasattr(place, "rotary_emb" if stack.causal else "position_embeddings")
    if stack.module is base and has_place and paths == [attention.path for attention in stack.attentions]:
        return kind
    raise UnsupportedError(
        f"The file is written for decoders like Llama (one rotation, attention in layers.0.self_attn) and for encoders "
        f"like BERT (a table of positions, attention in encoder.layer.0.attention.self). A {parts.name} is neither."
    )


def _config(parts: ModelParts, kind: str) -> Any:
    """The config of a class of the file, which is loaded for it."""
    stock = current_config(parts)
    config_name = type(stock).__name__
    names = ["AutoModel", *(f"AutoModelFor{head}" for head in _HEADS[kind])]
    classes = {name: getattr(transformers, name)._model_mapping.get(type(stock), None) for name in names}
    heads = {auto: model_class.__name__ for auto, model_class in classes.items() if isinstance(model_class, type)}
    code = TEMPLATE.read_text(encoding="utf-8") + _CONFIG.format(config=config_name, type=stock.model_type)
    code += "".join(_CLASS.format(config=config_name, name=name) for name in dict.fromkeys(heads.values()))
    code += _BASE.format(config=config_name, base=heads["AutoModel"])
    # Dataclasses and type hints look their module up by name, and `save_pretrained` its file.
    module: Any = types.ModuleType(f"{__package__}.{stock.model_type}.{TEMPLATE.stem}")
    module.CODE, module.__file__ = code, str(TEMPLATE)
    sys.modules[module.__name__] = module
    exec(compile(code, TEMPLATE.name, "exec"), vars(module))
    fields = {name: value for name, value in stock.to_dict().items() if name not in ("model_type", "architectures")}
    config = getattr(module, f"Positioned{config_name}")(**fields)
    config.auto_map = {"AutoConfig": f"{TEMPLATE.stem}.Positioned{config_name}"} | {
        auto: f"{TEMPLATE.stem}.Positioned{name}" for auto, name in heads.items()
    }
    return config


_CONFIG = """

# The classes of this checkpoint


class Positioned{config}(PositionedConfig, transformers.{config}):
    model_type = "{type}_with_positions"
"""
_CLASS = """

class Positioned{name}(PositionedModel, transformers.{name}):
    config_class = Positioned{config}
"""
_BASE = """

# Some heads make their base model with AutoModel.
Positioned{base}.register_for_auto_class("AutoModel")
transformers.AutoModel.register(Positioned{config}, Positioned{base})
"""


def _rotation(parts: ModelParts, kind: str, state: dict[str, Tensor]) -> dict[str, Any] | None:
    """The options of the rotation. The order of its pairs, and its basis, are moved into the weights."""
    rotations, layers = rotations_of(parts), parts.layers
    first, head_dim = rotations[0], rotations[0].head_dim
    if kind == _ENCODER and not first.rotary_dim:
        return None
    width = native_rotary_dim(layers[0].stack, layers[0].attention) or head_dim
    if first.rotary_dim not in (0, width):
        raise UnsupportedError(f"The file rotates {width} dimensions of a head, the scheme rotates {first.rotary_dim}.")
    for layer, rotation in zip(layers, rotations, strict=True):
        fold(state, layer, rotation, native_pairing(layer.stack, layer.attention) or "half")
    return {"width": width, "frequencies": first.frequencies.tolist(), "attention_scaling": first.scaling}


#: The options in the config, by the class of a part. Subclasses may compute more.
Options = dict[type[nn.Module], Callable[[Any], dict[str, Any]]]
_VECTORS: Options = {
    LearnedEncoding: lambda part: {"kind": "learned", "rows": len(part.weight), "offset": part.offset},
    SinusoidalEncoding: lambda part: _sinusoidal(part),
}
_BIASES: Options = {
    AlibiBias: lambda part: {
        "kind": "alibi",
        "slopes": part.slopes.detach().tolist(),
        "num_left": part.num_left,
        "learned": part.log_slopes is not None,
    },
    T5Bias: lambda part: {"kind": "t5"} | _named(part, "num_buckets", "max_distance", "bidirectional"),
    KerpleBias: lambda part: {"kind": "kerple"} | _named(part, "variant", "exponent", "minimum"),
    ConstantForgetGateBias: lambda part: {"kind": "constant_gate"},
    ForgetGateBias: lambda part: {"kind": "forget_gate"},
}


def _options(kinds: Options, part: Any) -> dict[str, Any] | None:
    """The options of a part for the config.

    Raises:
        UnsupportedError: for a part that the file does not have.
    """
    if part is None:
        return None
    if type(part) not in kinds:
        known = ", ".join(kind.__name__ for kind in kinds)
        raise UnsupportedError(f"The file has no {type(part).__name__}; it has {known}.")
    return kinds[type(part)](part)


def _named(part: Any, *names: str) -> dict[str, Any]:
    return {name: getattr(part, name) for name in names}


def _sinusoidal(part: SinusoidalEncoding) -> dict[str, Any]:
    if part.axes > 1 or part.hidden_size % 2:
        raise UnsupportedError("The file only has sinusoids of positions on one axis, in an even number of dimensions.")
    config, frequencies = part.config, frequencies_of(part.hidden_size, part.config)
    if config.frequencies == "vaswani":
        frequencies = frequencies * 2 * math.pi  # They are in turns.
    return {
        "kind": "sinusoidal",
        "frequencies": frequencies.tolist(),
        "dtype": str(frequencies.dtype).removeprefix("torch."),
        **_named(config, "layout", "scale", "offset"),
    }
