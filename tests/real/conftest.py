import os
from pathlib import Path

import pytest

from eval import packaged_models


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
