"""Models and exports are pushed by one process and loaded by others. A server on this machine stands in for the hub."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard

from tests.hub import Hub, Place, Repository, serving
from tests.hub_clients import Clients

#: Begins each program. `expected` has the outputs of each model that was pushed.
PREAMBLE = """
import json, os, sys
from pathlib import Path
import torch
import transformers
from huggingface_hub import HfApi, hf_hub_download, try_to_load_from_cache
from transformers import AutoModelForCausalLM, AutoConfig, LlamaForCausalLM, pipeline
transformers.logging.set_verbosity_error()
folder = Path(sys.argv[1])
IDS = torch.arange(3, 43).unsqueeze(0)

@torch.no_grad()
def outputs(model):
    return model.eval()(IDS, use_cache=False).logits

def error(call):
    try:
        call()
    except Exception as found:
        return f"{type(found).__name__}: {found} {' '.join(getattr(found, '__notes__', []))}"
    return "no error"

def same(name, *source, load=AutoModelForCausalLM, **options):
    model = load.from_pretrained(*source, **options)
    expected = torch.load(folder / "expected.pt")
    return float((outputs(model) - expected[name]).abs().max())
"""

PUSH = """
import hf_posenc
from tests.models import tiny

def llama(scheme, seed=0, **options):
    torch.manual_seed(seed)
    return hf_posenc.patch_model(tiny("LlamaForCausalLM", vocab_size=64), scheme, **options)

models = {"alibi": llama("alibi"), "t5": llama("t5"), "kerple": llama("kerple"), "theta": llama("rope", theta=500.0)}
first = models["alibi"].push_to_hub("patched")
models["t5"].push_to_hub("someone/patched", revision="other", commit_message="another scheme")
(folder / "saved").mkdir()
(folder / "saved" / "notes.txt").write_text("mine")
models["kerple"].save_pretrained(
    folder / "saved", push_to_hub=True, private=True, commit_message="first", create_pr=False)
hf_posenc.export_model(models["theta"], folder / "shards", push_to_hub="stock", max_shard_size="20KB")
HfApi().upload_file(path_or_fileobj=b"mine", path_in_repo="notes.txt", repo_id="someone/stock")
report = hf_posenc.export_model(models["theta"], folder / "stock", push_to_hub="stock")
hf_posenc.export_model(models["theta"], folder / "again", push_to_hub="someone/stock",
                       hub_options={"revision": "v2", "commit_message": "the second", "private": True})
