"""Gradual swaps: both ends, the strength in between, trained parameters, and the final model."""

from __future__ import annotations

import copy
import itertools
import warnings
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Trainer

import hf_posenc
from hf_posenc import UnsupportedError, patch_model
from hf_posenc.checkpoint.agreement import SchemeMismatchError
from hf_posenc.recipes import (
    GradualSwapCallback,
    begin_blend,
    blend_strength,
    finish_blend,
    set_blend_strength,
    swap_scheme,
)
from hf_posenc.schemes import (
    AlibiConfig,
    LinearScaling,
    NoneConfig,
    RopeConfig,
    ScheduleConfig,
    T5Config,
    YarnScaling,
)
from tests.matrix.running import distance, outputs, patched, tokens
from tests.thinning import in_turn, mostly_slow

from .test_phases import Copying, arguments_of

#: float32 in two tiny layers. At the ends the share of the other scheme is an exact zero, except that the normalised
#: shares of FoPE add up to 1 only up to rounding.
CLOSE = 5e-6

#: One scheme for each mechanism: tables, formulas, rotations of several kinds, biases that read distance, pairs,
#: queries or hidden states, scales, and several at once.
MECHANISMS: list[Any] = [
    "none",
    "learned",
    "sinusoidal",
    "rope",
    "p_rope",
    "fope",
    "string",
    "alibi",
    "t5",
    "fire",
    "shaw",
    "ssmax",
    ["rope", "ssmax", "t5"],
]
CAUSAL_ONLY: list[Any] = ["xpos", "cope", "forget_gate"]


def _loaded(folder: Any) -> Any:
    # The tiny models run eager attention; sdpa would round otherwise.
    return AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()


@torch.no_grad()
def _outputs(model: Any) -> torch.Tensor:
    return outputs(model, tokens())


def _name(scheme: Any) -> str:
    return "native" if scheme is None else scheme if isinstance(scheme, str) else "+".join(scheme)


def _check_both_ends(architecture: str, old: Any, new: Any) -> None:
    ids = tokens(length=10)
    model = patched(architecture, old).eval()
    with torch.no_grad():
        before = outputs(model, ids)
        begin_blend(model, new)
        assert distance(outputs(model, ids), before) < CLOSE
        set_blend_strength(model, 0.5)
        between = outputs(model, ids)
        set_blend_strength(model, 1.0)
        at_the_end = outputs(model, ids)
        trained = {id(p) for p in model.position_encoding.parameters() if p.requires_grad}
        finish_blend(model)
        assert torch.isfinite(between).all()
        assert distance(outputs(model, ids), at_the_end) < CLOSE
    assert {id(parameter) for parameter in model.position_encoding.parameters()} == trained
    plain = patched(architecture, new).eval()
    plain.load_state_dict(model.state_dict())
    with torch.no_grad():
        assert distance(outputs(plain, ids), at_the_end) < CLOSE
    assert model.position_encoding.config == plain.position_encoding.config


STARTS, GOALS = [None, *MECHANISMS, *CAUSAL_ONLY], MECHANISMS + CAUSAL_ONLY


def _in_turn(pair: tuple[Any, Any]) -> bool:
    """Every eighth pair, on diagonals: by default each scheme still meets two others on either side."""
    return (STARTS.index(pair[0]) + GOALS.index(pair[1])) % 8 == 0


@pytest.mark.parametrize(("old", "new"), mostly_slow(itertools.product(STARTS, GOALS), _in_turn), ids=_name)
def test_every_pair_in_a_decoder(old, new):
    _check_both_ends("llama_gqa", old, new)


@pytest.mark.parametrize(("new", "old"), in_turn(MECHANISMS, [None, "t5"]), ids=_name)
def test_every_mechanism_in_an_encoder(old, new):
    _check_both_ends("bert", old, new)


def test_equal_schemes_on_both_sides_share_nothing():
    model = patched("llama_gqa", "t5")
    old = model.position_encoding.stacks["model"].layers[0].logit_bias.weight.detach().clone()
    begin_blend(model, "t5")
    blend = model.position_encoding.stacks["model"].layers[0].logit_bias
    assert torch.equal(blend.old.weight, old)
    assert not torch.equal(blend.new.weight, old)


#: The temperature of YaRN comes by degrees.
SCALED = RopeConfig(scaling=YarnScaling(factor=4.0, original_max_positions=8, attention_factor=1.5))
LAYERED = ScheduleConfig((RopeConfig(), NoneConfig()))


