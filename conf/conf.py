"""How the site is built: ``sphinx-build -c conf docs build/html`` (``make html`` calls it)."""

import logging
import os
import sys
import warnings
from pathlib import Path

CONF = Path(__file__).resolve().parent
sys.path.insert(0, str(CONF))
# What the pages' processes see, the workers of a parallel build included.
os.environ["PYTHONPATH"] = os.pathsep.join(
    [str(CONF), *filter(None, [os.environ.get("PYTHONPATH")])]
)
os.environ["TQDM_DISABLE"] = "1"  # a progress bar is 30 garbled lines in a page
os.environ.setdefault("MPLBACKEND", "agg")

# Set before accessible-pygments, which furo imports, asks for every library's INFO lines.
logging.basicConfig(level=logging.WARNING)

import roundoff  # noqa: E402
from roundoff.script import unit_test_going  # noqa: E402

FAST = unit_test_going()
if FAST:  # as many pages run at once as there are processors
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # Inductor compiles six programs to see whether this compiler knows this processor's vectors.
    os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")

project = "roundoff"
author = "the roundoff authors"
copyright = "the roundoff authors"  # noqa: A001 - the name Sphinx reads
version = release = roundoff.__version__

extensions = [
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.intersphinx",
    "sphinx.ext.extlinks",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "hooks",
    "sphinx_gallery.gen_gallery",
    "answer",
    "evidence",
    "sphinx_markdown_builder",  # its translator writes the prose of notebooks
    "findable",
    "mathml",
    "notebooks",
    "results",
    "search",
    "terms",
]
# Absolute: autosummary looks beside the pages, Sphinx beside this file.
templates_path = [str(CONF / "templates")]
exclude_patterns = ["gallery/**/*.ipynb", "gallery/**/*.py", "gallery/**/*.md5"]
nitpicky = True
nitpick_ignore_regex = [
    # Dunders and typing's own names that signatures mention.
    (r"py:.*", r"(typing|collections\.abc|argparse|dataclasses)\..*"),
    # A type in words is no cross-reference: "dict of str", "{'CPU', 'CUDA'}", "low".
    (r"py:class", r"(.*[ {}\"'].*|[a-z_]+)"),
]
html_math_renderer = "mathml"
markdown_flavor = "github"  # of the notebooks: a paragraph is one line

# Names that the package itself gives: a page's import is noted under the shortest one.
autosummary_context = {
    "short": {
        f"roundoff.{room}.{name}": f"roundoff.{name}" for name, room in roundoff.ROOMS.items()
    }
}
autodoc_typehints = "none"
autodoc_member_order = "bysource"
# Definition lists instead of fields: a type in words ("float32 tensor") is no cross-reference.
napoleon_use_param = False
napoleon_use_rtype = False
napoleon_use_ivar = True

# A few names of each project, in the plain text of Sphinx's first format: a build asks no network.
intersphinx_mapping = {
    name: (address, str(CONF / "inventories" / f"{name}.inv"))
    for name, address in {
        "matplotlib": "https://matplotlib.org/stable",
        "numpy": "https://numpy.org/doc/stable",
        "onnx": "https://onnx.ai/onnx",
        "onnxruntime": "https://onnxruntime.ai/docs/api/python",
        "pandas": "https://pandas.pydata.org/docs",
        "python": "https://docs.python.org/3",
        "torch": "https://docs.pytorch.org/docs/stable",
        "transformers": "https://huggingface.co/docs/transformers",
        "triton": "https://triton-lang.org/main",
    }.items()
}
extlinks = {
    "doi": ("https://doi.org/%s", "doi:%s"),
    "arxiv": ("https://arxiv.org/abs/%s", "arXiv:%s"),
}

copybutton_exclude = ".linenos, .gp, .go"
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True

sphinx_gallery_conf = {
    "examples_dirs": "../gallery",
    "gallery_dirs": "gallery",
    "subsection_order": [f"../gallery/{name}" for name in ("numerics", "fusion", "kernels")],
    "within_subsection_order": "hooks.page_order",
    "backreferences_dir": "backreferences",
    "doc_module": ("roundoff",),
    "image_scrapers": ("figures.scraper",),
    "reset_modules": ("matplotlib", "hooks.reset"),
    "capture_repr": ("_repr_html_",),
    # A quick build is not for its times; a full one runs one page at a time, to be fair to them.
    "parallel": (os.cpu_count() or 1) if FAST else False,
    "remove_config_comments": True,
    "show_signature": False,
    "download_all_examples": False,
    # Its page of running times loads scripts from elsewhere.
    "write_computation_times": False,
    "minigallery_sort_order": "hooks.page_order",
    "thumbnail_size": (480, 300),
}

# Where the site is published. Without it, notebooks look for `make serve`, and no page names its
# canonical address.
html_baseurl = os.environ.get("ROUNDOFF_SITE", "")
html_baseurl = html_baseurl and html_baseurl.rstrip("/") + "/"

# Where the source is, for the link at the foot of each page.
REPOSITORY = os.environ.get("ROUNDOFF_REPOSITORY", "")

html_theme = "furo"
html_title = "roundoff"
html_static_path = ["static"]
html_css_files = ["roundoff.css", "page.css"]
html_favicon = "static/favicon.svg"
html_search_scorer = str(CONF / "search.js")
html_copy_source = False
html_show_sourcelink = False
html_show_sphinx = False
html_permalinks_icon = "#"
html_scaled_image_link = False
html_theme_options = {
    "light_logo": "logo.svg",
    "dark_logo": "logo-dark.svg",
    "sidebar_hide_name": True,
    "footer_icons": [{"name": "Source", "url": REPOSITORY, "html": "Source", "class": ""}]
    if REPOSITORY
    else [],
}

# sphinx-gallery's workers set no filter of their own; a page's warnings are part of its output.
warnings.filterwarnings("ignore", message="Matplotlib is currently using agg")
