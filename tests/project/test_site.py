"""The site has every page and every public name, and its links lead somewhere."""

import ast
import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from tests.processes import Process

ROOT = Path(__file__).parents[2]


def contents():
    """The menu of docs/conf.py, as Sphinx reads it."""
    names = {"__file__": str(ROOT / "docs/conf.py")}
    exec((ROOT / "docs/conf.py").read_text(encoding="utf-8"), names)
    return [page for pages in names["CONTENTS"].values() for page in pages]


def test_every_page_is_in_the_menu_once():
    pages = contents()
    files = [*(ROOT / "docs").rglob("*.md"), *ROOT.glob("*.md"), *ROOT.glob("[!.]*/README.md")]
    written = {str(path.relative_to(ROOT).with_suffix("")) for path in files}
    assert set(pages) | {"README"} == written
    assert len(pages) == len(set(pages))


def public_names(module):
    source = ROOT / module.replace(".", "/") / "__init__.py"
    for node in ast.parse(source.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign | ast.AugAssign):
            target = node.target if isinstance(node, ast.AugAssign) else node.targets[0]
            if ast.unparse(target) == "__all__":
                yield from ast.literal_eval(node.value)


@pytest.mark.parametrize(
    "module", ["ringreduce", "ringreduce.keras", "ringreduce.ray", "ringreduce.spark"]
)
def test_every_public_name_is_in_the_reference(module):
    page = ROOT / "docs/api" / f"{module.rpartition('.')[2]}.md"
    listed = re.findall(r"(?::: |[.`])(\w+)[\n`]", page.read_text(encoding="utf-8"))
    names = list(public_names(module))
    assert set(names) - set(listed) == set()
    assert len(names) > 1


class Links(HTMLParser):
    """The targets of a page's links and pictures, and what on it can be linked to."""

    def __init__(self, page):
        super().__init__()
        self.targets, self.names = set(), set()
        self.feed(page.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attributes):
        values = dict(attributes)
        self.names |= {values.get("id"), values.get("name")}
        self.targets |= {values[name] for name in ("href", "src") if values.get(name)}


@pytest.mark.full
@pytest.mark.timeout(300)
def test_the_site_is_made_without_a_warning_and_its_links_lead_somewhere(tmp_path):
    command = [*(sys.executable, "-m", "sphinx", "--quiet", "--fail-on-warning")]
    command += ["-d", str(tmp_path / "doctrees"), "-c", "docs", ".", str(tmp_path / "site")]
    with Process(command, ROOT, output=tmp_path) as done:
        assert done.wait(280) == 0, done.stderr
    site = tmp_path / "site"
    pages = {page: Links(page) for page in site.rglob("*.html")}
    missing = set()
    for page, links in pages.items():
        for target in links.targets:
            url = urlsplit(target)
            if url.scheme or url.netloc:
                continue
            file = (page.parent / unquote(url.path)).resolve() if url.path else page
            names = pages[file].names | {""} if file in pages else {""}
            if not file.exists() or unquote(url.fragment) not in names:
                missing.add((str(page.relative_to(site)), target))
    assert missing == set()
    assert len(pages) > len(contents())
