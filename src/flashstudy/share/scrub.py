"""What a shared page must not tell: where files lie on somebody's machine, who they are, what the machine is called.

Text is scrubbed before it is rendered, so that nothing hides in an attribute. Paths inside the checkout keep their
relative part; of every other absolute path only the file's name stays.
"""

import contextlib
import getpass
import re
import socket
import sys
from pathlib import Path

from flashstudy.facts import checkout

ELLIPSIS = "…"
_COMMON_NAMES = {"root", "user", "users", "admin", "home", "localhost", "runner", "ubuntu", "debian", "docker", "test"}
_PART = r"[\w.@+\-~%=,]+"
_PATTERNS = (
    re.compile(r"file:/{1,3}(?:[^\s\"'<>()/]+/)*"),
    re.compile(rf"(?<![\w:/.<…~)\]])/(?:{_PART}/)+(?={_PART})"),
    re.compile(rf"(?<![\w:/.<…~)\]])/(?:{_PART}/)+"),
    re.compile(r"(?<![\w/])[A-Za-z]:\\(?:[^\\\s\"'<>|]+\\)*"),
    re.compile(r"(?<![\w\\])\\\\[\w.\-]+\\(?:[^\\\s\"'<>|]+\\)*"),
)
_QUOTED = re.compile(
    r"""(?<=["'])(?!/(?:home|Users)/[^/"']+["'])(?:/[^"'\n/<>]+)+/(?=[^"'\n/<>]+["'])"""
)  # so spaces may be part of it
_HOMES = re.compile(r"""(?<![\w.])(?:/home|/Users|[A-Za-z]:\\Users)[/\\][^/\\\s"'<>:]+([/\\][^\s"'<>:]*)?""")


def scrub(text: str) -> str:
    """`text` without absolute paths, home folders, user and host names; relative paths and web addresses stay."""
    for folder in _known_folders():
        text = text.replace(folder, ELLIPSIS)
    text = _QUOTED.sub(f"{ELLIPSIS}/", text)
    text = _HOMES.sub(_home_file, text)
    for pattern in _PATTERNS:
        text = pattern.sub(f"{ELLIPSIS}/", text)
    for name in _private_names():
        text = re.sub(rf"(?<![\w]){re.escape(name)}(?![\w])", ELLIPSIS, text)
    return text


def _home_file(path: re.Match) -> str:
    """Of a path in a home folder the file's name, of the folder itself nothing."""
    name = re.split(r"[/\\]", path[1] or "")[-1]
    return f"{ELLIPSIS}/{name}" if name else ELLIPSIS


def _known_folders() -> list[str]:
    """The folders of this process whose inner structure may be shown, longest first."""
    folders = {str(checkout.root()), str(Path(sys.prefix)), str(Path.cwd())}
    return sorted((folder for folder in folders if folder.count("/") + folder.count("\\") >= 2), key=len, reverse=True)


def _private_names() -> list[str]:
    """User and host names of this process that are not everyday words."""
    names = {Path.home().name, socket.gethostname(), socket.gethostname().split(".")[0]}
    with contextlib.suppress(OSError, KeyError):  # no such user in the password file, as in some containers
        names.add(getpass.getuser())
    return sorted(
        (name for name in names if len(name) > 2 and name.lower() not in _COMMON_NAMES), key=len, reverse=True
    )
