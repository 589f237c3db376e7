"""docs/operators.md and docs/vendor_plugin.md say what the operators are."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from hetero_megatron.cli.operators import accepted_versions, markdown
from hetero_megatron.errors import UserError
from hetero_megatron.ops import SPECS
from hetero_megatron.ops.registry import Registry, reference_kernel
from tests.support.paths import ROOT

GUIDE = (ROOT / "docs/vendor_plugin.md").read_text()


def test_the_page_is_current() -> None:
    written = (ROOT / "docs/operators.md").read_text()
    assert written == markdown(), "run: python -m hetero_megatron.cli.operators --markdown > docs/operators.md"


def test_the_guide_names_every_later_version_and_every_feature() -> None:
    said = {name: int(version) for name, version in re.findall(r"`(\w+)` \(version (\d+)\)", GUIDE)}
    assert said == {name: spec.version for name, spec in SPECS.items() if spec.version > 1}
    features = {feature for spec in SPECS.values() for feature in spec.features}
    assert {feature for feature in features if f"`{feature}`" not in GUIDE} == set()


@pytest.mark.parametrize("name", [name for name, spec in SPECS.items() if spec.version > 1])
def test_the_registry_takes_the_versions_of_the_page_and_no_others(name: str) -> None:
    spec = SPECS[name]
    for version in range(1, spec.version + 2):
        registry = Registry(SPECS)
        kernel = replace(reference_kernel(spec), provider="acme", kind="vendor", version=version)
        if version in (spec.version, *accepted_versions(spec)):
            registry.register(kernel)
            assert registry.kernels(name)
        else:
            with pytest.raises(UserError, match="version"):
                registry.register(kernel)
