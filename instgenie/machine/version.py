"""The version of this package that is installed here."""

from importlib.metadata import PackageNotFoundError, version


def package_version() -> str:
    """Empty if the package is not installed."""
    try:
        return version("instgenie")
    except PackageNotFoundError:
        return ""
