"""A script that runs a GGUF file in llama.cpp. It is a separate process, because llama.cpp aborts on some errors.

It reads a task (JSON) from the standard input: the file, how to run it, and jobs, each of which is a method of `Server`
or of `Library` with its arguments. It writes the list of their results (pickle) to the file that the task names.
"""

import ctypes
import importlib.util
import json
import os
import pickle
import sys
import urllib.request
from typing import Any

import numpy as np
import numpy.typing as npt

#: Exit code if llama.cpp does not load the file.
CANNOT_LOAD = 3
#: "Not specified" in an enumeration.
_UNSPECIFIED = 0xFFFFFFFF
#: Types of the cache, in ggml's numbers.
_FLOAT32, _FLOAT16 = 0, 1


class Server:
    """llama.cpp's server. If it has to be precise, its cache is float32, so that only the file rounds."""

    def __init__(self, task: dict[str, Any]) -> None:
        import xllamacpp

        options = xllamacpp.CommonParams()
        options.model.path = task["file"]
        options.n_ctx = options.n_batch = task["context"]
        options.n_parallel = 1
        options.warmup = options.fit_params = False
        options.cpuparams.n_threads = options.cpuparams_batch.n_threads = task["threads"]
        options.n_gpu_layers = 0
        options.verbosity = 1  # errors only
        if task["precise"]:
            options.cache_type_k = options.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
            options.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
        try:
            self.server = xllamacpp.Server(options)
        except RuntimeError:
            sys.exit(CANNOT_LOAD)  # llama.cpp has written the reason.

    def predict(self, prompt: list[int], steps: int, top: int, following: list[int] | None) -> list[dict[str, Any]]:
        """Predictions after a prompt: the first from all of it, and the others with the cache.

        Each adds a token to the prompt: the next of those that are given, or else the most probable one.
        """
        prompt, found, letter = list(prompt), [], self.tokenize("a", special=False)[-1]
        for step in range(steps):
            found.append(self._predict(prompt, top, step > 0, letter))
            if step + 1 < steps:
                prompt.append(found[-1]["ids"][0] if following is None else following[step])
        return found

    def _predict(self, prompt: list[int], top: int, cached: bool, letter: int) -> dict[str, Any]:
        """The most probable next tokens and their log-probabilities, in descending order.

        llama.cpp leaves probabilities out of its answer if the new token is an incomplete character. It therefore has
        to choose the token of a letter. The probabilities are those before this choice.
        """
        answer = self._answer(prompt=prompt, n_predict=1, n_probs=top, cache_prompt=cached, logit_bias=[[letter, 1e9]])
        (step,) = answer["choices"][0]["logprobs"]["content"]
        entries, reused = step["top_logprobs"], answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        if reused != (len(prompt) - 1 if cached else 0):
            raise RuntimeError(f"{reused} of {len(prompt)} tokens were taken from the cache")
        return {"ids": [entry["id"] for entry in entries], "logprobs": [entry["logprob"] for entry in entries]}

    def complete(self, prompt: list[int] | str, steps: int) -> dict[str, Any]:
        """A greedy continuation as text, with llama.cpp's own timings."""
        answer = self._answer(prompt=prompt, n_predict=steps, cache_prompt=False)
        return {"text": answer["choices"][0]["text"], "timings": answer["timings"]}

    def tokenize(self, text: str, special: bool = True) -> list[int]:
        """The tokens of a text, with the special tokens that the file asks for."""
        body = json.dumps({"content": text, "add_special": special, "parse_special": True}).encode()
        request = urllib.request.Request(
            f"{self.server.listening_address}/tokenize", data=body, headers={"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request) as answer:
            found: list[int] = json.loads(answer.read())["tokens"]
        return found

    def _answer(self, **request: Any) -> dict[str, Any]:
        greedy = {"temperature": 0.0, "top_k": 1, "repeat_penalty": 1.0, "ignore_eos": True}
        answer: dict[str, Any] = self.server.handle_completions({**greedy, **request})
        if "choices" not in answer:
            raise RuntimeError(json.dumps(answer))
        return answer


class Opaque(ctypes.Structure):
    """Parameters of llama.cpp, passed by value.

    Their layout changes between versions. A structure that is larger than the real one can be returned and passed as
    the last argument on x86-64 and AArch64. A few fields have to be set, and are found by their default values.
    """

    _fields_ = [("words", ctypes.c_uint32 * 1024)]


class Library:
    """llama.cpp's C functions in the shared library of xllamacpp, for an encoder, and for an encoder with a decoder.

    Its server does not run these. The file is loaded on the CPU, and everything is in float32.
    """

    def __init__(self, task: dict[str, Any]) -> None:
        found = importlib.util.find_spec("xllamacpp.xllamacpp")
        assert found is not None
        assert found.origin is not None
        self.functions = ctypes.CDLL(found.origin)
        self._declare()
        self.functions.llama_backend_init()
        self.model = self.functions.llama_model_load_from_file(task["file"].encode(), self._model_parameters())
        if not self.model:
            sys.exit(CANNOT_LOAD)  # llama.cpp has written the reason.
        context = -(-task["context"] // 256) * 256  # llama.cpp rounds it up.
        self.context = self.functions.llama_init_from_model(self.model, self._context_parameters(context))
        if not self.context:
            sys.exit(CANNOT_LOAD)
        if self.functions.llama_n_ubatch(self.context) != context or self.functions.llama_pooling_type(self.context):
            raise RuntimeError("llama.cpp has not taken the parameters, so their order must have changed")
        self.functions.llama_set_n_threads(self.context, task["threads"], task["threads"])
        self.width = self.functions.llama_model_n_embd(self.model)
        self.words = self.functions.llama_vocab_n_tokens(self.functions.llama_model_get_vocab(self.model))

    def encode(self, ids: list[int]) -> npt.NDArray[np.float32]:
        """The encoder's last hidden states, `(2, tokens, width)`.

        By `llama_encode`, and by `llama_decode`, which llama.cpp's server calls and which may mask later tokens.
        """
        self.functions.llama_set_embeddings(self.context, True)
        rows = []
        for function in ("llama_encode", "llama_decode"):
            self._forget()
            self._run(function, ids)
            rows.append(self._copy(self.functions.llama_get_embeddings(self.context), (len(ids), self.width)))
        return np.stack(rows)

    def decode(self, ids: list[int], batches: list[list[int]]) -> npt.NDArray[np.float32]:
        """The decoder's logits after each batch of its tokens, `(batches, vocabulary)`. Later ones use its cache.

        Args:
            ids: of the encoder.
            batches: of the decoder.
        """
        self.functions.llama_set_embeddings(self.context, False)
        self._forget()
        self._run("llama_encode", ids)
        rows = []
        for batch in batches:
            self._run("llama_decode", batch)
            rows.append(self._copy(self.functions.llama_get_logits_ith(self.context, -1), (self.words,)))
        return np.stack(rows)

    def _declare(self) -> None:
        pointer, floats = ctypes.c_void_p, ctypes.POINTER(ctypes.c_float)
        kinds: dict[str, tuple[Any, list[Any]]] = {
            "llama_backend_init": (None, []),
            "llama_model_default_params": (Opaque, []),
            "llama_context_default_params": (Opaque, []),
            "llama_model_load_from_file": (pointer, [ctypes.c_char_p, Opaque]),
            "llama_init_from_model": (pointer, [pointer, Opaque]),
            "llama_n_ubatch": (ctypes.c_uint32, [pointer]),
            "llama_pooling_type": (ctypes.c_int, [pointer]),
            "llama_set_n_threads": (None, [pointer, ctypes.c_int32, ctypes.c_int32]),
            "llama_model_n_embd": (ctypes.c_int32, [pointer]),
            "llama_model_get_vocab": (pointer, [pointer]),
            "llama_vocab_n_tokens": (ctypes.c_int32, [pointer]),
            "llama_set_embeddings": (None, [pointer, ctypes.c_bool]),
            "llama_get_memory": (pointer, [pointer]),
            "llama_memory_clear": (None, [pointer, ctypes.c_bool]),
            "llama_batch_get_one": (Opaque, [pointer, ctypes.c_int32]),
            "llama_encode": (ctypes.c_int32, [pointer, Opaque]),
            "llama_decode": (ctypes.c_int32, [pointer, Opaque]),
            "llama_get_embeddings": (floats, [pointer]),
            "llama_get_logits_ith": (floats, [pointer, ctypes.c_int32]),
        }
        for name, (result, arguments) in kinds.items():
            function = getattr(self.functions, name)
            function.restype, function.argtypes = result, arguments

    def _model_parameters(self) -> Opaque:
        parameters: Opaque = self.functions.llama_model_default_params()
        # Two pointers, then n_gpu_layers: all by default.
        _check(list(parameters.words[:5]), [0, 0, 0, 0, _UNSPECIFIED], "llama_model_params")
        parameters.words[4] = 0
        return parameters

    def _context_parameters(self, context: int) -> Opaque:
        parameters: Opaque = self.functions.llama_context_default_params()
        words = parameters.words
        for place in range(3):  # n_ctx, n_batch, n_ubatch
            words[place] = context
        # Types of RoPE scaling, pooling, attention and flash attention; eight numbers and two pointers for RoPE and
        # a callback; types of the cached keys and values.
        first = next(place for place in range(len(words)) if list(words[place : place + 4]) == [_UNSPECIFIED] * 4)
        _check(list(words[first + 16 : first + 18]), [_FLOAT16] * 2, "llama_context_params")
        words[first + 1] = words[first + 3] = 0  # No pooling, and no flash attention, which rounds.
        words[first + 16] = words[first + 17] = _FLOAT32
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


def _check(found: list[int], expected: list[int], name: str) -> None:
    if found != expected:
        raise RuntimeError(
            f"{name} of this version of xllamacpp starts with {found} where {expected} was expected, so its fields "
            "cannot be set. Install the version in constraints.txt."
        )


def main() -> None:
    """Runs the task."""
    task = json.load(sys.stdin)
    runner = {"Server": Server, "Library": Library}[task["by"]](task)
    results = [getattr(runner, task["method"])(**job) for job in task["jobs"]]
    with open(task["results"], "wb") as file:
        pickle.dump(results, file)
    # The destructor of the server can wait for its HTTP thread forever, if that thread accepts connections too late.
    os._exit(0)


if __name__ == "__main__":
    main()
