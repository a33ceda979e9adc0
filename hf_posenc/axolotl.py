"""The plug-in for axolotl: the key `position_encoding` of its YAML files.

```yaml
plugins:
  - hf_posenc.axolotl.PositionEncodingPlugin
position_encoding: alibi
```

Importing this module imports the package, so axolotl reads and writes the checkpoints and adapters of patched models.
"""

from __future__ import annotations

from typing import Any

from axolotl.integrations.base import BasePlugin
from pydantic import BaseModel
from torch import nn

from hf_posenc.checkpoint.loading import read_request
from hf_posenc.errors import UnsupportedError
from hf_posenc.patching.anatomy.anatomy import unwrapped
from hf_posenc.patching.patch import patch_model
from hf_posenc.patching.place.encoding import current_encoding

_FORWARD = "rewrites the code of all attention modules before the model is loaded, so it cannot be patched."
#: What axolotl does with adapters by default, the value that prevents it, and why.
_WITH_ADAPTER: dict[str, tuple[Any, str]] = {
    "lora_qkv_kernel": (False, _FORWARD),
    "lora_o_kernel": (False, _FORWARD),
    "merge_method": ("legacy", "merges the files of the stock model, without the position encoding."),
}


class PositionEncodingArgs(BaseModel):
    """What the plug-in adds to axolotl's settings.

    Attributes:
        position_encoding: as in `from_pretrained`: a name, a dictionary with options, or a list. `None` leaves the
            model as it is.
    """

    position_encoding: str | dict[str, Any] | list[Any] | None = None


class PositionEncodingPlugin(BasePlugin):
    """Patches the model that axolotl has loaded, before it adds an adapter."""

    def __init__(self) -> None:
        super().__init__()
        self._trained: list[nn.Parameter] = []

    def register(self, cfg: dict[str, Any]) -> None:
        """Checks the scheme before axolotl reads any data, and turns off what would bypass it.

        Raises:
            UnknownNameError, ValueError, TypeError: if it is not a scheme.
            UnsupportedError: if a setting does not work with a patched model.
        """
        if cfg.get("position_encoding") is not None:
            read_request(cfg["position_encoding"])
        if cfg.get("adapter"):
            for name, (value, reason) in _WITH_ADAPTER.items():
                if cfg.get(name) not in (None, value):
                    raise UnsupportedError(f"{name}: {cfg[name]} {reason} Set {name}: {value}, or leave it out.")
                cfg[name] = value

    def get_input_args(self) -> str:
        """The name of the class with the plug-in's settings."""
        return f"{__name__}.{PositionEncodingArgs.__name__}"

    def post_model_build(self, cfg: Any, model: nn.Module) -> None:
        """Patches the model.

        Raises:
            UnsupportedError, ValueError: as `patch_model`.
        """
        if cfg.position_encoding is not None:
            scheme, places = read_request(cfg.position_encoding)
            patch_model(model, scheme, **places)
        encoding = current_encoding(unwrapped(model))
        parameters = () if encoding is None else encoding.parameters()
        self._trained = [parameter for parameter in parameters if parameter.requires_grad]

    def post_lora_load(self, cfg: Any, model: nn.Module) -> None:
        """Trains the scheme's parameters along with an adapter, for which PEFT has frozen them."""
        for parameter in self._trained:
            parameter.requires_grad_(True)
