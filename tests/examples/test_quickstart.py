"""The notebook runs from top to bottom; its own asserts say that the loss fell."""

from __future__ import annotations

import re
from pathlib import Path

import nbformat
import pytest
import torch
from nbclient import NotebookClient


@pytest.fixture
def notebook(repository: Path) -> nbformat.NotebookNode:
    """``examples/quickstart.ipynb``."""
    return nbformat.read(repository / "examples" / "quickstart.ipynb", as_version=4)


def test_it_is_stored_short_and_without_outputs(notebook: nbformat.NotebookNode) -> None:
    nbformat.validate(notebook)
    assert len(notebook.cells) <= 8
    assert all(cell.id for cell in notebook.cells)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert not any(cell.outputs or cell.execution_count for cell in code)
    assert 'strategy="zero_offload", precision="bf16-mixed"' in "".join(c.source for c in code)


def test_it_runs(notebook: nbformat.NotebookNode, tmp_path: Path) -> None:
    resources = {"metadata": {"path": str(tmp_path)}}
    NotebookClient(notebook, timeout=120, kernel_name="python3", resources=resources).execute()
    outputs = [o for cell in notebook.cells for o in cell.get("outputs", [])]
    # No warnings or logs on the page: what it shows is what it prints.
    assert {(o.output_type, o.get("name")) for o in outputs} == {("stream", "stdout")}
    printed = "".join(o.text for o in outputs)
    falls = re.findall(r"loss: (\d\.\d+) -> (\d\.\d+)", printed)
    assert len(falls) == 2
    assert float(falls[0][1]) < 0.75 * float(falls[0][0])
    state = torch.load(tmp_path / "runs/quickstart.ckpt", weights_only=True)["state_dict"]
    assert {t.dtype for t in state.values()} == {torch.float32}