torch.save({name: outputs(model) for name, model in models.items()}, folder / "expected.pt")
print(json.dumps({"first": first.oid, "files": report.files}))
"""


@pytest.fixture(scope="module")
def place() -> Iterator[Place]:
    with serving(Place(Hub(large=True))) as place:
        yield place


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="module")
def online(place: Place, home: Path) -> Iterator[Clients]:
    with Clients(place.url, home) as clients:
        yield clients


@pytest.fixture(scope="module")
def pushed(place: Place, online: Clients, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("pushed")
    return {"folder": folder, **online(PREAMBLE + PUSH, folder)}


def repository(place: Place, name: str) -> Repository:
    return place.hub.repositories[f"someone/{name}"]


def card(place: Place, name: str, revision: str = "main") -> ModelCard:
    found = repository(place, name).at(revision)
    assert found is not None
    return ModelCard(found.files["README.md"].decode(), ignore_metadata_errors=False)


def test_each_form_is_pushed_whole_and_in_one_commit(place: Place, pushed: dict[str, Any]) -> None:
    assert set(place.hub.repositories) == {"someone/patched", "someone/saved", "someone/stock"}
    main, other = (repository(place, "patched").at(name) for name in ("main", "other"))
    assert main is not None
    assert other is not None
    assert main.oid == pushed["first"]
    assert other.message == "another scheme"
    assert repository(place, "saved").private
    (commit,) = repository(place, "saved").commits[1:]
    assert commit.message == "first"
    for one in (main, commit):
        assert set(one.files) == {"README.md", "config.json", "generation_config.json", "model.safetensors"}
    stock = repository(place, "stock")
    first, _, second, third = stock.commits[1:]
    assert [one.message for one in (first, second, third)] == [
        *["Export of rope(theta=500) to stock"] * 2,
        "the second",
    ]
    assert "model.safetensors.index.json" in first.files
    # The shards are gone, because some programs would load them. What the export did not write stays.
    for one in (second, third):
        assert sorted(one.files) == sorted([*pushed["files"], "notes.txt"])
    assert {"README.md", "export.json", "config.json", "model.safetensors"} <= set(pushed["files"])


def test_cards_say_what_runs_them(place: Place, pushed: dict[str, Any]) -> None:
    patched, saved = card(place, "patched"), card(place, "saved")
    for found, scheme in ((patched, "alibi"), (card(place, "patched", "other"), "t5"), (saved, "kerple")):
        assert {"hf_posenc", "position-encoding", scheme} <= set(found.data.tags or [])
        assert (found.data.library_name, found.data.pipeline_tag) == ("transformers", "text-generation")
        assert found.data.base_model is None
        assert "import hf_posenc  # before from_pretrained" in found.text
        assert "hf-posenc export someone/" in found.text
        assert "automatically generated" not in found.text
    assert 'from_pretrained("someone/patched")' in patched.text
    stock = card(place, "stock")
    assert {"rope", "stock"} <= set(stock.data.tags or [])
    assert 'LlamaForCausalLM.from_pretrained("someone/stock")' in stock.text
    assert "import hf_posenc" not in stock.text
    for found in (patched, saved, stock):
        assert str(pushed["folder"]) not in found.content
        assert "hf_test" not in found.content


LOAD = """
without = {
    "auto": error(lambda: AutoModelForCausalLM.from_pretrained("someone/patched")),
    "concrete": error(lambda: LlamaForCausalLM.from_pretrained("someone/patched")),
    "pipeline": error(lambda: pipeline("text-generation", model="someone/patched")),
    "config": error(lambda: AutoConfig.from_pretrained("someone/patched")),
}
stock = same("theta", "someone/stock", load=LlamaForCausalLM)
assert "hf_posenc" not in sys.modules
import hf_posenc
differences = {
    "stock": stock,
    "stock, branch": same("theta", "someone/stock", revision="v2"),
    "id": same("alibi", "someone/patched"),
    "concrete": same("alibi", "someone/patched", load=LlamaForCausalLM),
    "branch": same("t5", "someone/patched", revision="other"),
    "commit": same("alibi", "someone/patched", revision=sys.argv[2]),
    "another cache": same("kerple", "someone/saved", cache_dir=folder / "cache"),
}
manifest = json.loads(Path(hf_hub_download("someone/stock", "export.json")).read_text())
weights = Path(hf_hub_download("someone/stock", "model.safetensors", revision="v2"))
print(json.dumps({"without": without, "differences": differences, "manifest": manifest,
                  "blob": weights.resolve().name, "cached": try_to_load_from_cache("someone/saved", "config.json")}))
"""


@pytest.fixture(scope="module")
def loaded(online: Clients, pushed: dict[str, Any]) -> dict[str, Any]:
    return online(PREAMBLE + LOAD, pushed["folder"], pushed["first"])


def test_another_process_loads_them_by_name_branch_and_commit(place: Place, loaded: dict[str, Any]) -> None:
    assert loaded["differences"] == dict.fromkeys(loaded["differences"], 0.0)
    assert loaded["cached"] is None, "a model with a cache of its own is in the other one"
    assert loaded["manifest"]["target"] == "stock"
    # Large files are named by their SHA-256, so they were uploaded and downloaded as such.
    assert loaded["blob"] in repository(place, "stock").large


def test_without_the_package_every_route_is_refused_with_its_name(loaded: dict[str, Any]) -> None:
    for route, message in loaded["without"].items():
        assert "install" in message, route
        assert "import" in message, route


OFFLINE = """
import hf_posenc
differences = {
    "id": same("alibi", "someone/patched"),
    "branch": same("t5", "someone/patched", revision="other"),
    "commit": same("alibi", "someone/patched", revision=sys.argv[2]),
    "stock": same("theta", "someone/stock"),
    "another cache": same("kerple", "someone/saved", cache_dir=folder / "cache"),
}
absent = error(lambda: AutoModelForCausalLM.from_pretrained("someone/saved"))
model = AutoModelForCausalLM.from_pretrained("someone/stock")
push = error(lambda: hf_posenc.export_model(model, folder / "kept", push_to_hub="someone/kept"))
print(json.dumps({"differences": differences, "absent": absent, "push": push}))
"""


@pytest.mark.long
def test_offline_they_come_from_the_cache(
    place: Place, home: Path, pushed: dict[str, Any], loaded: dict[str, Any]
) -> None:
    with Clients(place.url, home, offline=True) as offline:
        found = offline(PREAMBLE + OFFLINE, pushed["folder"], pushed["first"])
    assert found["differences"] == dict.fromkeys(found["differences"], 0.0)
    assert "couldn't find them in the cached files" in found["absent"]
    assert "OfflineMode" in found["push"]
    kept = pushed["folder"] / "kept"
    assert f"hf upload someone/kept {kept}" in found["push"]
    assert (kept / "model.safetensors").is_file()


REFUSED = """
import hf_posenc
from tests.models import tiny
model = hf_posenc.patch_model(tiny("LlamaForCausalLM", vocab_size=64), "rope", theta=500.0)
export = error(lambda: hf_posenc.export_model(model, folder / "refused", push_to_hub="someone/refused"))
save = error(lambda: model.save_pretrained(folder / "patched", push_to_hub=True, repo_id="someone/refused"))
loaded = [outputs(AutoModelForCausalLM.from_pretrained(folder / name)) for name in ("refused", "patched")]
differences = [float((outputs(model) - one).abs().max()) for one in loaded]
print(json.dumps({"export": export, "save": save, "differences": differences}))
"""


def test_a_refused_upload_leaves_a_whole_folder_and_says_how_to_go_on(
    place: Place, online: Clients, tmp_path: Path
) -> None:
    before, place.hub = place.hub, Hub(refuse=("/commit/",))
    try:
        found = online(PREAMBLE + REFUSED, tmp_path)
    finally:
        place.hub = before
    for name, folder in (("export", tmp_path / "refused"), ("save", tmp_path / "patched")):
        assert "403" in found[name]
        assert f"{folder} is complete" in found[name]
        assert f"hf upload someone/refused {folder}" in found[name]
    assert found["differences"] == [0.0, 0.0]


CARDS = """
import hf_posenc
from huggingface_hub import ModelCard, upload_file
from tests.models import tiny
def push(scheme):
    model = hf_posenc.patch_model(tiny("LlamaForCausalLM", vocab_size=64), scheme)
    model.push_to_hub("someone/cards")
    return ModelCard.load("someone/cards").content
