"""Which code a run used, where its scheme is defined in a module of the user's own."""

from __future__ import annotations

import ast
import hashlib
import sys
from pathlib import Path

from hf_posenc.schemes.config import SchemeConfig


def scheme_code(config: SchemeConfig | None) -> str | None:
    """Returns a digest of the modules that define a scheme and the schemes inside it.

    Comments and formatting do not change the digest. It covers the modules with the configs, not others that they
    import.

    Args:
        config: the scheme; `None` for an unpatched model.

    Returns:
        16 hexadecimal digits, or `None` if the modules are all part of hf_posenc or have no source file.
    """
    files = {getattr(sys.modules[module], "__file__", None) for module in _modules(config)}
    sources = sorted(file for file in files if file and file.endswith(".py") and Path(file).is_file())
    code = [ast.dump(ast.parse(Path(file).read_bytes())) for file in sources]
    return hashlib.sha256("\n".join(code).encode()).hexdigest()[:16] if code else None


def _modules(config: SchemeConfig | None) -> set[str]:
    if config is None:
        return set()
    inside = {module for child in config.children().values() for module in _modules(child)}
    defined_in = type(config).__module__
    return inside if defined_in.partition(".")[0] == "hf_posenc" else inside | {defined_in}
