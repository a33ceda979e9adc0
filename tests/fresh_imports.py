"""What a fresh process of a test has imported before it begins: everything that takes seconds, and not this package."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import accelerate  # noqa: F401
import safetensors.torch  # noqa: F401
import torch
from transformers import (  # noqa: F401
    AutoModelForCausalLM,
    BertForMaskedLM,
    GPT2LMHeadModel,
    LlamaForCausalLM,
    T5ForConditionalGeneration,
    pipeline,
)

torch.set_num_threads(1)
