"""The environments: what each one lacks, why, and what to do instead. docs/reference/limits.md has the table."""

from __future__ import annotations

from hf_posenc.schemes.needs import BIASES, IN_ATTENTION, NO_GROWING_CACHE, Environment, Need

_NOT_RECOMPUTED = "and cached keys are not recomputed as the sequence grows"
_OTHER_BATCHING = (
    "Use model.generate() with a left-padded batch. In `transformers serve`, leave out --continuous-batching."
)
_OTHER_PROGRAM = (
    "Run the checkpoint with transformers (model.generate, or `hf-posenc serve`). If "
    'export_model(model, folder, to="stock") can express the scheme, the engine runs that folder without a plug-in.'
)

GROWING_CACHE = Environment(
    "A growing cache", dict.fromkeys(NO_GROWING_CACHE, _NOT_RECOMPUTED), "Generate with use_cache=False."
)
QUANTISED_CACHE = Environment(
    "A quantised cache",
    {Need.FEATURES: "which would be rounded to a few bits"},
    "Use another cache (cache_implementation='dynamic' or 'static').",
)
SLIDING_CACHE = Environment(
    "The cache of a sliding-window layer",
    {Need.OLDEST_KEYS: "but it has dropped the tokens before its first key"},
    "Use use_cache=False, or apply the scheme only to layers without a window: patch_model(..., layers=...).",
)
EVICTING_CACHE = Environment(
    "A cache that has dropped tokens between those it still has (SinkCache)",
    dict.fromkeys((Need.OLDEST_KEYS, Need.TOKENS_BETWEEN), "but some of them are gone"),
    "Use the model's own cache.",
)
PACKED_ROWS = Environment(
    "A row of packed documents (its position_ids restart)",
    {Need.LENGTH: "and the row holds several sequences"},
    "Pass the documents as separate rows.",
)
PAGES = Environment(
    "Continuous batching", dict.fromkeys(NO_GROWING_CACHE, "and paged keys are never recomputed"), _OTHER_BATCHING
)
PAGES_IN_GRAPHS = Environment(
    "Continuous batching in graphs",
    dict.fromkeys(
        (Need.WIDE_HEADS, Need.ROTATION_BY_INPUT, *BIASES),
        "which needs the lengths of the requests in a batch, and a graph cannot read them",
    ),
    "Remove this setting.",
)
PAGES_OF_FLASH = Environment(
    "Continuous batching with a flash kernel",
    dict.fromkeys(
        (Need.BIAS, Need.ROTATION_BY_INPUT, Need.SCALED_BIAS),
        "which cannot be folded into the queries and keys of the kernel",
    ),
    'Call model.set_attn_implementation("sdpa").',
)
CONTEXT_PARALLELISM = Environment(
    "Context parallelism, which splits the tokens of a sequence across processes,",
    {
        Need.ROTATION_BY_INPUT: "for which features of all tokens are needed, and torch only exchanges their keys",
        **dict.fromkeys(NO_GROWING_CACHE, "and each process has only some of the tokens"),
        Need.CROSS: "and it is unknown whether the encoder's tokens are split too",
    },
    "Use a scheme that only depends on positions (rope, alibi, t5, ...), or train without context parallelism.",
)
SHARDED_WEIGHTS = Environment(
    "A model whose weights FSDP or DeepSpeed has already sharded",
    {Need.PARAMETERS: "which would not be sharded, and whose gradients would not be reduced"},
    "Call patch_model before the model is sharded (by FSDP, by an engine of DeepSpeed), or save the patched model and "
    "load it.",
)
ADAPTION_PROMPTS = Environment(
    "A model with PEFT's adaption prompts (Llama-Adapter), which compute the queries of a layer a second time and "
    "rotate them with the phases of the stock model,",
    dict.fromkeys((Need.MAP, Need.ROTATION_BY_INPUT), "which the prompts would not follow"),
    "Use LoRA, prompt tuning or prefix tuning, or a scheme that does not change queries, such as alibi.",
)
LATENT_ATTENTION = Environment(
    "Multi-head latent attention, which rotates the last dimensions of its heads,",
    {
        Need.SECOND_MAP: "which are not rotated here",
        Need.ROTATION_BY_INPUT: "in the first dimensions of whole heads",
    },
    "Use a RoPE scaling or position_scale instead of a second rotation, and 'forget_gate' or 'rope' instead of a "
    "rotation by the input.",
)
CROSS_ATTENTION = Environment(
    "Cross-attention",
    {
        Need.VECTORS: "which acts before the first layer",
        **dict.fromkeys(
            (Need.WIDE_HEADS, Need.SECOND_MAP, Need.ROTATION_BY_INPUT, Need.KEY_TERMS, Need.FEATURES, Need.SCALE),
            "which is defined for the tokens of one sequence",
        ),
        **dict.fromkeys((Need.LENGTH, Need.ALL_TOKENS), "and there are two sequences"),
        Need.COORDINATES: "and the tokens of the encoder are counted on one axis",
    },
    "Use a rotation by fixed frequencies (rope, p_rope, ...), a bias that is a function of distance (alibi, t5, "
    "kerple, ...), or both.",
)
CHANGED_QUERIES = Environment(
    "An attention that changes its queries after rotating them (for example with a norm)",
    {Need.SECOND_MAP: "for which the rotated queries are needed"},
    "Use a RoPE scaling or position_scale instead.",
)
CAPPED_LOGITS = Environment(
    "An attention that caps its logits (attn_logit_softcapping) before a bias is added",
    {Need.CORRECTED_LOGITS: "which would be added to the capped ones"},
    "Use a RoPE scaling or position_scale instead.",
)
SHARED_KEYS = Environment(
    "A layer that reads the keys of an earlier layer",
    {Need.KEYS_OF_LAYER: "but this layer does not update the cache"},
    "Choose layers with layers= that do not share keys with other layers, or use a scheme that treats "
    "all layers alike, such as 'rope' or 'alibi'.",
)
CACHE_OF_OTHERS = Environment(
    "A model in which layers without the scheme read the same cache",
    dict.fromkeys((Need.WIDE_HEADS, Need.FEATURES), "and these layers expect keys of the usual width"),
    "Use a scheme that does not change the width of keys, such as 'rope' or 'alibi'.",
)
POOLED_PATCHES = Environment(
    "Attention over pooled patches",
    dict.fromkeys(IN_ATTENTION, "but queries and keys do not have positions on the same grid"),
    "Use an additive scheme, or 'none'.",
)
SPARSE_ATTENTION = Environment(
    "Sparse or approximate attention",
    dict.fromkeys(IN_ATTENTION, "but the logits of all pairs of tokens are never computed"),
    "Use a scheme that adds vectors to the embeddings, such as 'learned' or 'sinusoidal', or 'none'. If the config has "
    "an `attention_type`, the model supports every scheme with full attention.",
)
GRADUAL_SWAP = Environment(
    "A gradual swap",
    {
        **dict.fromkeys((Need.CORRECTED_LOGITS, Need.ROTATION_BY_INPUT), "which is only correct for a single rotation"),
        Need.WIDE_HEADS: "which cannot be done gradually",
        Need.WHOLE_POSITIONS: "but a blend multiplies them by a fraction",
    },
    "Swap in one step: swap_scheme(model, scheme) without gradual=True.",
)
_PAGED_ENGINE = {
    **dict.fromkeys(NO_GROWING_CACHE, "but the engine stores each key only once, when its token arrives"),
    Need.WIDE_HEADS: "but the pages of the engine have the width of the model's heads",
    Need.ROTATION_BY_INPUT: "but the plug-in rotates only by positions",
    Need.FEATURES: "but the pages of the engine have no room for them",
}
VLLM = Environment(
    "vLLM",
    _PAGED_ENGINE
    | dict.fromkeys(
        (Need.KEY_TERMS, Need.BIAS),
        "and the kernels of the engine support no bias except one slope for each head, as in ALiBi",
    )
    | {Need.SCALED_BIAS: "but the kernels of the engine accept one slope for each head"},
    _OTHER_PROGRAM,
)
SGLANG = Environment(
    "SGLang",
    _PAGED_ENGINE | dict.fromkeys(BIASES, "and the kernels of the engine support neither a bias nor slopes"),
    _OTHER_PROGRAM,
)

#: The engines that run a patched model with a plug-in.
ENGINES = (VLLM, SGLANG)

#: All environments. Export formats state what they have a place for in `hf_posenc.export`.
ENVIRONMENTS = tuple(value for value in list(globals().values()) if isinstance(value, Environment))
