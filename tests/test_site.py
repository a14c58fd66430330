"""Does the documentation build as a site, with every page in its navigation and nothing fetched from elsewhere?"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("material", reason="mkdocs-material is not installed")
    path = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "-f", str(ROOT / "mkdocs.yml"), "-d", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"})
    assert done.returncode == 0, done.stderr
    return path


def test_every_page_is_built_and_in_the_navigation(site: Path) -> None:
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    for page in sorted((ROOT / "docs").glob("*.md")):
        assert f": {page.name}\n" in navigation, page.name
        built = site / ("index.html" if page.name == "README.md" else f"{page.stem}/index.html")
        title = page.read_text(encoding="utf-8").splitlines()[0].removeprefix("# ")
        assert f">{title}" in built.read_text(encoding="utf-8").replace("&#39;", "'"), page.name


def test_pages_load_nothing_from_elsewhere(site: Path) -> None:
    for page in site.rglob("*.html"):
        text = page.read_text(encoding="utf-8")
        loaded = re.findall(r"<(?:script|img|iframe)[^>]*\ssrc=\"(https?:)?//|<link[^>]*\shref=\"(https?:)?//[^\"]*\.(?:css|woff2?)", text)
        assert loaded == [], page
