"""Adapts `transformers serve` to patched models: it lists their names, and its errors state the reason."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_posenc.entry import CLASS_PREFIX, is_on_disk_form
from hf_posenc.errors import PositionEncodingError
from hf_posenc.wrapping import Call, wrap

if TYPE_CHECKING:
    from fastapi import Request
    from fastapi.responses import JSONResponse

_PACKAGE = "transformers.cli.serving"


def install() -> None:
    """Wraps functions of the server, as soon as its modules are imported."""
    wrap(f"{_PACKAGE}.server", {"build_server": _build_server})
    wrap(f"{_PACKAGE}.utils", {"_StreamError.__init__": lambda call: call.run(msg=_Message(call["msg"]))})
    wrap(f"{_PACKAGE}.utils", {"get_gen_models": _models}, moved=True)
    wrap(f"{_PACKAGE}.model_manager", {"ModelManager.get_gen_models": _models}, moved=True)


def _build_server(call: Call) -> Any:
    """Builds the server, which answers with the reason if a patched model does not support a request.

    Without a handler, every exception is answered with status 500 and no reason, and clients try again.
    """
    app = call.run()
    app.add_exception_handler(PositionEncodingError, _answer)
    return app


async def _answer(_: Request, error: PositionEncodingError) -> JSONResponse:
    from fastapi.responses import JSONResponse

    content = {"message": str(error), "type": "invalid_request_error", "code": type(error).__name__, "param": None}
    return JSONResponse({"error": content}, status_code=400)


def _models(call: Call) -> list[dict[str, Any]]:
    from huggingface_hub import constants

    cache_dir = call["cache_dir"]
    if not Path(cache_dir or constants.HF_HUB_CACHE).is_dir():
        return []  # The stock code raises an error, which some versions answer with status 500.
    return [*call.run(), *_patched_models(cache_dir)]


def _patched_models(cache_dir: str | None) -> Iterator[dict[str, Any]]:
    """Entries for the patched models in the hub's cache, whose classes have a prefix in the config."""
    from huggingface_hub import scan_cache_dir
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    generative = {f"{CLASS_PREFIX}{name}" for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()}
    for repository in scan_cache_dir(cache_dir).repos:
        for branch, revision in repository.refs.items() if repository.repo_type == "model" else ():
            path = next((file.file_path for file in revision.files if file.file_name == "config.json"), None)
            config: Any = None if path is None else json.loads(path.read_text(encoding="utf-8"))
            if is_on_disk_form(config) and generative & set(config.get("architectures") or ()):
                name = repository.repo_id if branch == "main" else f"{repository.repo_id}@{branch}"
                owner = repository.repo_id.rpartition("/")[0]
                yield {"id": name, "object": "model", "owned_by": owner, "created": repository.last_modified}


class _Message(str):
    """A message that is escaped where the server puts it between quotes, because it builds JSON from f-strings."""

    def __format__(self, form: str) -> str:
        return json.dumps(str(self), ensure_ascii=False)[1:-1]
