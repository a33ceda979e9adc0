"""`position_encoding=` in `from_pretrained` and `from_config`: the same as `patch_model` behind them."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    pipeline,
)

from hf_posenc import AlibiConfig, UnknownNameError, UnsupportedError, patch_model
from hf_posenc.errors import UsageError
from tests.architectures.population import pair_named
from tests.architectures.tiny import tiny_model
from tests.checkpoint.checkpoint_cases import write_stock_llama
from tests.matrix.running import tokens
from tests.models import tiny, tiny_config

#: What is asked for, and the call of `patch_model` that does the same.
REQUESTS: dict[str, tuple[Any, tuple[Any, dict[str, Any]]]] = {
    "a name": ("alibi", ("alibi", {})),
    "a name with options": ("rope:theta=500000", ("rope", {"theta": 5e5})),
    "a dictionary": ({"scheme": "rope", "theta": 5e5}, ("rope", {"theta": 5e5})),
    "a config": (AlibiConfig(learnable=True), (AlibiConfig(learnable=True), {})),
    "several": (["rope", "alibi"], (["rope", "alibi"], {})),
    "some layers": (
        {"scheme": "alibi", "layers": [1], "elsewhere": "none"},
        ("alibi", {"layers": [1], "elsewhere": "none"}),
    ),
    "a scheme with an option of that name": (
        {"scheme": "schedule", "layers": ["alibi", "rope"]},
        ({"scheme": "schedule", "layers": ["alibi", "rope"]}, {}),
    ),
    "a name with options in some layers": (
        {"scheme": "rope:theta=500000", "layers": [1]},
        ("rope", {"theta": 5e5, "layers": [1]}),
    ),
    "several in some layers": ({"scheme": ["native", "ssmax"], "layers": [0]}, (["native", "ssmax"], {"layers": [0]})),
    "native": ("native", ("native", {})),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A stock model in several files, and a patched one."""
    root = tmp_path_factory.mktemp("models")
    model = tiny("LlamaForCausalLM")
    model.save_pretrained(root / "stock", max_shard_size="20KB")
    assert len(list((root / "stock").glob("*.safetensors"))) > 1
    patch_model(model, "t5").save_pretrained(root / "patched")
    return {name: root / name for name in ("stock", "patched")}


def expected(folder: Path, request: str) -> Any:
    scheme, places = REQUESTS[request][1]
    return patch_model(AutoModelForCausalLM.from_pretrained(folder), scheme, **places)


def assert_equal(model: Any, wanted: Any) -> None:
    assert type(model) is type(wanted)
    assert model.position_encoding.config == wanted.position_encoding.config
    torch.testing.assert_close(model.eval()(tokens()).logits, wanted.eval()(tokens()).logits, atol=0, rtol=0)


def _with_info(folder: Path, **request: Any) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True, **request)[0]


def _pipeline(folder: Path, **request: Any) -> Any:
    return pipeline("text-generation", str(folder), model_kwargs=request).model


def _sentence_transformer(folder: Path, **request: Any) -> Any:
    modules = pytest.importorskip("sentence_transformers.models")
    return modules.Transformer(str(folder), model_args=request).auto_model


def _lm_eval(folder: Path, **request: Any) -> Any:
    models = pytest.importorskip("lm_eval.models.huggingface")
    name = request["position_encoding"]
    return models.HFLM.create_from_arg_string(f"pretrained={folder},position_encoding={name},device=cpu").model


def _trl(folder: Path, **request: Any) -> Any:
    trl = pytest.importorskip("trl")
    data = datasets.Dataset.from_dict({"text": ["word5 word6", "word7 word8"]})
    arguments = trl.SFTConfig(
        str(folder / "out"), model_init_kwargs=request, use_cpu=True, bf16=False, report_to="none"
    )
    return trl.SFTTrainer(str(folder), args=arguments, train_dataset=data).model


