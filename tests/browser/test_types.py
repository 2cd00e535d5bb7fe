"""The page's scripts hold what their JSDoc says, as TypeScript's checker reads it."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.browser.conftest import NO_NPM, NODE_MODULES, ROOT

pytestmark = [pytest.mark.browser]

APP = ROOT / "gateway/unified_gateway/static/app"
OPTIONS = (
    "--allowJs --checkJs --noEmit --skipLibCheck --ignoreConfig --target es2022 --module es2022"
    " --moduleResolution bundler --lib es2023,dom,dom.iterable --strict false"
)


@pytest.mark.skipif(not NODE_MODULES.exists(), reason=NO_NPM)
def test_the_scripts_have_the_types_that_they_tell(tmp_path: Path) -> None:
    shutil.copytree(APP, tmp_path / "app")
    (tmp_path / "vendor").mkdir()
    shutil.copy(ROOT / "scripts/vendor/entry.js", tmp_path / "vendor/vendor.js")  # npm's packages have types
    (tmp_path / "node_modules").symlink_to(NODE_MODULES)
    node = shutil.which("node") or str(Path(sys.executable).with_name("node"))  # that of npm, or PyPI's
    command = [node, str(NODE_MODULES / "typescript/bin/tsc"), *OPTIONS.split(), "app/main.js"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
