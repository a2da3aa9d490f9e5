"""Sphinx's configuration. tools/website.py writes the sources that Sphinx builds, and says where they are."""

from myst_nb.core import render

project = html_title = "Faster PyTorch training"
author = "The workbook's authors"
extensions = ["myst_nb", "sphinx_copybutton", "sphinx.ext.mathjax"]
nb_execution_mode = "off"
nb_merge_streams = True
myst_enable_extensions = ["dollarmath", "amsmath", "html_image"]
myst_heading_anchors = 3
mathjax_path = "mathjax/tex-svg.js"
mathjax3_config = {"options": {"enableMenu": False}}  # its menu would load more files
copybutton_selector = "div.cell_input pre, div.highlight-bash pre, div.highlight-python pre"
html_theme = "furo"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_js_files = ["site.js"]
html_copy_source = html_show_sourcelink = False
html_use_index = html_show_copyright = False
html_theme_options = {"navigation_with_keys": True}

_without_alt = render.NbElementRenderer.render_image


def _with_alt(self, data):
    """myst-nb takes a picture's width from its output's metadata, but not its alt text."""
    made = _without_alt(self, data)
    for node in made:
        node["alt"] = data.output_metadata.get(data.mime_type, {}).get("alt", "")
    return made


render.NbElementRenderer.render_image = _with_alt
