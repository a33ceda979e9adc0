"""Ways a model is stored, placed, quantised and compiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, BitsAndBytesConfig, QuantoConfig, TorchAoConfig

import hf_posenc
from tests.integrations.subject import (
    assert_close,
    assert_same_tokens,
    bert,
    folder,
    llama,
    saved,
    text,
    tokenizer,
    tokens,
)
from tests.integrations.tool import Tool
from tests.matrix.running import freshly_compiled

_PLAIN = "a plain forward"
_QUANTISED = "stock, quantised, then patched"


def _logits(model: Any, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=ids).logits


def _loaded(sharded: bool = False, **options: Any) -> Any:
    def check(scheme: Any) -> None:
        model, ids = llama(scheme), tokens()
        if "dtype" in options:
            model.to(options["dtype"])
        with folder() as path, folder() as offload:
            model.save_pretrained(path, **({"max_shard_size": "10KB"} if sharded else {}))
            assert (len(list(path.glob("*.safetensors"))) > 1) == sharded
            extra = {"offload_folder": str(offload)} if "disk" in str(options.get("device_map")) else {}
            again = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager", **(options | extra))
            # Stored and computed by the same operations in the same dtype.
            assert torch.equal(_logits(again, ids), _logits(model, ids))

    return check


def _dispatched(device_map: Any) -> Any:
    """accelerate's way: an empty model, and the files of its weights."""

    def check(scheme: Any) -> None:
        from accelerate import init_empty_weights, load_checkpoint_and_dispatch

        model, ids = llama(scheme), tokens()
        with saved(model) as path, folder() as offload:
            config = AutoConfig.from_pretrained(path)
            with init_empty_weights():
                empty = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
            again = load_checkpoint_and_dispatch(empty, path, device_map, offload_folder=str(offload)).eval()
            assert torch.equal(_logits(again, ids), _logits(model, ids))

    return check


def _load_state(scheme: Any) -> None:
    """A state that `Accelerator` saved, in a second model."""
    from accelerate import Accelerator

    model, ids = llama(scheme), tokens()
    expected = _logits(model, ids)
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(model)
    with folder() as path:
        accelerator.save_state(str(path))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        accelerator.load_state(str(path))
    accelerator.free_memory()
    assert torch.equal(_logits(model, ids), expected)


def _adapter_by_name(scheme: Any) -> None:
    """An adapter that was trained on a model patched in memory finds its scheme again."""
    from peft import AutoPeftModelForCausalLM, LoraConfig, get_peft_model

    ids = tokens()
    with saved(llama(None)) as source, folder() as path:
        torch.manual_seed(7)
        base = hf_posenc.patch_model(AutoModelForCausalLM.from_pretrained(source), scheme)
        model = get_peft_model(base, LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False)).eval()
        expected = _logits(model, ids)
        model.save_pretrained(path)
        again = AutoPeftModelForCausalLM.from_pretrained(path).eval()
        assert_close(_logits(again, ids), expected)


#: On processors with AVX512-BF16, bitsandbytes needs whole blocks of 64 inputs and 32 outputs.
_WHOLE_BLOCKS = {"hidden_size": 64, "intermediate_size": 64, "head_dim": 16, "num_attention_heads": 4}


def _quantised_while_loading(settings: Callable[[], Any], saves: bool = True, **sizes: int) -> Callable[[Any], None]:
    """Weights of few bits under a scheme: loaded patched against loaded stock and patched then, and saved again."""

    def check(scheme: Any) -> None:
        model, ids = llama(scheme, **sizes), tokens()
        with saved(model) as patched, saved(llama(None, **sizes)) as stock, folder() as path:
            again = AutoModelForCausalLM.from_pretrained(patched, quantization_config=settings()).eval()
            twin = AutoModelForCausalLM.from_pretrained(stock, quantization_config=settings()).eval()
            plain = _logits(twin, ids)
            hf_posenc.patch_model(twin, scheme)
            twin.position_encoding.load_state_dict(model.position_encoding.state_dict())
            found = _logits(again, ids)
            assert_close(found, _logits(twin, ids))
            assert (found - _logits(model, ids)).abs().max() > 0, "nothing was quantised"
            assert all(type(one) is torch.nn.Parameter for one in again.position_encoding.parameters())
            if scheme == "native":
                assert_close(found, plain)
            if saves:
                twin.save_pretrained(path)
                assert_close(_logits(AutoModelForCausalLM.from_pretrained(path).eval(), ids), found)
            assert_close(_logits(hf_posenc.unpatch_model(twin), ids), plain)

    return check


