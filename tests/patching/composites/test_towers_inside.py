"""A tower inside a text stack is not a part of the text: a patch of the text does not change its positions."""

from __future__ import annotations

import pytest
import torch

from hf_posenc import patch_model, unpatch_model
from hf_posenc.patching.anatomy.anatomy import Anatomy
from tests.architectures.calling import Caller
from tests.architectures.population import pair_named
from tests.architectures.tiny import tiny_model
from tests.versions import since


@torch.no_grad()
@pytest.mark.parametrize("scheme", ["none", "alibi", "rope"])
def test_git_decodes_and_is_padded_after_a_patch(scheme: str) -> None:
    """The buffers of position ids of the text grow. Those of the vision tower are as long as its patches."""
    since("5.18", "GIT adds the length of its cache to positions that it was not given")
    caller = Caller(pair_named("image-text-git"))
    embeddings = caller.model.git.image_encoder.vision_model.embeddings
    before = embeddings.position_ids.clone()
    patch_model(caller.model, scheme, part="text")
    expected = caller.logits()
    torch.testing.assert_close(caller.decoded(), expected, atol=1e-4, rtol=1e-4)
    caller.padded()
    assert torch.equal(embeddings.position_ids, before)
    unpatch_model(caller.model)


def test_the_table_of_idefics_vision_model_is_not_a_table_of_its_text() -> None:
    model = tiny_model(pair_named("image-text-idefics"))
    (stack,) = Anatomy(model).stacks(["text"])
    assert not stack.tables
    patch_model(model, "none")
    assert "forward" not in model.model.vision_model.embeddings.position_embedding.__dict__
