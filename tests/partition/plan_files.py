"""A plan's content -> a file, as somebody wrote it who knows how it is checked.

Knows the checksum. Must not know what is in a plan.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from vnode.partition.plan.plan_file import checksum


def write_content(path: Path, content: dict[str, Any]) -> None:
    """Writes a plan's content with a right checksum."""
    path.write_text(json.dumps({**content, "checksum": checksum(content)}))
