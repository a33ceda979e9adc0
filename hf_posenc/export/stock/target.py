"""The target "stock": a checkpoint that needs only transformers."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel

from hf_posenc.errors import SequenceLengthError, UnsupportedError
from hf_posenc.export.carriers import Carrier, Export, of_types
from hf_posenc.export.comparison import float32_reference, random_ids, relative_difference, spans
from hf_posenc.export.models import other_modalities
from hf_posenc.export.records import Check
from hf_posenc.export.stock.form import StockForm
from hf_posenc.export.stock.other_classes import gpt_neox, mpnet, roformer, smollm3
from hf_posenc.export.stock.own_class import own_class, own_table
from hf_posenc.export.stock.rope_parameters import own_rotation
from hf_posenc.patching.call.cache import cache_argument, first_cache
from hf_posenc.schemes.needs import BIASES, Need

#: Maximum difference at which two models count as equal, in float32; relative for outputs larger than 1.
TOLERANCE = 1e-5
_DECODED = 16
#: Encoders that text-embeddings-inference runs, by its documentation; RoBERTa is not among them by that name.
_EMBEDDED = ("bert", "camembert", "xlm-roberta", "mpnet", "modernbert")
#: The model's own class comes first, because it is the one that other programs know.
CARRIERS = (
    Carrier("its own config", own_class),
    Carrier("its own class with other frequencies", own_rotation, (Need.MAP,)),
    Carrier("its own class with another table of positions", own_table, (Need.VECTORS,)),
    Carrier("SmolLM3", smollm3, (Need.MAP,), of_types("llama", "mistral", "smollm3")),
    Carrier("GPT-NeoX", gpt_neox, (Need.MAP,), of_types("gpt2")),
    Carrier("RoFormer", roformer, (Need.MAP,), of_types("bert")),
    Carrier("MPNet", mpnet, BIASES, of_types("bert")),
)


@dataclass
class StockExport(Export[StockForm]):
    """Writes a plain transformers checkpoint.

    A checkpoint is loaded with stock code and must give the same outputs as the model on random tokens, also beyond a
    sliding window and beyond the original length of a RoPE scaling.

    Args:
        max_shard_size: as in `save_pretrained`.
        variant: as in `save_pretrained`.
    """

    max_shard_size: int | str | None = None
    variant: str | None = None

    def carriers(self) -> list[Carrier[StockForm]]:
        """The carriers to try. A model without a scheme of this package needs only its own class."""
        carriers = CARRIERS[:1] if self.parts.placed is None else CARRIERS
        return [carrier for carrier in carriers if carrier.fits(self.model)]

    def write(self, form: StockForm) -> None:
        """Calls `save_pretrained` of a stock model without weights in memory."""
        for path in self.draft.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        with torch.device("meta"):
            stock = form.model_class(form.config)
        stock.to(self.model.dtype)
        if self.model.can_generate():
            stock.generation_config = copy.deepcopy(self.model.generation_config)
        given = {"max_shard_size": self.max_shard_size, "variant": self.variant}
        options = {name: value for name, value in given.items() if value is not None}
        stock.save_pretrained(self.draft, state_dict=form.state, **options)

    def checks(self, form: StockForm) -> Iterator[Check]:
        """Compares at the positions of `spans`, and token by token.

        Raises:
            UnsupportedError: if the stock class does not have the same weights, or cannot run.
        """
        stock, reference = self._loaded(form), float32_reference(self.model)
        compared = [(*span, "prefill", _difference) for span in spans(self.model)]
        if self.model.can_generate() and not self.model.config.is_encoder_decoder:
            stop = min(_DECODED, compared[0][1])
            compared.append((stop // 2, stop, "decode", _decoded_difference))
        # The whole model is compared, or the stacks of text of one that also needs an image.
        whole = self.model.can_generate() or not other_modalities(self.model)
        paths = [""] if whole else [stack.path for stack, _ in self.parts.stacks]
        for start, stop, mode, difference in compared:
            place = f" at the positions {start} to {stop - 1}"
            for path in paths:
                largest = difference(reference.get_submodule(path), stock.get_submodule(path), start, stop)
                quantity = f"outputs of {path}" if path else "outputs"
                yield Check(f"transformers {transformers.__version__}", mode, quantity, largest, TOLERANCE, place)

    def _loaded(self, form: StockForm) -> PreTrainedModel:
        """The checkpoint in float32, loaded with stock code as the model was, so that both round their buffers."""
        stock, info = form.model_class.from_pretrained(
            self.draft, dtype=self.model.dtype, variant=self.variant, output_loading_info=True
        )
        missing = [str(key) for key in info["missing_keys"]]
        if getattr(self.model.base_model, "pooler", self.model) is None:
            # The model was built without the pooler of its class, and nothing reads it in the stock model.
            missing = [key for key in missing if ".pooler." not in f".{key}"]
        stray = sorted([*missing, *map(str, info["unexpected_keys"])])
        if stray:
            name = form.model_class.__name__
            raise UnsupportedError(f"A {name} does not have the same weights: {', '.join(stray[:5])}.")
        return stock.to(self.model.device).float().eval()

    def usage(self, form: StockForm) -> str:
        """The class that loads it, and the servers that run it."""
        name = form.model_class.__name__
        code = f'```python\nfrom transformers import {name}\n\nmodel = {name}.from_pretrained("{{folder}}")\n```'
        commands: tuple[str, ...] = ()
        if form.config.get_text_config() is form.config:
            if form.model_class.can_generate() and not form.config.is_encoder_decoder:
                commands = ("vllm serve {folder}", "transformers serve {folder}")
            elif form.config.model_type in _EMBEDDED:
                commands = ("text-embeddings-router --model-id {folder}",)
        return "\n\n".join((code, *(f"```bash\n{command}\n```" for command in commands)))


def _difference(reference: PreTrainedModel, stock: PreTrainedModel, start: int, stop: int) -> float:
    ids = random_ids(reference, stop - start)
    arguments: dict[str, Any] = {"input_ids": ids, "use_cache": False}
    if reference.config.is_encoder_decoder:
        arguments["decoder_input_ids"] = ids
    if start > 0:
        arguments["position_ids"] = torch.arange(start, stop, device=ids.device).unsqueeze(0)
    try:
        expected = reference(**arguments)[0]
    except SequenceLengthError:
        # The table is shorter than the shortest comparison, so compare at a smaller length.
        return _difference(reference, stock, start, start + (stop - start) // 2)
    try:
        return relative_difference(_run(stock, **arguments)[0], expected)
    except IndexError:
        return float("inf")


def _run(stock: PreTrainedModel, **arguments: Any) -> Any:
    try:
        return stock(**arguments)
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, ValueError) as error:
        raise UnsupportedError(f"a stock {type(stock).__name__} with this config cannot run: {error}") from error


def _decoded_difference(reference: PreTrainedModel, stock: PreTrainedModel, start: int, stop: int) -> float:
    """Compares the end of a sequence, which both models read token by token, so that they sum in the same order."""
    ids = random_ids(reference, stop)
    expected = _decoded(reference, reference, ids, start)
    return relative_difference(_decoded(stock, partial(_run, stock), ids, start), expected)


def _decoded(model: PreTrainedModel, run: Callable[..., Any], ids: Tensor, start: int) -> Tensor:
    output = run(input_ids=ids[:, :start], use_cache=True)
    steps = []
    for token in ids[:, start:].split(1, dim=1):
        cache = {cache_argument(model): first_cache(output.values())}
        output = run(input_ids=token, **cache, use_cache=True)
        steps.append(output.logits)
    return torch.cat(steps, dim=1)
