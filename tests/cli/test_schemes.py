"""`hf-posenc schemes`, and modules that register more of them."""

import dataclasses
import inspect
import json
import os
import sys
from pathlib import Path

import pytest

from hf_posenc import extensions
from hf_posenc.cli import main
from hf_posenc.cli.catalogue import meanings_of
from hf_posenc.schemes import (
    registry,
)

from .running import refused


class TestSchemes:
    def test_the_table_has_summaries_and_defaults_and_arrangements_follow(self, capsys, third_party):
        assert main(["schemes"]) == 0
        schemes, arrangements = capsys.readouterr().out.split("\narrangement ")
        names = [line.split()[0] for line in arrangements.splitlines()[2:] if line]
        assert {"composed", "interleaved", "local_global", "schedule"} <= set(names)
        lines = {line.split()[0]: line for line in (schemes + arrangements).splitlines() if line}
        assert "interleaved" not in schemes.split()
        assert "rotat" in lines["rope"].lower()
        assert "theta=10000.0" in lines["p_rope"]
        assert "strength=required" in lines["third_party"]
        assert "inner=rope  group=8" in lines["self_extend"]
        assert "inner=rope  other=none  every=4" in lines["interleaved"]

    def test_some_schemes_in_detail(self, capsys, third_party):
        assert main(["schemes", "none", "third_party", "kerple", "interleaved"]) == 0
        before, others = capsys.readouterr().out.split("\n\nkerple\n")
        assert "It has no options." in before
        assert "  strength: float, required" in before
        kerple, interleaved = others.split("\n\ninterleaved\n")
        assert "KERPLE, arXiv:2205.09921" in kerple.splitlines()[0]
        assert '  variant: str, default log\n      "log" (the better one in the paper) or "power".\n' in kerple
        assert "  exponent: float | None, default None\n      fixes `r2` of the power form" in kerple
        assert "  inner: SchemeConfig, default rope\n      scheme of most layers.\n" in interleaved

    def test_an_unknown_scheme(self, capsys):
        message = refused(capsys, "schemes", "kerpel")
        assert "Did you mean 'kerple'" in message
        assert len(message) < 400
        assert "listed by `hf-posenc schemes`" in message
        assert "--import MODULE" in message

    @pytest.mark.parametrize("scheme", ["my_scheme", 'composed:parts=["rope", "my_scheme"]'])
    def test_an_unknown_scheme_may_be_ones_own(self, capsys, scheme):
        assert "For your own scheme" in refused(capsys, "plot", scheme)

    def test_every_option_of_every_scheme_has_a_meaning(self):
        lacking = [
            f"{config.name}.{field.name}"
            for config in registry.registered_configs()
            for field in dataclasses.fields(config)
            if config.__module__.startswith("hf_posenc.") and not meanings_of(inspect.getdoc(config)).get(field.name)
        ]
        assert lacking == []

    def test_json(self, capsys):
        import hf_posenc

        assert main(["schemes", "--json"]) == 0
        entries = json.loads(capsys.readouterr().out)
        names = hf_posenc.list_schemes()
        assert [entry["name"] for entry in entries if not entry["arrangement"]] == names
        assert [entry["name"] for entry in entries][: len(names)] == names
        assert all(entry["summary"] for entry in entries)
        assert main(["schemes", "rope", "--json"]) == 0
        assert [entry["options"]["theta"] for entry in json.loads(capsys.readouterr().out)] == [1e4]


THIRD_PARTY = """
from dataclasses import dataclass
from typing import ClassVar
from hf_posenc import NoneConfig, SchemeConfig, register_scheme

@register_scheme
@dataclass(frozen=True)
class FarConfig(SchemeConfig):
    "Positions of somebody else."
    name: ClassVar[str] = "far_for_tests"
"""


class TestImport:
    @pytest.fixture
    def module(self, tmp_path, monkeypatch):
        monkeypatch.setattr(registry, "_SCHEMES", dict(registry._SCHEMES))
        monkeypatch.setattr(sys, "path", list(sys.path))
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(os, "environ", dict(os.environ))
        monkeypatch.setattr(extensions, "_imported", None)
        (tmp_path / "far_schemes.py").write_text(THIRD_PARTY)
        yield "far_schemes"
        for name in ("far_schemes", "nearer_schemes"):
            sys.modules.pop(name, None)

    @pytest.mark.parametrize(
        "words",
        [
            ["--import", "json", "--import=far_schemes", "schemes", "far_for_tests"],
            ["schemes", "far_for_tests", "--import", "far_schemes"],
        ],
    )
    def test_a_module_of_this_folder_registers_its_schemes(self, capsys, module, words):
        assert "far_for_tests" in refused(capsys, "schemes", "far_for_tests")
        assert main(words) == 0
        assert "Positions of somebody else." in capsys.readouterr().out

    def test_modules_of_several_folders(self, capsys, module, tmp_path, monkeypatch):
        assert main(["--import", module, "schemes", "none"]) == 0
        (tmp_path / "inner").mkdir()
        (tmp_path / "inner" / "nearer_schemes.py").write_text(THIRD_PARTY.replace("far", "near").replace("Far", "Near"))
        monkeypatch.chdir(tmp_path / "inner")
        # As in a program that was started with the first module and names another one.
        monkeypatch.setattr(extensions, "_imported", None)
        monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry != str(tmp_path)])
        sys.modules.pop(module, None)
        assert main(["--import", "nearer_schemes", "schemes", "far_for_tests", "near_for_tests"]) == 0

    def test_the_working_folder_is_gone(self, capsys, module, tmp_path, monkeypatch):
        gone = tmp_path / "gone"
        gone.mkdir()
        monkeypatch.chdir(gone)
        gone.rmdir()
        assert main(["--import", "json", "schemes", "none"]) == 0
        capsys.readouterr()
        message = refused(capsys, "--import", module, "schemes", "none")
        assert "there is no module 'far_schemes' on the import path. The working folder no longer exists." in message

    def test_what_a_module_itself_lacks_keeps_its_traceback(self, module):
        Path(f"{module}.py").write_text("import nowhere_to_be_found")
        with pytest.raises(ModuleNotFoundError, match="nowhere_to_be_found"):
            main(["--import", module, "schemes"])
