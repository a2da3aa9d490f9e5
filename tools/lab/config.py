"""JupyterLab for the course: it opens README.md with the contents panel, and keeps its layout inside .venv."""

import shutil
import sys
from pathlib import Path

HERE = Path(__file__).parent
WORKSPACES = Path(sys.prefix, "workspaces")
first = WORKSPACES / "default-37a8.jupyterlab-workspace"  # JupyterLab's own name for its default workspace
if not first.exists():
    WORKSPACES.mkdir(exist_ok=True)
    shutil.copy(HERE / "workspace.json", first)

c = get_config()  # noqa: F821 (JupyterLab defines it)
c.ServerApp.allow_root = True
c.ServerApp.answer_yes = True
c.ServerApp.log_level = "WARN"
c.LabApp.app_settings_dir = str(HERE)
c.LabApp.default_url = "/lab/tree/README.md"
c.LabApp.extension_manager = "readonly"
c.LabApp.log_level = "WARN"
c.LabApp.workspaces_dir = str(WORKSPACES)
