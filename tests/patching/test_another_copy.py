"""A model that was patched before the package was imported again (plugins of pytest and notebooks do so)."""

import json

from tests.fresh import printed, run_fresh

PROGRAM = """
import json, sys, torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from tests.models import tiny
import hf_posenc

inputs = torch.arange(12)[None]
model = hf_posenc.patch_model(tiny("LlamaForCausalLM").eval(), "rope", theta=77.0)
with torch.no_grad():
    before = model(inputs).logits

for name in [name for name in sys.modules if name.partition(".")[0] == "hf_posenc"]:
    del sys.modules[name]
import hf_posenc

calls = {
    "unpatch": lambda: hf_posenc.unpatch_model(model),
    "patch": lambda: hf_posenc.patch_model(model, "t5"),
    "inspect": lambda: hf_posenc.inspect_model(model),
    "native": lambda: hf_posenc.native_scheme(model),
    "extend": lambda: hf_posenc.extend_context(model, length=4096),
    "save": lambda: model.save_pretrained("old"),
    "save stock": lambda: hf_posenc.export_model(model, "stock"),
    "load": lambda: model.load_state_dict(model.state_dict()),
    "adapter": lambda: hf_posenc.save_position_adapter(model, "adapter"),
}
found = {"refused": {}}
for name, call in calls.items():
    try:
        call()
    except hf_posenc.UnsupportedError as error:
        found["refused"][name] = str(error)
found["not refused"] = sorted(set(calls) - set(found["refused"]))
with torch.no_grad():
    found["unchanged"] = torch.equal(model(inputs).logits, before)

# Models that the new copy patches are its own, from disk too.
new = hf_posenc.patch_model(tiny("LlamaForCausalLM").eval(), "alibi")
new.save_pretrained("new")
loaded = AutoModelForCausalLM.from_pretrained("new").eval()
with torch.no_grad():
    found["reloaded"] = torch.equal(loaded(inputs).logits, new(inputs).logits)
hf_posenc.unpatch_model(loaded)
found["undone"] = not hasattr(loaded, "position_encoding")
layers = 0
wrapped = PreTrainedModel.__dict__["save_pretrained"]
while hasattr(wrapped, "_hf_posenc_wraps"):
    wrapped, layers = wrapped._hf_posenc_wraps, layers + 1
found["wrappers"] = layers
print(json.dumps(found))
"""


def test_what_would_touch_the_patch_is_refused_by_name_and_the_new_copy_takes_over(tmp_path):
    found = json.loads(printed(run_fresh(PROGRAM, folder=tmp_path)))
    assert [path.name for path in tmp_path.iterdir()] == ["new"]
    refused = found.pop("refused")
    assert all("was patched by another copy of hf_posenc" in text for text in refused.values()), refused
    # Its wrappers replace those of the old copy instead of wrapping them.
    assert found == {"not refused": [], "unchanged": True, "reloaded": True, "undone": True, "wrappers": 1}
