"""Two rules of the floors that import-linter cannot hold.

It sees a third-party package as one module, so it cannot tell `torch.distributed` from `torch`; and it sees
import statements only, while `torch.distributed.all_reduce(...)` works after a plain `import torch`. So the
sources are read here, as syntax trees and without importing them:

- only `lightning_dist/comm` reaches `torch.distributed`: it is the one door to the network, and what passes
  it is counted;
- `lightning_dist/core` and `lightning_dist/pipeline/schedule` do not reach `torch` at all, in no way of writing it.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "lightning_dist"
DISTRIBUTED = ("torch.distributed", "torch._C._distributed_c10d")

# file -> why it may reach torch.distributed. An entry that is no longer needed fails a test.
OTHER_DOORS: dict[str, str] = {}


def reached_names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and name of what a module reaches: imports, attributes of imports, literal dynamic imports."""
    bound: dict[str, str] = {}  # the name in this file -> what it stands for
    nodes = list(ast.walk(tree))
    for node in nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                head = alias.name.partition(".")[0]
                bound[alias.asname or head] = alias.name if alias.asname else head
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            for alias in node.names:
                bound[alias.asname or alias.name] = f"{node.module}.{alias.name}"
                yield node.lineno, f"{node.module}.{alias.name}"
    for node in nodes:
        if isinstance(node, ast.Attribute) and (chain := dotted(node)) is not None:
            head, _, rest = chain.partition(".")
            if head in bound:
                yield node.lineno, f"{bound[head]}.{rest}"
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            function = (dotted(node.func) or "").rpartition(".")[2]
            if function in {"import_module", "__import__"} and isinstance(node.args[0].value, str):
                yield node.lineno, node.args[0].value


def dotted(node: ast.expr) -> str | None:
    """`a.b.c` as text; None if it starts with anything but a name."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (head := dotted(node.value)) is not None:
        return f"{head}.{node.attr}"
    return None


def lines_reaching(source: str, targets: tuple[str, ...]) -> list[int]:
    """The line numbers at which `source` reaches one of `targets` or something inside it."""
    found = {
        line
        for line, name in reached_names(ast.parse(source))
        if any(name == target or name.startswith(f"{target}.") for target in targets)
    }
    return sorted(found)


def sweep(folder: Path, targets: tuple[str, ...]) -> tuple[int, dict[str, list[int]]]:
    """How many files lie in `folder`, and which of them reach `targets`, at which lines."""
    files = sorted(folder.rglob("*.py"))
    hits = {
        file.relative_to(PACKAGE).as_posix(): lines
        for file in files
        if (lines := lines_reaching(file.read_text(encoding="utf-8"), targets))
    }
    return len(files), hits


def test_only_comm_reaches_torch_distributed() -> None:
    swept, hits = sweep(PACKAGE, DISTRIBUTED)
    assert swept > 0
    through_comm = {file for file in hits if file.startswith("comm/")}
    assert through_comm, "not even comm/ reaches torch.distributed: the sweep is blind"
    others = {file: lines for file, lines in hits.items() if file not in through_comm | OTHER_DOORS.keys()}
    assert not others, f"torch.distributed is reached past lightning_dist.comm, file -> lines: {others}"


def test_every_other_door_is_needed() -> None:
    _, hits = sweep(PACKAGE, DISTRIBUTED)
    assert OTHER_DOORS.keys() <= hits.keys(), "an entry of OTHER_DOORS is no longer needed: remove it"
    assert all(reason.strip() for reason in OTHER_DOORS.values())


@pytest.mark.parametrize("room", ["core", "pipeline/schedule"])
def test_pure_rooms_do_not_reach_torch(room: str) -> None:
    swept, hits = sweep(PACKAGE / room, ("torch",))
    assert swept > 0
    assert not hits, f"{room}/ is plain Python, yet torch is reached, file -> lines: {hits}"


@pytest.mark.parametrize(
    "source",
    [
        "import torch.distributed",
        "import torch.distributed as dist",
        "from torch import distributed",
        "from torch import distributed as network, nn",
        "from torch.distributed import all_reduce",
        "from torch.distributed.checkpoint import save",
        "from torch._C._distributed_c10d import ProcessGroup",
        "import torch\ntorch.distributed.barrier()",
        "import torch as t\nrank = t.distributed.get_rank",
        "def late():\n    import torch\n    return torch.distributed.is_initialized()",
        "import importlib\nimportlib.import_module('torch.distributed')",
        "__import__('torch.distributed.nn')",
    ],
)
def test_the_sweep_sees_every_way_of_writing_it(source: str) -> None:
    assert lines_reaching(source, DISTRIBUTED) == [source.count("\n") + 1]  # each reaches it on its last line
    assert lines_reaching(source, ("torch",))


@pytest.mark.parametrize(
    "source",
    [
        "import torch\nx = torch.ones(2)",
        "from lightning_dist.comm import Mesh",
        "from . import distributed",
        "import torch.utils.data.distributed",
        "class A:\n    distributed = 1\nA.distributed",
        "# import torch.distributed",
        "text = 'import torch.distributed'",
    ],
)
def test_the_sweep_raises_no_false_alarm(source: str) -> None:
    assert lines_reaching(source, DISTRIBUTED) == []
