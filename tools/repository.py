"""Links to where the course is published, for the site: none where pyproject.toml holds no address."""

import hosted

REPOSITORY = hosted.repository()
BRANCH = "main"


def page(path: str, view: str = "blob") -> str:
    """The address of a file (blob), a folder (tree) or an editor (edit), or nothing."""
    return f"https://github.com/{REPOSITORY}/{view}/{BRANCH}/{path}" if REPOSITORY else ""


def badges(path: str) -> list[tuple[str, str]]:
    """Names and addresses of the places that can open a notebook, and of the page that edits it."""
    if not REPOSITORY:
        return []
    places = hosted.links(hosted.ROOT / path, REPOSITORY) if path.endswith(".ipynb") else {}
    return [(f"Open in {place}", link) for place, link in places.items()] + [("Edit this page", page(path, "edit"))]
