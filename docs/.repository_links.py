"""A hook of mkdocs: links to files of the repository outside ``docs`` become the names of those files.

In the repository they are links; on the site there is nothing behind them. One to a file that does not exist ends the
build.
"""

import os
import re
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError

_LINK = re.compile(r"(?<!!)\[([^\]]+)\]\((\.\./[^)\s#]+)(?:#[^)\s]*)?\)")


def on_page_markdown(markdown: str, page: Any, config: Any, **rest: Any) -> str:
    """Return the page's text with such links replaced by "text (`file`)"."""
    folder = Path(config.docs_dir)
    root = folder.parent

    def named(link: re.Match[str]) -> str:
        file = Path(os.path.normpath(folder / Path(page.file.src_uri).parent / link[2]))
        if not file.is_relative_to(root) or not file.exists():
            raise PluginError(f"{page.file.src_uri} links to {link[2]}, which does not exist")
        name = file.relative_to(root).as_posix()
        return link[1] if name in link[1] else f"{link[1]} (`{name}`)"

    return _LINK.sub(named, markdown)
