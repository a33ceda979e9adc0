"""The target "gguf": one file for llama.cpp."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from gguf import PoolingType

from hf_posenc.errors import UnknownNameError, UnsupportedError, UsageError
from hf_posenc.export.carriers import Carrier, Export
from hf_posenc.export.comparison import accepted, float32_reference, largest
from hf_posenc.export.gguf import bert, gpt, llama, t5
from hf_posenc.export.gguf.file import PRECISIONS, GgufForm, write_file
from hf_posenc.export.gguf.verify import compare
from hf_posenc.export.gguf.vocabulary import vocabulary
from hf_posenc.export.records import Check

_FILE = "model.gguf"
#: The values of the option `pooling`.
_POOLING = {name: PoolingType[name.upper()] for name in ("none", "mean", "cls", "last")}
CARRIERS = (*llama.CARRIERS, *gpt.CARRIERS, *t5.CARRIERS, *bert.CARRIERS)


@dataclass
class GgufExport(Export[GgufForm]):
    """Writes `model.gguf`, which llama.cpp runs without this package.

    Each file is run in llama.cpp with float32 weights and a float32 cache, for prompts of several lengths and while
    decoding. It must give the model's logits and probabilities, or the hidden states of an encoder. With another
    `dtype`, the rounded file is written and run after that.

    Args:
        dtype: precision of the matrices: "f32", "f16" or "q8_0" (8 bits in blocks of 32; matrices whose rows do not
            divide into blocks are stored as f16).
        pooling: how llama.cpp makes one vector of a text from an encoder's hidden states: "mean", "cls" (the first
            token), "last" or "none". By default the file does not say, and programs have an option for it.

    Raises:
        UnknownNameError: for an unknown precision or pooling.
    """

    dtype: str = "f32"
    pooling: str | None = None

    def __post_init__(self) -> None:
        if self.dtype not in PRECISIONS:
            raise UnknownNameError("dtype", self.dtype, list(PRECISIONS), owner="the export to 'gguf'")
        if self.pooling is not None and self.pooling not in _POOLING:
            raise UnknownNameError("pooling", self.pooling, list(_POOLING), owner="the export to 'gguf'")

    def carriers(self) -> list[Carrier[GgufForm]]:
        """The carriers with the blocks of the model.

        Raises:
            UnsupportedError: if there are none, with the supported blocks.
        """
        carriers = [carrier for carrier in CARRIERS if carrier.fits(self.model)]
        if not carriers:
            blocks = "; ".join(kind.BLOCKS for kind in (llama, gpt, t5, bert))
            raise UnsupportedError(
                f"{self.parts.name} ({self.model.config.model_type}) has blocks that this export does not write. "
                f"It writes {blocks}"
            )
        return carriers

    def prepare(self) -> None:
        """Raises `UnsupportedError` if llama.cpp has no tokenizer that gives the same tokens."""
        self.words = vocabulary(self.tokenizer, int(self.model.config.get_text_config().vocab_size))

    def write(self, form: GgufForm, dtype: str = "f32") -> None:
        """Writes the file in a precision.

        Raises:
            UsageError: for a pooling of a model that is not an encoder.
        """
        if self.pooling is not None:
            if not form.is_encoder():
                raise UsageError(
                    f"The option pooling={self.pooling!r} of the export to 'gguf' is for encoders. Leave it out."
                )
            form = replace(form, metadata={**form.metadata, "pooling_type": int(_POOLING[self.pooling])})
        write_file(self.draft / _FILE, form, self.words, dtype, self.parts.name)

    def checks(self, form: GgufForm, dtype: str = "f32") -> Iterator[Check]:
        """Runs prompts of several lengths, and decodes from each."""
        length = int(form.metadata["context_length"])
        return compare(float32_reference(self.model), self.draft / _FILE, length, dtype)

    def finished(self, form: GgufForm, checks: tuple[Check, ...]) -> tuple[Check, ...]:
        """Writes the file in its precision and runs it, after it was run in float32.

        Raises:
            UnsupportedError: if rounded weights change the numbers too much.
        """
        exact = all(check.allowed is not None for check in checks)
        if self.dtype == "f32":
            return checks
        self.write(form, self.dtype)
        rounded = largest(self.checks(form, self.dtype))
        if not exact:
            return accepted(rounded)
        for check in rounded:
            if not check.equal:
                raise UnsupportedError(
                    f"In llama.cpp the {check.quantity} of the float32 file are those of the model, but with weights "
                    f"in {self.dtype} they differ by {check.difference:.2g} (allowed: {check.allowed:g}). Choose a "
                    "more precise dtype."
                )
        return checks + rounded

    def usage(self, form: GgufForm) -> str:
        """Commands and Python that run it."""
        if "decoder_block_count" in form.metadata:
            return _ENCODER_DECODER
        words = {"{program}": "llama-cli", "{option}": "", "{server}": "", "{lines}": "", "{call}": _COMPLETION}
        if form.is_encoder():
            option, line = _POOLED if self.pooling is None else ("", "")
            words |= {"{program}": "llama-embedding", "{option}": option, "{server}": " --embeddings"}
            words |= {"{lines}": f"options.embedding = True\n{line}", "{call}": _EMBEDDING}
        usage = _USAGE
        for name, word in words.items():
            usage = usage.replace(name, word)
        return usage


_USAGE = """```bash
{program} -m {folder}/model.gguf{option} -p 'The dog chased'
llama-server -m {folder}/model.gguf{option}{server}
```

or, in Python, with `pip install xllamacpp`:

```python
import xllamacpp

options = xllamacpp.CommonParams()
options.model.path = "{folder}/model.gguf"
{lines}server = xllamacpp.Server(options)
{call}
```"""
_COMPLETION = """answer = server.handle_completions({"prompt": "The dog chased", "n_predict": 20, "temperature": 0.0})
print(answer["choices"][0]["text"])"""
_EMBEDDING = """print(server.handle_embeddings({"input": ["The dog chased"]})["data"][0]["embedding"])"""
#: Options for a program if the file does not say how to make one vector of a text.
_POOLED = " --pooling mean", "options.pooling_type = xllamacpp.llama_pooling_type.LLAMA_POOLING_TYPE_MEAN\n"
_ENCODER_DECODER = (
    "`model.gguf` is an encoder-decoder. Programs that call `llama_encode` and `llama_decode` of llama.cpp run it. "
    "`llama-server` and the programs that contain it load the file and then answer with wrong text: they do not "
    "run the encoder."
)