def _peft(folder: Path, **request: Any) -> Any:
    peft = pytest.importorskip("peft")
    base = LlamaForCausalLM.from_pretrained(folder, **request)
    peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules=["q_proj"])).save_pretrained(folder / "adapter")
    return peft.AutoPeftModelForCausalLM.from_pretrained(folder / "adapter", **request).get_base_model()


@pytest.mark.parametrize(
    "load", [LlamaForCausalLM.from_pretrained, _with_info, _pipeline, _sentence_transformer, _lm_eval, _trl, _peft]
)
def test_every_tool_that_passes_arguments_on(load: Callable[..., Any], tmp_path: Path) -> None:
    folder = write_stock_llama(tmp_path)
    model, wanted = load(folder, position_encoding="alibi"), expected(folder, "a name")
    assert model.position_encoding.config == AlibiConfig()
    backbones = [one.eval().model if hasattr(one, "lm_head") else one.eval() for one in (model, wanted)]
    found, hidden = (one(tokens() % 60, use_cache=False).last_hidden_state for one in backbones)
    torch.testing.assert_close(found.float(), hidden, atol=0, rtol=0)


@pytest.mark.parametrize("options", [{"device_map": {"": "cpu"}}, {"dtype": torch.bfloat16}], ids=str)
def test_options_of_loading(folders: dict[str, Path], options: dict[str, Any]) -> None:
    for folder in folders.values():
        model = AutoModelForCausalLM.from_pretrained(folder, position_encoding="alibi", **options)
        assert_equal(model, patch_model(AutoModelForCausalLM.from_pretrained(folder, **options), "alibi"))


def test_a_quantised_load(folders: dict[str, Path]) -> None:
    pytest.importorskip("bitsandbytes")
    options = {"quantization_config": BitsAndBytesConfig(load_in_8bit=True), "device_map": "cpu"}
    model = AutoModelForCausalLM.from_pretrained(folders["stock"], position_encoding="alibi", **options)
    assert_equal(model, patch_model(AutoModelForCausalLM.from_pretrained(folders["stock"], **options), "alibi"))


@pytest.mark.parametrize("request_", REQUESTS)
@pytest.mark.parametrize("kind", ["stock", "patched"])
def test_a_model_is_patched_and_a_config_keeps_what_it_was_read_with(
    folders: dict[str, Path], kind: str, request_: str
) -> None:
    requested = REQUESTS[request_][0]
    config = AutoConfig.from_pretrained(folders[kind], position_encoding=requested)
    before, again = config.to_json_string(), LlamaConfig.from_pretrained(folders[kind], position_encoding=requested)
    assert again.to_json_string() == before
    wanted = expected(folders[kind], request_)
    assert_equal(AutoModelForCausalLM.from_pretrained(folders[kind], position_encoding=requested), wanted)
    for load in (LlamaForCausalLM.from_pretrained, AutoModelForCausalLM.from_pretrained):
        model = load(folders[kind], config=config)
        assert_equal(model, wanted)
        assert model.config.to_dict().keys() == wanted.config.to_dict().keys()
    new = AutoModelForCausalLM.from_config(config), AutoModelForCausalLM.from_config(config, position_encoding="alibi")
    assert [one.position_encoding.config for one in new] == [wanted.position_encoding.config, AlibiConfig()]
    assert config.to_json_string() == before
    with pytest.raises(UnsupportedError, match=r"from_config\(config\)"):
        LlamaForCausalLM(config)
    with pytest.raises(UnknownNameError, match="Did you mean 'alibi'"):
        AutoConfig.from_pretrained(folders[kind], position_encoding="alibbi")


def test_a_part_is_named_in_the_dictionary(tmp_path: Path) -> None:
    model = tiny_model(pair_named("image-text-llava"))
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path, position_encoding={"scheme": "none", "part": "vision"})
    assert loaded.position_encoding.config.by_part().keys() == {"vision"}


def test_none_is_no_request(folders: dict[str, Path]) -> None:
    stock = AutoModelForCausalLM.from_pretrained(folders["stock"], position_encoding=None)
    assert not hasattr(stock, "position_encoding")
    patched = AutoModelForCausalLM.from_pretrained(folders["patched"], position_encoding=None)
    assert patched.position_encoding.config.name == "t5"


