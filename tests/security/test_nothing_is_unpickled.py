"""What comes from a socket, a file or the pool is never turned into code: no module of the package can do that."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "src" / "mooncake"
MODULES = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib", "jsonpickle"}
CALLS = {"eval", "exec", "compile", "__import__"}
UNSAFE_YAML = {"load", "load_all", "unsafe_load", "full_load", "unsafe_load_all", "full_load_all"}


def imports(tree: ast.AST) -> set[str]:
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module.partition(".")[0])
    return found


def wrong_calls(tree: ast.AST) -> list[str]:
    """Of functions that run or unpickle what they are given."""
    found = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        match node.func:
            case ast.Name(name) if name in CALLS:
                found.append(name)
            case ast.Attribute(ast.Name("yaml"), name) if name in UNSAFE_YAML:
                found.append(f"yaml.{name}")
            case ast.Attribute(ast.Name("torch"), "load" | "save"):
                found.append("torch.load")
            case ast.Attribute(ast.Name("np" | "numpy"), "load"):
                found.append("np.load")
        if any(keyword.arg == "allow_pickle" for keyword in node.keywords):
            found.append("allow_pickle")
    return found


MODULES_OF_OURS = sorted(PACKAGE.rglob("*.py"))


def test_there_are_modules():
    assert len(MODULES_OF_OURS) > 200


def test_no_module_can_unpickle():
    wrong = {}
    for path in MODULES_OF_OURS:
        tree = ast.parse(path.read_text())
        found = sorted(imports(tree) & MODULES) + wrong_calls(tree)
        if found:
            wrong[str(path.relative_to(PACKAGE))] = found
    assert not wrong


@pytest.mark.parametrize(
    "text",
    ["import pickle", "from pickle import loads", "def f():\n import marshal", "eval('1')", "yaml.load(x)",
     "torch.load(f)", "np.load(f, allow_pickle=True)"],
)  # fmt: skip
def test_the_search_finds_them(text):
    tree = ast.parse(text)
    assert imports(tree) & MODULES or wrong_calls(tree)
