"""A script that runs a GGUF file in llama.cpp. It is a separate process, because llama.cpp aborts on some errors.

It reads a task (JSON) from the standard input: the file, how to run it, a method of `Library`, and the arguments of its
calls. It writes the list of their results (pickle) to the file that the task names.
"""

import ctypes
import importlib.util
import json
import pickle
import sys
from typing import Any

import numpy as np
import numpy.typing as npt

#: Exit code if llama.cpp does not load the file.
CANNOT_LOAD = 3
#: "Not specified" in an enumeration.
_UNSPECIFIED = 0xFFFFFFFF
#: Types of the cache, in ggml's numbers.
_FLOAT32, _FLOAT16 = 0, 1


class Opaque(ctypes.Structure):
    """Parameters of llama.cpp, passed by value.

    Their layout changes between versions. A structure that is larger than the real one can be returned and passed as
    the last argument on x86-64 and AArch64. A few fields have to be set, and are found by their default values.
    """

    _fields_ = [("words", ctypes.c_uint32 * 1024)]


class Pointer(ctypes.c_void_p):
    """A pointer to something of llama.cpp. ctypes returns a plain `c_void_p` as a number and passes it on as an int."""


class Library:
    """llama.cpp's C functions in the shared library of xllamacpp. The file is loaded on the CPU.

    Unlike its server, they run an encoder with a decoder, and return the logits of all tokens. If it has to be precise,
    everything is in float32, so that only the file rounds.
    """

    def __init__(self, task: dict[str, Any]) -> None:
        library = importlib.util.find_spec("xllamacpp.xllamacpp")
        assert library is not None
        assert library.origin is not None
        self.functions = ctypes.CDLL(library.origin)
        self._declare()
        self.functions.llama_backend_init()
        self.model = self.functions.llama_model_load_from_file(task["file"].encode(), self._model_parameters())
        if not self.model:
            sys.exit(CANNOT_LOAD)  # llama.cpp has written the reason.
        context = -(-task["context"] // 256) * 256  # llama.cpp rounds it up.
        # An encoder reads its text at once; a decoder in pieces of 512 tokens, as by default.
        piece = context if any("ids" in job and job["ids"] for job in task["jobs"]) else min(context, 512)
        parameters = self._context_parameters(context, piece, task["precise"])
        self.context = self.functions.llama_init_from_model(self.model, parameters)
        if not self.context:
            sys.exit(CANNOT_LOAD)
        if self.functions.llama_n_ubatch(self.context) != piece or self.functions.llama_pooling_type(self.context):
            raise RuntimeError("llama.cpp did not accept the parameters, so their order must have changed")
        self.functions.llama_set_n_threads(self.context, task["threads"], task["threads"])
        self.width = self.functions.llama_model_n_embd(self.model)
        self.vocabulary = self.functions.llama_model_get_vocab(self.model)
        self.words = self.functions.llama_vocab_n_tokens(self.vocabulary)

    def tokenize(self, text: str) -> list[int]:
        """The tokens of a text, with the special tokens that the file asks for."""
        encoded = text.encode()
        tokens = (ctypes.c_int32 * (len(encoded) + 16))()
        count = self.functions.llama_tokenize(self.vocabulary, encoded, len(encoded), tokens, len(tokens), True, True)
        if count < 0:
            raise RuntimeError(f"llama_tokenize needs a buffer for {-count} tokens")
        return list(tokens[:count])

    def encode(self, ids: list[int]) -> npt.NDArray[np.float32]:
        """The encoder's last hidden states, `(2, tokens, width)`.

        From `llama_encode`, and from `llama_decode`, which llama.cpp's server calls and which may mask later tokens.
        """
        self.functions.llama_set_embeddings(self.context, True)
        rows = []
        for function in ("llama_encode", "llama_decode"):
            self._forget()
            self._run(function, ids)
            rows.append(self._copy(self.functions.llama_get_embeddings(self.context), (len(ids), self.width)))
        return np.stack(rows)

    def decode(
        self, ids: list[int], batches: list[list[int]], steps: int, without: list[int]
    ) -> npt.NDArray[np.float32]:
        """The decoder's logits after each batch and step, `(batches + steps, vocabulary)`. Later ones use its cache.

        Args:
            ids: token ids for the encoder; empty without an encoder.
            batches: token ids for the decoder, in batches.
            steps: number of tokens after these, each the most probable one.
            without: tokens whose logits are set to minus infinity.
        """
        self.functions.llama_set_embeddings(self.context, False)
        self._forget()
        if ids:
            self._run("llama_encode", ids)
        rows: list[npt.NDArray[np.float32]] = []
        for place in range(len(batches) + steps):
            self._run("llama_decode", batches[place] if place < len(batches) else [int(rows[-1].argmax())])
            rows.append(self._copy(self.functions.llama_get_logits_ith(self.context, -1), (self.words,)))
            rows[-1][without] = -np.inf
        return np.stack(rows)

    def _declare(self) -> None:
        """Sets the types of results other than C's int, which is that of the others."""
        floats = ctypes.POINTER(ctypes.c_float)
        kinds: dict[str, Any] = {
            "llama_model_default_params": Opaque,
            "llama_context_default_params": Opaque,
            "llama_model_load_from_file": Pointer,
            "llama_init_from_model": Pointer,
            "llama_model_get_vocab": Pointer,
            "llama_get_memory": Pointer,
            "llama_batch_get_one": Opaque,
            "llama_get_embeddings": floats,
            "llama_get_logits_ith": floats,
        }
        for name, kind in kinds.items():
            getattr(self.functions, name).restype = kind

    def _model_parameters(self) -> Opaque:
        parameters: Opaque = self.functions.llama_model_default_params()
        # Two pointers, then n_gpu_layers: all by default.
        _check(list(parameters.words[:5]), [0, 0, 0, 0, _UNSPECIFIED], "llama_model_params")
        parameters.words[4] = 0
        return parameters

    def _context_parameters(self, context: int, piece: int, precise: bool) -> Opaque:
        parameters: Opaque = self.functions.llama_context_default_params()
        words = parameters.words
        words[:3] = [context, context, piece]  # n_ctx, n_batch, n_ubatch
        # Types of RoPE scaling, pooling, attention and flash attention; numbers and pointers, how many depends on the
        # version, and none of them is 1; types of the cached keys and values.
        first = next((place for place in range(3, 16) if list(words[place : place + 4]) == [_UNSPECIFIED] * 4), 0)
        cached = next((place for place in range(first + 4, first + 24) if words[place] == _FLOAT16), 0)
        values = [*words[first : first + 4], *words[cached : cached + 2]]
        _check(values, [_UNSPECIFIED] * 4 + [_FLOAT16] * 2, "llama_context_params")
        words[first + 1] = 0  # No pooling.
        if precise:
            words[first + 3] = 0  # No flash attention, which rounds.
            words[cached] = words[cached + 1] = _FLOAT32
        return parameters

    def _forget(self) -> None:
        memory = self.functions.llama_get_memory(self.context)
        if memory:
            self.functions.llama_memory_clear(memory, True)

    def _run(self, function: str, ids: list[int]) -> None:
        tokens = (ctypes.c_int32 * len(ids))(*ids)
        batch = self.functions.llama_batch_get_one(tokens, len(ids))
        code = getattr(self.functions, function)(self.context, batch)
        if code:
            raise RuntimeError(f"{function} returned {code}")

    def _copy(self, floats: Any, shape: tuple[int, ...]) -> npt.NDArray[np.float32]:
        if not floats:
            raise RuntimeError("llama.cpp returned no numbers")
        return np.ctypeslib.as_array(floats, shape).copy()


def _check(values: list[int], expected: list[int], name: str) -> None:
    if values != expected:
        raise RuntimeError(
            f"{name} of this version of xllamacpp has {values} where {expected} was expected, so its fields "
            "cannot be set. Install the version in constraints.txt."
        )


def main() -> None:
    """Runs the task."""
    task = json.load(sys.stdin)
    method = getattr(Library(task), task["method"])
    results = [method(**job) for job in task["jobs"]]
    with open(task["results"], "wb") as file:
        pickle.dump(results, file)


if __name__ == "__main__":
    main()
