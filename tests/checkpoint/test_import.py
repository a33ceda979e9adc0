"""The public names, and what importing them costs."""

from __future__ import annotations

import ast

import pytest

import hf_posenc
from tests.fresh import ROOT, printed, run_fresh, run_python


def test_every_public_name_exists_and_is_documented() -> None:
    for name in hf_posenc.__all__:
        value = getattr(hf_posenc, name)
        assert name == "__version__" or value.__doc__, name
    assert set(hf_posenc.__all__) <= set(dir(hf_posenc))
    with pytest.raises(AttributeError, match="no attribute 'patch_modle'"):
        _ = hf_posenc.patch_modle


def test_type_checkers_see_the_same_names() -> None:
    """They take the names that are imported under their own name."""
    seen = {"__version__"}
    for folder in ("hf_posenc", "hf_posenc/schemes"):
        tree = ast.parse((ROOT / folder / "__init__.py").read_text())
        imported = [alias for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for alias in node.names]
        seen |= {alias.name for alias in imported if alias.asname == alias.name}
    assert seen - {"metrics", "plots", "recipes", "schemes"} == set(hf_posenc.__all__)


def test_import_is_cheap() -> None:
    code = "import time; start = time.process_time(); import hf_posenc; print(time.process_time() - start)"
    assert float(printed(run_python("-c", code))) < 0.2


def test_subpackages_are_attributes_after_one_import() -> None:
    code = (
        "import hf_posenc; print(hf_posenc.recipes.drope.__name__, hf_posenc.metrics.dog_test.__name__, "
        "hf_posenc.schemes.get_scheme.__name__, hf_posenc.plots.__name__, {'metrics', 'plots', 'recipes'} <= "
        "set(dir(hf_posenc)))"
    )
    assert printed(run_fresh(code)).split() == ["drope", "dog_test", "get_scheme", "hf_posenc.plots", "True"]


def test_figures_are_attributes_too() -> None:
    pytest.importorskip("matplotlib")
    from hf_posenc.plots.dog import plot_dog
    from hf_posenc.plots.schemes.catalogue import plot_scheme

    assert hf_posenc.plots.plot_dog is plot_dog
    assert hf_posenc.plots.schemes.plot_scheme is hf_posenc.plots.plot_scheme is plot_scheme
    with pytest.raises(AttributeError, match="Did you mean 'plot_scheme'"):
        _ = hf_posenc.plots.plot_shceme


def test_every_shipped_config_is_listed_by_name_in_both_packages() -> None:
    import hf_posenc.schemes as schemes

    configs = {found for found in schemes.registered_configs() if found.__module__.startswith("hf_posenc.")}
    names = {found.__name__ for found in configs} | set(_subclasses(schemes.RopeScaling))
    assert len(configs) > 40
    assert "ResonanceScaling" in names
    for package in (hf_posenc, schemes):
        assert names - set(package.__all__) == set(), package.__name__


def _subclasses(owner: type) -> list[str]:
    """Those with a type, by which a config names them. Others are bases of several."""
    found = [kind for kind in owner.__subclasses__() if "type" in vars(kind)]
    bases = [kind for kind in owner.__subclasses__() if kind not in found]
    return [*(kind.__name__ for kind in found), *(name for kind in (*found, *bases) for name in _subclasses(kind))]


@pytest.mark.parametrize(
    ("wrong", "right"),
    [("AlibConfig", "AlibiConfig"), ("RoPEConfig", "RopeConfig"), ("KERPLEConfig", "KerpleConfig")],
)
def test_a_misspelt_config_names_the_right_one(wrong: str, right: str) -> None:
    for package in (hf_posenc, hf_posenc.schemes):
        with pytest.raises(AttributeError, match=f"module '{package.__name__}' has no .*Did you mean '{right}'"):
            getattr(package, wrong)


def test_configs_registered_elsewhere_are_attributes(monkeypatch: pytest.MonkeyPatch) -> None:
    from hf_posenc.schemes import registry

    class ElsewhereConfig(hf_posenc.SchemeConfig):
        name = "elsewhere_for_tests"

    monkeypatch.setitem(registry._SCHEMES, "elsewhere_for_tests", ElsewhereConfig)
    assert hf_posenc.ElsewhereConfig is hf_posenc.schemes.ElsewhereConfig is ElsewhereConfig
    with pytest.raises(AttributeError, match="Did you mean 'ElsewhereConfig'"):
        _ = hf_posenc.ElsewereConfig