@pytest.mark.parametrize(
    ("request_", "error", "words"),
    [
        ("alibbi", UnknownNameError, "Did you mean 'alibi'"),
        ("rope:thetta=1", UnknownNameError, "Did you mean 'theta'"),
        ("rope:theta=-1", UsageError, "theta"),
        ({"scheme": "rope", "thetta": 1.0}, UnknownNameError, "Did you mean 'theta'"),
        ({"scheme": "alibi", "layer": [0]}, UnknownNameError, "Did you mean 'layers'"),
        (
            {"scheme": "alibi", "gradual": True},
            UnknownNameError,
            r"'alibi'\. It is not an option of a scheme, but an arg",
        ),
        ({"scheme": "alibi", "layers": [5]}, ValueError, "layers with self-attention are"),
        ({"scheme": "alibi", "part": "vision"}, UnknownNameError, "vision"),
        (3, ValueError, "Not a scheme"),
    ],
    ids=str,
)
def test_what_cannot_be_placed_raises(
    folders: dict[str, Path], request_: Any, error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        AutoModelForCausalLM.from_pretrained(folders["stock"], position_encoding=request_)


@pytest.mark.parametrize("trained", ["alibi", None])
def test_an_adapter_keeps_the_scheme_it_was_trained_with(
    folders: dict[str, Path], tmp_path: Path, trained: str | None
) -> None:
    peft = pytest.importorskip("peft")
    base = AutoModelForCausalLM.from_pretrained(folders["stock"], position_encoding=trained)
    peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules=["q_proj"])).save_pretrained(tmp_path)
    same = AutoModelForCausalLM.from_pretrained(tmp_path, position_encoding=trained)
    assert hasattr(same, "position_encoding") == (trained is not None)
    adapter = f"The adapter in {re.escape(str(tmp_path))}"
    refused = pytest.warns(UserWarning, match=f"{adapter} names no position encoding")
    refusal = pytest.raises(UnsupportedError, match=f"{adapter} was trained with the scheme 'alibi'")
    with refused if trained is None else refusal:
        AutoModelForCausalLM.from_pretrained(tmp_path, position_encoding="t5")


def test_a_wrong_name_is_found_before_anything_is_read(tmp_path: Path) -> None:
    with pytest.raises(UnknownNameError):
        LlamaForCausalLM.from_pretrained(tmp_path / "nothing", position_encoding="alibbi")


class OwnConfig(LlamaConfig):
    """A config of another project."""

    model_type = "own_positions"

    def __init__(self, position_encoding: str = "theirs", **fields: Any) -> None:
        super().__init__(**fields)
        self.position_encoding = position_encoding


class OwnModel(PreTrainedModel):
    """Reads an argument of this name itself."""

    config_class = OwnConfig

    def __init__(self, config: OwnConfig) -> None:
        super().__init__(config)
        self.linear = torch.nn.Linear(2, 2)
        self.post_init()


def test_the_argument_of_another_project_stays_theirs(tmp_path: Path) -> None:
    OwnModel(OwnConfig()).save_pretrained(tmp_path)
    assert OwnModel.from_pretrained(tmp_path, position_encoding="special").config.position_encoding == "special"
    assert OwnConfig.from_pretrained(tmp_path, position_encoding="special").position_encoding == "special"


def test_a_warning_points_at_the_line_that_asked() -> None:
    """Both ways to ask are of different depth in this library and in transformers."""
    config = tiny_config("LlamaForCausalLM", rope_parameters={"rope_type": "default", "rope_theta": 5e5})
    with warnings.catch_warnings(record=True, action="always") as caught:
        patch_model(LlamaForCausalLM(config), "p_rope")
        AutoModelForCausalLM.from_config(config, position_encoding="p_rope")
    places = [Path(warning.filename).name for warning in caught if "rotates with theta" in str(warning.message)]
    assert places == ["test_requested.py"] * 2
