"""Programs that load a model by the name of its folder and answer requests."""

from __future__ import annotations

from typing import Any

import torch

from tests.integrations.subject import NEW_TOKENS, argmax_decoding, llama, saved, text, tokenizer, tokens
from tests.integrations.tool import Tool


def _serve(scheme: Any) -> None:
    from tests.serving.chats import server

    model, prompt = llama(scheme), tokens(1, 9)
    expected = argmax_decoding(model, prompt)[:, 9:]
    with saved(model) as path, server() as served:
        answer = served.completions.create(model=path, prompt=text(prompt[0]), max_tokens=NEW_TOKENS, temperature=0.0)
    wanted = tokenizer().decode(expected[0], skip_special_tokens=True)
    assert answer.choices[0].text.split() == wanted.split()


def _lm_eval(scheme: Any) -> None:
    """Log-likelihoods of continuations of different lengths in one batch."""
    from lm_eval.models.huggingface import HFLM

    model = llama(scheme)
    evaluated = HFLM(pretrained=model, tokenizer=tokenizer(), batch_size=2, device="cpu", max_length=48)
    pairs = [(tokens(1, 9)[0], tokens(1, 4, seed=2)[0]), (tokens(1, 5, seed=3)[0], tokens(1, 2, seed=4)[0])]
    requests = [(("", ""), context.tolist(), continuation.tolist()) for context, continuation in pairs]
    found = evaluated._loglikelihood_tokens(requests, disable_tqdm=True)
    for (context, continuation), (likelihood, _) in zip(pairs, found, strict=True):
        ids = torch.cat((context, continuation))
        with torch.no_grad():
            logits = model(ids.unsqueeze(0), use_cache=False).logits[0].log_softmax(-1)
        own = logits[len(context) - 1 : -1].gather(-1, continuation.unsqueeze(-1)).sum()
        assert abs(likelihood - float(own)) <= 1e-3, f"log-likelihood {likelihood}, expected {float(own)}"


TOOLS = [
    Tool("Serving and evaluating", "transformers serve, completions", _serve, "most likely tokens, no cache",
         ("fastapi", "uvicorn", "openai")),
    Tool("Serving and evaluating", "lm-eval, log-likelihoods in a batch", _lm_eval, "each row alone", ("lm_eval",)),
]  # fmt: skip
