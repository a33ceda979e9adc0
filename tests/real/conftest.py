import importlib.util
import os
import sys
from pathlib import Path

import pytest


def _packaged_models():
    path = Path(__file__).parents[2] / "eval" / "packaged_models.py"
    spec = importlib.util.spec_from_file_location("packaged_models", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules["packaged_models"] = module
    spec.loader.exec_module(module)
    return module


packaged_models = _packaged_models()


def _located(find):
    try:
        return find()
    except (FileNotFoundError, ImportError) as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def minilm_folder():
    return _located(packaged_models.MINILM.locate)


@pytest.fixture(scope="session")
def smollm2_folder(request):
    """SmolLM2-135M, converted once into $HF_POSENC_ASSETS, or into pytest's cache."""
    assets = os.environ.get("HF_POSENC_ASSETS") or request.config.cache.mkdir("hf_posenc_assets")
    return _located(lambda: packaged_models.convert_smollm2(Path(assets) / "smollm2-135m"))