def _torchao(bits: int) -> Any:
    from torchao.quantization import Int8WeightOnlyConfig, IntxWeightOnlyConfig
    from torchao.quantization.granularity import PerGroup

    if bits == 8:
        return Int8WeightOnlyConfig()
    return IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerGroup(16))


def _quantised_before_patching(quantise: Callable[[Any], Any]) -> Callable[[Any], None]:
    """Quantised after patching, and before it. The oracle is quantised too: activations may be rounded by all rows."""

    def check(scheme: Any) -> None:
        model, ids = llama(scheme), tokens()
        quantised, twin = quantise(llama(scheme)), hf_posenc.patch_model(quantise(llama(None)), scheme)
        twin.position_encoding.load_state_dict(model.position_encoding.state_dict())
        found = _logits(quantised, ids)
        assert_close(found, _logits(twin, ids))
        assert (found - _logits(model, ids)).abs().max() > 0, "nothing was quantised"

    return check


def _by_torchao(model: Any) -> Any:
    from torchao.quantization import quantize_

    quantize_(model, _torchao(8))
    return model


def _by_torch(model: Any) -> Any:
    return torch.ao.quantization.quantize_dynamic(model, {torch.nn.Linear}, dtype=torch.qint8)


def _compiled(scheme: Any) -> None:
    model, ids = llama(scheme), tokens()
    expected = _logits(model, ids)
    assert_close(_logits(freshly_compiled(model, "aot_eager", fullgraph=True), ids), expected)


def _static_decoding_compiled(scheme: Any) -> None:
    model, prompt = llama(scheme), tokens(1, 9)
    settings: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False}
    expected = model.generate(prompt, **settings)
    model.forward = freshly_compiled(model.forward, "aot_eager")
    found = model.generate(prompt, cache_implementation="static", disable_compile=True, **settings)
    assert_same_tokens(found, expected)


def _exported(dynamic: bool) -> Any:
    def check(scheme: Any) -> None:
        model, ids = bert(scheme), tokens(2, 12)
        length = torch.export.Dim("length", min=4, max=60)
        shapes = ({1: length},) if dynamic else None
        program = torch.export.export(model, (ids,), dynamic_shapes={"input_ids": shapes[0]} if shapes else None)
        for probe in (ids, tokens(2, 20)) if dynamic else (ids,):
            assert_close(program.module()(probe).logits, _logits(model, probe))

    return check


def _traced(scheme: Any) -> None:
    model, ids = bert(scheme), tokens(2, 12)
    model.config.return_dict = False
    traced = torch.jit.trace(model, (ids,), check_trace=False)
    other = tokens(2, 12, seed=4)
    with torch.no_grad():
        assert_close(traced(other)[0], model(other)[0])


def _attention(implementation: str) -> Any:
    def check(scheme: Any) -> None:
        model, ids = llama(scheme, hidden_size=64, head_dim=16), tokens()
        expected = _logits(model, ids)
        model.set_attn_implementation(implementation)
        assert_close(_logits(model, ids), expected)

    return check


def _sentences(scheme: Any) -> None:
    """Embeddings of a padded batch against means over each sentence alone."""
    from sentence_transformers import SentenceTransformer, models as modules

    with saved(bert(None).bert) as source, folder() as path:
        transformer = modules.Transformer(source)
        hf_posenc.patch_model(transformer.auto_model, scheme)
        encoder = SentenceTransformer(
            modules=[transformer, modules.Pooling(transformer.get_word_embedding_dimension())]
        )
        sentences = [text(ids) for ids in (*tokens(1, 9), *tokens(1, 5, seed=4))]
        found = encoder.encode(sentences, convert_to_tensor=True, batch_size=2).cpu()
        encoder.save(str(path))
        again = SentenceTransformer(str(path), device="cpu").encode(sentences, convert_to_tensor=True, batch_size=2)
        model = transformer.auto_model
        with torch.no_grad():
            expected = [model(**tokenizer()(s, return_tensors="pt")).last_hidden_state.mean(1) for s in sentences]
    assert_close(found, torch.cat(expected))
    assert_close(again.cpu(), found)


