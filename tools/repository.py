"""Where the course is published: every badge, edit link and link to a folder derives from this one constant."""

REPOSITORY = ""  # owner/name on GitHub; empty: not published, and then no such link is shown
BRANCH = "main"


def page(path: str, view: str = "blob") -> str:
    """The address of a file (blob), a folder (tree) or an editor (edit), or nothing."""
    return f"https://github.com/{REPOSITORY}/{view}/{BRANCH}/{path}" if REPOSITORY else ""


def badges(path: str) -> list[tuple[str, str]]:
    """Names and addresses of the places that can open a notebook, and of the page that edits it."""
    if not REPOSITORY:
        return []
    edit = [("Edit this page", page(path, "edit"))]
    if not path.endswith(".ipynb"):
        return edit
    return [
        ("Open in Colab", f"https://colab.research.google.com/github/{REPOSITORY}/blob/{BRANCH}/{path}"),
        ("Open in Kaggle", f"https://kaggle.com/kernels/welcome?src={page(path)}"),
        ("Open in Codespaces", f"https://codespaces.new/{REPOSITORY}"),
        *edit,
    ]
