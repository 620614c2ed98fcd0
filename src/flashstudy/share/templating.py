"""Templates of the offline pages: one stylesheet, a strict content security policy, everything escaped.

A page links `style.css` beside it; `standalone` puts the stylesheet into the page instead, allowed by its hash, for a
page that travels alone.
"""

import base64
import functools
import hashlib
import re
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

HERE = Path(__file__).parent
STYLESHEET = HERE / "style.css"
_POLICY = "default-src 'none'; img-src data:; style-src {styles}; base-uri 'none'; form-action 'none'"


def render(template: str, *, standalone: bool = False, **context) -> str:
    """The page of one template. Strings in `context` are escaped, Markup is not."""
    style = STYLESHEET.read_text(encoding="utf-8") if standalone else ""
    styles = f"'sha256-{_sha256(style)}'" if standalone else "'self' file:"
    return (
        _environment()
        .get_template(template)
        .render(policy=Markup(_POLICY.format(styles=styles)), style=Markup(style), **context)
    )


@functools.cache
def _environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(HERE / "templates"), autoescape=True, undefined=StrictUndefined, trim_blocks=True,
        lstrip_blocks=True,
    )  # fmt: skip
    environment.filters["intervals"] = _quiet_intervals
    return environment


def _quiet_intervals(text: str) -> Markup:
    """The text, its "[low, high]" set apart so that the estimate leads."""
    return Markup(re.sub(r"\[[^\[\]]{3,60}\]", r'<span class="interval">\g<0></span>', str(escape(text))))


def _sha256(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
