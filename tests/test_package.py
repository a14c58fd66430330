"""What does `import punar` give, and what does it not load?"""

from __future__ import annotations

import subprocess
import sys

import pytest

import punar

HEAVY = ("torch", "highspy", "transformers", "numpy", "rich", "typer")


def run_python(code: str) -> str:
    """Runs code in a fresh interpreter; raises where that fails."""
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=120).stdout


def test_public_names_are_sorted_and_there() -> None:
    names = [name for name in punar.__all__ if not name.startswith("__")]
    assert names == sorted(names)
    assert {"PunarError", "Remat", "Plan", "Profile", "profile", "solve", "verify"} <= set(names)
    for name in punar.__all__:
        assert getattr(punar, name) is not None


def test_no_public_name_is_a_subpackage() -> None:
    code = """
import importlib, pkgutil, punar
clash = {module.name for module in pkgutil.iter_modules(punar.__path__)} & set(punar.__all__)
print(sorted(clash))
"""
    assert run_python(code).strip() == "[]"


def test_import_alone_loads_no_framework_and_no_solver_library() -> None:
    code = f"import sys, punar; print([name for name in {HEAVY!r} if name in sys.modules])"
    assert run_python(code).strip() == "[]"


def test_public_errors_derive_from_one() -> None:
    from punar import errors

    found = [value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, Exception)]
    assert found
    assert all(issubclass(error, punar.PunarError) for error in found)


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no_such_name"):
        punar.no_such_name  # noqa: B018


def test_the_package_runs_as_a_module() -> None:
    done = subprocess.run([sys.executable, "-m", "punar", "--version"], check=True, capture_output=True, text=True, timeout=120)
    assert punar.__version__ in done.stdout