@pytest.mark.parametrize(
    ("old", "new", "strength", "expected"),
    [
        # A quarter of all positions is position interpolation by 4; angles differ by the rounding of a product.
        (None, "none", 0.75, RopeConfig(scaling=LinearScaling(4.0))),
        ("rope", SCALED, 1.0, SCALED),
        # Layers that differ are blended one by one.
        (None, LAYERED, 1.0, LAYERED),
    ],
    ids=["frequencies", "temperature", "layers"],
)
def test_a_share_of_the_new_scheme_is_a_scheme(old, new, strength, expected):
    model = patched("llama_gqa", old).eval()
    before = _outputs(model)
    begin_blend(model, new)
    assert distance(_outputs(model), before) < CLOSE
    set_blend_strength(model, strength)
    if strength == 1:
        finish_blend(model)
        assert model.position_encoding.config == expected
    assert distance(_outputs(model), _outputs(patched("llama_gqa", expected).eval())) < 1e-5


def test_the_way_is_continuous():
    model = patched("llama_gqa", None).eval()
    begin_blend(model, ["sinusoidal", "alibi", "ssmax"])
    way = []
    for strength in torch.linspace(0, 1, 41).tolist():
        set_blend_strength(model, strength)
        way.append(_outputs(model))
    whole = distance(way[-1], way[0])
    steps = [distance(after, before) for before, after in itertools.pairwise(way)]
    assert max(steps) < whole / 2


def test_a_blend_is_saved_and_loaded_at_its_strength(tmp_path):
    ids = tokens()
    model = patched("llama_gqa", "t5").eval()
    begin_blend(model, "alibi")
    set_blend_strength(model, 0.3)
    model.save_pretrained(tmp_path)
    loaded = _loaded(tmp_path)
    assert blend_strength(loaded) == 0.3
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, model(ids).logits)
    # A deep copy has a separate strength.
    other = copy.deepcopy(model)
    set_blend_strength(other, 0.6)
    assert (blend_strength(model), blend_strength(other)) == (0.3, 0.6)


def test_only_the_new_scheme_is_trained():
    model = patched("bert", None)
    begin_blend(model, "t5")
    trained = [name for name, parameter in model.position_encoding.named_parameters() if parameter.requires_grad]
    assert len(trained) == 1
    outputs(model, tokens()).sum().backward()
    # At strength 0 there is a gradient, of zeros: the optimizer and DDP see a parameter in use.
    assert all(
        torch.equal(p.grad, torch.zeros_like(p)) for p in model.position_encoding.parameters() if p.requires_grad
    )


def test_what_cannot_act_by_degrees_is_refused_and_changes_nothing():
    """As the old scheme; `tests/patching/test_needs.py` has those that cannot be the new one."""
    model = patched("llama_gqa", "pope").eval()
    before = _outputs(model)
    for attempt in (lambda: begin_blend(model, "rope"), lambda: swap_scheme(model, "rope", gradual=True)):
        with pytest.raises(UnsupportedError, match="makes queries and keys wider"):
            attempt()
    assert torch.equal(_outputs(model), before)
    assert model.position_encoding.config.name == "pope"


def test_calls_out_of_turn_are_refused():
    model = patched("llama_gqa", None)
    for call in (lambda: set_blend_strength(model, 0.5), lambda: finish_blend(model)):
        with pytest.raises(UnsupportedError, match="gradual=True"):
            call()
    assert blend_strength(model) is None
    begin_blend(model, "alibi")
    with pytest.raises(UnsupportedError, match="already a blend"):
        begin_blend(model, "none")
    with pytest.raises(ValueError, match=r"strength is 1\.5"):
        set_blend_strength(model, 1.5)
    assert blend_strength(model) == 0.0
    with pytest.raises(UnsupportedError, match=r"strength of the new scheme is 0\.0"):
        finish_blend(model)


def test_a_blend_is_no_stock_model(tmp_path):
    model = patched("llama_gqa", None)
    begin_blend(model, "none")
    with pytest.raises(UnsupportedError, match="blended"):
        hf_posenc.export_model(model, tmp_path)


# In a Trainer


def _trainer(model: Any, folder: Any, steps: int, gradual: int, **options: Any) -> Trainer:
    data, callback = Copying(), GradualSwapCallback(gradual)
    arguments = arguments_of(folder, steps, **options)
    return Trainer(model, arguments, train_dataset=data, eval_dataset=data, callbacks=[callback])


