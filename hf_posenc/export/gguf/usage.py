"""How to run a GGUF file, for its model card. `{folder}` stands for the folder of the file."""

from __future__ import annotations

from hf_posenc.export.gguf.form import GgufForm, is_encoder

#: Name of the file.
FILE = "model.gguf"
_DECODER = """```bash
llama-cli -m {folder}/model.gguf -p 'The dog chased'
llama-server -m {folder}/model.gguf
```

or, in Python, with `pip install xllamacpp`:

```python
import xllamacpp

options = xllamacpp.CommonParams()
options.model.path = "{folder}/model.gguf"
server = xllamacpp.Server(options)
answer = server.handle_completions({"prompt": "The dog chased", "n_predict": 20, "temperature": 0.0})
print(answer["choices"][0]["text"])
```"""
_ENCODER = """```bash
llama-embedding -m {folder}/model.gguf{option} -p 'The dog chased'
llama-server -m {folder}/model.gguf{option} --embeddings
```

or, in Python, with `pip install xllamacpp`:

```python
import xllamacpp

options = xllamacpp.CommonParams()
options.model.path = "{folder}/model.gguf"
options.embedding = True
{line}server = xllamacpp.Server(options)
print(server.handle_embeddings({"input": ["The dog chased"]})["data"][0]["embedding"])
```"""
#: What a program has to be told if the file does not say how to make one vector of a text.
_POOLED = " --pooling mean", "options.pooling_type = xllamacpp.llama_pooling_type.LLAMA_POOLING_TYPE_MEAN\n"
_ENCODER_DECODER = (
    "`model.gguf` is an encoder-decoder. Programs that call `llama_encode` and `llama_decode` of llama.cpp run it. "
    "`llama-server` and the programs that contain it load the file and then answer with wrong text: they do not "
    "run the encoder."
)


def usage(form: GgufForm) -> str:
    """Markdown with commands and code."""
    if "decoder_block_count" in form.metadata:
        return _ENCODER_DECODER
    if not is_encoder(form):
        return _DECODER
    option, line = ("", "") if "pooling_type" in form.metadata else _POOLED
    return _ENCODER.replace("{option}", option).replace("{line}", line)
