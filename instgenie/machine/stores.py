"""Stores of files behind URLs that fsspec knows, such as `s3://bucket/folder`."""

from typing import Any

import fsspec

# names that protocols have for an object's age
TIMES = ("LastModified", "mtime", "last_modified", "updated", "created")


class StoreUrlError(Exception):
    """A URL that no protocol here can open."""


def open_store(url: str, **options: Any) -> tuple[Any, str]:
    """The file system and the path on it. Listings are not cached, because other machines write there, too."""
    try:
        files, root = fsspec.url_to_fs(url, **options, skip_instance_cache=True, use_listings_cache=False)
    except (ImportError, ValueError, OSError) as error:
        raise StoreUrlError(f"{error} (for s3: pip install 'instgenie[remote]')") from None
    return files, root.rstrip("/")
