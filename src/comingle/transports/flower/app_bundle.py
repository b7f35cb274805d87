"""The Flower app bundle (FAB) of a federation: a name and two import paths, and no code.

A SuperLink hands the bundle of a run to every node, and Flower's own SuperNode installs and imports what is in it.
Clients of comingle never do: they compare the digest of the run's bundle with :data:`DIGEST`, which is computed from
what is installed here, and refuse every other run.
"""

from __future__ import annotations

import hashlib
import io
import zipfile

APP_ID, APP_VERSION = "comingle/comingle-federation", "1.0.0"

PROJECT = """\
[project]
name = "comingle-federation"
version = "1.0.0"
description = "A federation of comingle."
license = "Apache-2.0"
dependencies = []

[tool.flwr.app]
publisher = "comingle"

[tool.flwr.app.components]
serverapp = "comingle.transports.flower.server_app:app"
clientapp = "comingle.transports.flower.client_app:app"

[tool.flwr.app.config]
federation = ""
out = ""
users = ""
"""

_DATE = (1980, 1, 1, 0, 0, 0)


def build_bundle() -> bytes:
    """Return the bundle: a ZIP file of :data:`PROJECT` and its manifest, the same bytes on every machine."""
    project = PROJECT.encode()
    manifest = f"pyproject.toml,{hashlib.sha256(project).hexdigest()},{8 * len(project)}"
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_STORED) as bundle:
        for name, content in (("pyproject.toml", project), (".info/CONTENT", manifest.encode())):
            bundle.writestr(zipfile.ZipInfo(name, _DATE), content)
    return packed.getvalue()


DIGEST = hashlib.sha256(build_bundle()).hexdigest()
"""SHA-256 of the bundle, in hex: what the server names as the app of its run, and the only one that clients accept."""

UNKNOWN_KEY = "the key is not registered"
"""What a server says to a client whose key it does not know."""