def _cross_encoder(scheme: Any) -> None:
    """Scores of padded pairs against each pair alone."""
    from sentence_transformers import CrossEncoder
    from transformers import BertConfig, BertForSequenceClassification

    classifier = BertForSequenceClassification(BertConfig(**(bert(None).config.to_dict() | {"num_labels": 1}))).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in classifier.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.2)
    pairs = [[text(tokens(1, 6)[0]), text(tokens(1, 7, seed=2)[0])], [text(tokens(1, 3, seed=3)[0]), "w9 w8"]]
    # The classifier reads the first token, which has to be a real one.
    with saved(classifier, padding_side="right") as source, folder() as path:
        encoder = CrossEncoder(source, device="cpu")
        hf_posenc.patch_model(encoder.model, scheme)
        found = encoder.predict(pairs, convert_to_tensor=True, activation_fn=torch.nn.Identity())
        encoder.save_pretrained(str(path))
        again = CrossEncoder(str(path), device="cpu")
        reloaded = again.predict(pairs, convert_to_tensor=True, activation_fn=torch.nn.Identity())
        with torch.no_grad():
            expected = [encoder.model(**encoder.preprocess([pair])).logits[0] for pair in pairs]
    assert_close(found.reshape(-1), torch.cat(expected))
    assert_close(reloaded, found)


#: For the stock model: the parts of a scheme need no entry.
_A_LAYER_ON_DISK = dict.fromkeys(
    ("model.embed_tokens", "model.layers.0", "model.norm", "model.rotary_emb", "lm_head"), "cpu"
) | {"model.layers.1": "disk"}

TOOLS = [
    Tool("Loading", "save_pretrained, from_pretrained", _loaded(), "bit for bit"),
    Tool("Loading", "sharded safetensors", _loaded(sharded=True), "bit for bit"),
    Tool("Loading", "dtype=bfloat16", _loaded(dtype=torch.bfloat16), "bit for bit"),
    Tool("Loading", "device_map='cpu'", _loaded(device_map="cpu"), "bit for bit"),
    Tool("Loading", "device_map, a layer on disk",
         _loaded(device_map=_A_LAYER_ON_DISK), "bit for bit"),
    Tool("Loading", "accelerate: init_empty_weights, load_checkpoint_and_dispatch", _dispatched("auto"), "bit for bit",
         ("accelerate",)),
    Tool("Loading", "load_checkpoint_and_dispatch, a layer on disk", _dispatched(_A_LAYER_ON_DISK), "bit for bit",
         ("accelerate",)),
    Tool("Loading", "Accelerator.save_state, load_state", _load_state, "bit for bit", ("accelerate",)),
    Tool("Loading", "adapter of a model patched in memory, AutoPeftModel", _adapter_by_name,
         "the adapter before saving", ("peft",)),
    Tool("Quantised weights", "quanto int8, while loading",
         _quantised_while_loading(lambda: QuantoConfig(weights="int8"), saves=False), _QUANTISED, ("optimum.quanto",)),
    Tool("Quantised weights", "torchao int8, while loading; saved",
         _quantised_while_loading(lambda: TorchAoConfig(_torchao(8))), _QUANTISED, ("torchao",)),
    Tool("Quantised weights", "torchao int4, while loading; saved",
         _quantised_while_loading(lambda: TorchAoConfig(_torchao(4))), _QUANTISED, ("torchao",)),
    Tool("Quantised weights", "torchao int8, quantize_", _quantised_before_patching(_by_torchao), _QUANTISED,
         ("torchao",)),
    Tool("Quantised weights", "bitsandbytes int8, while loading; saved",
         _quantised_while_loading(lambda: BitsAndBytesConfig(load_in_8bit=True)), _QUANTISED, ("bitsandbytes",)),
    Tool("Quantised weights", "bitsandbytes nf4, while loading; saved",
         _quantised_while_loading(
             lambda: BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4"), **_WHOLE_BLOCKS),
         _QUANTISED, ("bitsandbytes",)),
    Tool("Quantised weights", "torch dynamic int8", _quantised_before_patching(_by_torch), _QUANTISED),
    Tool("Compiling", "torch.compile (aot_eager, full graph)", _compiled, _PLAIN),
    Tool("Compiling", "torch.compile, static decoding", _static_decoding_compiled, "generate, not compiled"),
    Tool("Compiling", "torch.export (BERT)", _exported(dynamic=False), _PLAIN),
    Tool("Compiling", "torch.export, dynamic length (BERT)", _exported(dynamic=True), _PLAIN),
    Tool("Compiling", "torch.jit.trace (BERT)", _traced, _PLAIN),
    Tool("Attention", "sdpa", _attention("sdpa"), "eager"),
    Tool("Attention", "flex_attention", _attention("flex_attention"), "eager"),
    Tool("Sentence embeddings", "SentenceTransformer (BERT)", _sentences, "mean over each sentence alone; reloaded",
         ("sentence_transformers",)),
    Tool("Sentence embeddings", "CrossEncoder (BERT)", _cross_encoder, "each pair alone; reloaded",
         ("sentence_transformers",)),
]  # fmt: skip
