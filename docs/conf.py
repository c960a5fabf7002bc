"""How Sphinx makes the site of README.md, the pages of docs/ and the docstrings: `make docs`.

The pages are plain Markdown that a git host shows as well, so what only a site needs is here:
the order of its pages, and how names in docstrings become links.
"""

import re
import sys
from pathlib import Path

from sphinx.util import inspect
from sphinx.util.nodes import make_refnode

sys.path.insert(0, str(Path(__file__).parents[1]))
from ringreduce import __version__

# In the order of the site's menu. Every page of docs/ is here (tests/project/test_site.py).
CONTENTS = {
    "Guides": [
        *(
            "docs/questions",
            "docs/guides/unchanged",
            "docs/guides/data",
            "docs/guides/keras",
            "docs/guides/train-step",
            "docs/guides/loops",
            "docs/guides/jobs",
        ),
        *("docs/guides/settings", "docs/guides/failures", "docs/guides/debugging"),
        *("docs/guides/parallelism", "docs/guides/groups", "docs/guides/strategies"),
        *("docs/guides/arrays", "docs/from-horovod", "docs/guides/kubernetes", "docs/guides/ray"),
        *("docs/guides/spark", "docs/guides/recipes", "docs/guides/limits"),
    ],
    "Reference": ["docs/api/keras", "docs/api/ringreduce", "docs/api/ray", "docs/api/spark"],
    "Background": [
        *("docs/how-it-works", "docs/performance", "docs/scaling", "docs/reliability"),
        "docs/security",
    ],
    "Development": [
        *("CONTRIBUTING", "docs/architecture", "docs/architecture/reasons"),
        *("docs/architecture/reference", "bench/README", "native/README"),
        *("docs/publishing", "CHANGELOG"),
    ],
}

project = "ringreduce"
release = __version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
root_doc = "README"
include_patterns = ["README.md", *(f"{page}.md" for pages in CONTENTS.values() for page in pages)]
# Not even looked into.
exclude_patterns = ["build", "dist", ".*", "tests"]

myst_heading_anchors = 4

# Not installed with `ringreduce[docs]`.
autodoc_mock_imports = ["pyspark"]
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_default_options = {"members": True}
# Users call no hook of a callback: what Keras says of them is no news.
autodoc_inherit_docstrings = False
napoleon_numpy_docstring = False
napoleon_use_rtype = False
napoleon_attr_annotations = False
default_role = "py:obj"
python_maximum_signature_line_length = 80
nitpicky = True
nitpick_ignore_regex = [
    # Names of other projects, and words in backticks that are no names.
    ("py:.*", r"(?!ringreduce\b).*|.*[ /].*"),
    # What annotations name and only the package uses.
    ("py:class", r"ringreduce(\.\w+){2,4}"),
]

toc_object_entries_show_parents = "hide"

html_theme = "furo"
html_title = f"ringreduce {release}"
html_static_path = ["site/site.css"]
html_css_files = ["site.css"]
html_additional_pages = {"index": "to_readme.html"}
templates_path = ["site"]
html_copy_source = False
html_show_sphinx = False
copyright = "the authors of ringreduce"

# Where public names are documented, in which order they are looked for.
_MODULES = ("ringreduce.keras", "ringreduce.keras.callbacks", "ringreduce", "ringreduce.ray")
_MODULES += ("ringreduce.keras.elastic",)


def with_contents(app, page, source):
    """The menu, below the text of README.md."""
    if page == root_doc:
        for title, pages in CONTENTS.items():
            listed = "\n".join(pages)
            source[0] += f"\n```{{toctree}}\n:hidden:\n:caption: {title}\n\n{listed}\n```\n"


def find_public(app, env, node, content):
    """Leads `rr.fit`, and a class by the module that it is written in, to where it is described."""
    objects = env.domains.python_domain.objects
    name = re.sub(r"^(rr|ringreduce)\.([a-z_]+\.)*(?=\w)", "", node.get("reftarget", ""))
    for module in _MODULES:
        if found := objects.get(f"{module}.{name}"):
            page = node.get("refdoc", root_doc)
            return make_refnode(app.builder, page, found.docname, found.node_id, content, name)
    return None


def of_init(app, what, name, cls, options, shown, returned):
    """A class that is chosen in `__new__` takes what its `__init__` does."""
    if what == "class" and {"__new__", "__init__"} <= vars(cls).keys():
        taken = inspect.signature(cls.__init__, bound_method=True)
        shown = inspect.stringify_signature(
            taken, show_return_annotation=False, unqualified_typehints=True
        )
    return shown, returned


def without_hooks(app, what, name, value, skip, options):
    """What Keras calls of a callback is not for users."""
    return skip or (what == "class" and name.startswith("on_"))


def setup(app):
    """Sphinx calls this first."""
    app.connect("autodoc-process-signature", of_init)
    app.connect("autodoc-skip-member", without_hooks)
    app.connect("source-read", with_contents)
    app.connect("missing-reference", find_public)