def _losses(trainer: Trainer) -> dict[int, float]:
    return {entry["step"]: entry["loss"] for entry in trainer.state.log_history if "loss" in entry}


def _blend(new: Any) -> Any:
    model = patched("llama_gqa", None)
    torch.manual_seed(11)
    swap_scheme(model, new, gradual=True, initialization="default")
    return model


def test_training_leaves_the_plain_new_scheme(tmp_path):
    model = _blend("t5")
    start = [p.detach().clone() for p in model.position_encoding.parameters() if p.requires_grad]
    trainer = _trainer(model, tmp_path, steps=12, gradual=8)
    trainer.train()
    assert model.position_encoding.config == T5Config()
    (trained,) = model.position_encoding.parameters()
    assert not torch.allclose(trained, start[0], atol=1e-3)
    model.save_pretrained(tmp_path / "model")
    loaded = _loaded(tmp_path / "model")
    ids = tokens()
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, model.eval()(ids).logits)
    # The optimizer still holds the very parameters of the model that is left.
    held = {id(parameter) for group in trainer.optimizer.param_groups for parameter in group["params"]}
    assert {id(parameter) for parameter in model.parameters() if parameter.requires_grad} <= held


def test_a_gradual_swap_loses_less_on_the_way_than_a_sudden_one(tmp_path):
    pretrained = patched("llama_gqa", None)
    _trainer_without_swap(pretrained, tmp_path, 80).train()
    sudden, gradual = copy.deepcopy(pretrained), copy.deepcopy(pretrained)
    patch_model(sudden, "none")
    swap_scheme(gradual, "none", gradual=True)
    at_once, by_degrees = _trainer_without_swap(sudden, tmp_path, 1), _trainer(gradual, tmp_path, 40, 30)
    at_once.train()
    by_degrees.train()
    assert max(_losses(by_degrees).values()) < _losses(at_once)[1] - 0.1


def _trainer_without_swap(model: Any, folder: Any, steps: int) -> Trainer:
    trainer = _trainer(model, folder, steps, 1)
    trainer.remove_callback(GradualSwapCallback)
    return trainer


def test_a_resumed_run_is_the_same_run(tmp_path):
    whole = _trainer(_blend("t5"), tmp_path / "whole", steps=10, gradual=8)
    whole.train()
    cut = _trainer(_blend("t5"), tmp_path / "cut", steps=10, gradual=8, save_strategy="steps", save_steps=4)
    cut.train()
    model = _blend("t5")
    resumed = _trainer(model, tmp_path / "cut", steps=10, gradual=8, save_strategy="no")
    resumed.train(resume_from_checkpoint=str(tmp_path / "cut" / "checkpoint-4"))
    assert _losses(resumed) == _losses(whole)
    assert model.position_encoding.config == T5Config()
    # The checkpoint itself is the model that step 4 was made with.
    checkpoint = _loaded(tmp_path / "cut" / "checkpoint-4")
    assert blend_strength(checkpoint) == 4 / 8
    with pytest.raises(SchemeMismatchError, match="strength"):
        _trainer_without_swap(_blend("t5"), tmp_path / "plain", 10).train(str(tmp_path / "cut" / "checkpoint-4"))


def test_a_training_that_cannot_reach_the_new_scheme_is_refused(tmp_path):
    with pytest.raises(ValueError, match="ends after 5"):
        _trainer(_blend("alibi"), tmp_path, steps=5, gradual=6).train()
    best = {"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps"}
    with pytest.raises(ValueError, match="eval_delay=4"):
        _trainer(_blend("alibi"), tmp_path, steps=8, gradual=4, save_steps=2, **best).train()
    with pytest.raises(UnsupportedError, match="gradual=True"):
        _trainer(patched("llama_gqa", "alibi"), tmp_path, steps=5, gradual=3).train()


def test_a_training_stopped_on_the_way_leaves_the_blend_and_says_so(tmp_path):
    from transformers import TrainerCallback

    class Stop(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            control.should_training_stop = state.global_step == 3

    model = _blend("alibi")
    trainer = _trainer(model, tmp_path, steps=10, gradual=6)
    trainer.add_callback(Stop())
    with pytest.warns(UserWarning, match="after 3 of 6 gradual steps"):
        trainer.train()
    assert blend_strength(model) == 3 / 6
    with warnings.catch_warnings(action="error"):
        set_blend_strength(model, 1.0)
        finish_blend(model)
    assert model.position_encoding.config == AlibiConfig()
