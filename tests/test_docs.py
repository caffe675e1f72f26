"""README, design notes and changelog say what is there."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import lightning_zoffload

DOCUMENTS = [
    "README.md",
    "CHANGELOG.md",
    "docs/design.md",
    "docs/performance.md",
    "examples/README.md",
    "benchmarks/README.md",
]


@pytest.mark.parametrize("document", DOCUMENTS)
def test_files_named_in_code_style_exist(repository: Path, document: str) -> None:
    text = (repository / document).read_text()
    names = re.findall(r"`([\w./-]*\w\.(?:py|c|h|md|yaml|ipynb|toml|txt))`", text)
    folders = (repository, repository / "lightning_zoffload", (repository / document).parent)
    assert names
    assert not [n for n in names if not any((folder / n).exists() for folder in folders)]


def test_the_readmes_tour_names_every_module(repository: Path) -> None:
    text = (repository / "README.md").read_text()
    modules = {p.name for p in (repository / "lightning_zoffload").glob("*.py")} - {"__init__.py"}
    assert not {module for module in modules if f"`{module}`" not in text}


@pytest.mark.parametrize("document", ["README.md"])
def test_python_snippets_run(repository: Path, document: str, tmp_path: Path) -> None:
    snippets = re.findall(r"```python\n(.*?)```", (repository / document).read_text(), re.S)
    assert snippets
    for snippet in snippets:
        subprocess.run([sys.executable, "-c", snippet], check=True, cwd=tmp_path, timeout=120)


def test_make_targets_named_in_the_readme_exist(repository: Path) -> None:
    makefile = (repository / "Makefile").read_text()
    targets = set(re.findall(r"`?make ([\w-]+)", (repository / "README.md").read_text()))
    assert {"demo", "test"} <= targets
    assert not {target for target in targets if f"\n{target}:" not in makefile}


def test_version_has_a_changelog_entry(repository: Path) -> None:
    assert f"## [{lightning_zoffload.__version__}]" in (repository / "CHANGELOG.md").read_text()


def test_ci_calls_the_readmes_test_command(repository: Path) -> None:
    assert "make test" in (repository / ".ci" / "run").read_text()
    assert "make test" in (repository / "README.md").read_text()