cards = [push("alibi"), push("t5")]
by_hand = b"---\\nlicense: mit\\n---\\n\\n# By hand"
upload_file(path_or_fileobj=by_hand, path_in_repo="README.md", repo_id="someone/cards")
cards.append(push("kerple"))
reloaded = AutoModelForCausalLM.from_pretrained("someone/cards")
hf_posenc.export_model(hf_posenc.patch_model(reloaded, "rope"), folder / "stock", push_to_hub="someone/exported")
cards.append(ModelCard.load("someone/exported").content)
print(json.dumps(cards))
"""


def test_a_card_follows_the_model_unless_it_was_written_by_hand(place: Place, online: Clients, tmp_path: Path) -> None:
    first, second, by_hand, exported = map(ModelCard, online(PREAMBLE + CARDS, tmp_path))
    assert '"scheme": "alibi"' in first.text
    assert '"scheme": "t5"' in second.text
    assert "alibi" not in second.content
    assert by_hand.text.strip().startswith("# By hand\n\n<!-- hf_posenc")
    assert by_hand.text.count("is `kerple`") == 1
    assert by_hand.data.license == "mit"
    assert by_hand.data.tags == ["hf_posenc", "position-encoding", "kerple"]
    assert exported.data.base_model == "someone/cards"


GGUF = """
import hf_posenc
from gguf import GGUFReader
from tests.export.gguf_cases import byte_tokenizer
from tests.models import tiny
coder = byte_tokenizer()
model = hf_posenc.patch_model(tiny("LlamaForCausalLM", vocab_size=len(coder)), "none")
hf_posenc.export_model(model, folder / "gguf", to="gguf", tokenizer=coder, push_to_hub="gguf")
path = Path(hf_hub_download("someone/gguf", "model.gguf"))
assert path.read_bytes() == (folder / "gguf" / "model.gguf").read_bytes()
print(json.dumps({"tensors": [tensor.name for tensor in GGUFReader(path).tensors], "blob": path.resolve().name}))
"""


@pytest.mark.long
def test_a_file_for_another_program_is_downloaded_whole(place: Place, online: Clients, tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    pytest.importorskip("xllamacpp")
    found = online(PREAMBLE + GGUF, tmp_path)
    assert "rope_freqs.weight" in found["tensors"]
    assert found["blob"] in repository(place, "gguf").large
    written = card(place, "gguf")
    assert written.data.library_name == "gguf"
    assert {"gguf", "none"} <= set(written.data.tags or [])
    assert "hf download someone/gguf --local-dir gguf" in written.text
    assert "gguf/model.gguf" in written.text
    assert "someone/gguf/model.gguf" not in written.text, "programs take no hub id for a path"
