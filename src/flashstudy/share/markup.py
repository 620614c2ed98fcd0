"""Markup of strangers made safe: HTML and SVG of notebook outputs, formulas of Markdown cells.

Everything is rebuilt from lists of what is allowed. Scripts, event handlers, embedded pages, styles, forms and every
reference that a browser would fetch are gone afterwards; links stay as links, to http(s) and within the page.
"""

import base64
import binascii
import html
import re
from xml.etree import ElementTree

import bleach
from bs4 import BeautifulSoup, Comment

from flashstudy.share.style import COLOR_NAMES

SVG, XLINK, MATHML = "http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink", "http://www.w3.org/1998/Math/MathML"


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_HTML_TAGS = _words(
    "a b blockquote br caption code col colgroup dd del details div dl dt em h2 h3 h4 h5 h6 hr i kbd li ol p pre s "
    "samp small span strong sub summary sup table tbody td tfoot th thead tr ul var"
)
_HTML_ATTRIBUTES = {"a": ["href", "title"], "th": ["colspan", "rowspan", "scope"], "td": ["colspan", "rowspan"]}
_CLASSES = {"num", "text", "verdict", "supported", "contradicted", "inconclusive", "not-testable-here", "no-study-yet"}
_DROPPED_WHOLE = [
    "script",
    "style",
    "iframe",
    "object",
    "embed",
    "svg",
    "math",
    "template",
    "noscript",
    "title",
    "head",
]
_SVG_TAGS = _words(
    "svg g path rect circle ellipse line polyline polygon text tspan use defs clipPath linearGradient radialGradient "
    "stop pattern symbol marker image title desc"
)
_SVG_STYLES = _words(
    "fill fill-opacity fill-rule stroke stroke-width stroke-opacity stroke-dasharray stroke-dashoffset stroke-linecap "
    "stroke-linejoin stroke-miterlimit opacity font-size font-weight font-style text-anchor dominant-baseline "
    "clip-path clip-rule display visibility stop-color stop-opacity"
)
_SVG_ATTRIBUTES = _SVG_STYLES | _words(
    "d x y x1 y1 x2 y2 cx cy r rx ry dx dy width height viewBox transform points offset clipPathUnits patternUnits "
    "patternContentUnits patternTransform gradientUnits gradientTransform preserveAspectRatio refX refY markerWidth "
    "markerHeight orient id rotate textLength"
)
_MATH_TAGS = _words(
    "math mrow mi mn mo ms mtext mspace mfrac msqrt mroot msub msup msubsup munder mover munderover mtable mtr mtd "
    "mstyle mpadded mphantom menclose"
)
_MATH_ATTRIBUTES = _words(
    "display mathvariant stretchy fence separator lspace rspace linethickness columnalign rowspacing columnspacing "
    "displaystyle scriptlevel accent accentunder width height depth notation form minsize maxsize symmetric"
)
_UNSAFE_VALUE = re.compile(r"url\s*\((?!\s*['\"]?#)|javascript:|expression|@import|\\", re.I)
_LONG_NUMBER = re.compile(r"(\d+\.\d{2})\d+")


def safe_html(text: str) -> str:
    """HTML of an output with allowed tags only. Classes stay where the stylesheet knows them."""
    soup = BeautifulSoup(text, "html.parser")
    for comment in soup.find_all(string=lambda node: isinstance(node, Comment)):
        comment.extract()
    for element in soup.find_all(_DROPPED_WHOLE):
        element.decompose()
    attributes = {**_HTML_ATTRIBUTES, "*": _is_known_class}
    return bleach.clean(
        str(soup),
        tags=_HTML_TAGS,
        attributes=_merge(attributes),
        protocols={"http", "https"},
        strip=True,
        strip_comments=True,
    )


def safe_svg(text: str, *, prefix: str, label: str) -> str:
    """A figure for inlining: whitelisted, ids prefixed, palette colors as CSS variables, coordinates to 1/100.

    `label` is what a screen reader says. Raises ValueError for text that is no SVG document.
    """
    root = _parse(text)
    if root.tag != f"{{{SVG}}}svg":
        raise ValueError(f"not an SVG document: its root is {root.tag!r}")
    used = set(re.findall(r"(?:url\(|href=[\"'])#([\w.\-]+)", text))
    body = "".join(_svg_element(child, prefix, used) for child in root)
    box = root.get("viewBox", "0 0 440 300")
    if not re.fullmatch(r"[\d.eE+\-\s,]+", box) or len(box.split()) != 4:
        raise ValueError(f"not a usable viewBox: {box!r}")
    width, height = (float(side) * 4 / 3 for side in box.split()[2:])
    return (
        f'<svg xmlns="{SVG}" viewBox="{_short(box)}" width="{width:.0f}" height="{height:.0f}" role="img" '
        f'aria-label="{html.escape(label)}" stroke-linejoin="round">{body}</svg>'
    )


def safe_png(data: str) -> str:
    """A data address of a base64 PNG. Raises ValueError for anything else."""
    try:
        raw = base64.b64decode("".join(data.split()), validate=True)
    except binascii.Error as error:
        raise ValueError(f"not base64: {error}") from None
    if not raw.startswith(b"\x89PNG\r\n\x1a\n"):
        raise ValueError("not a PNG")
    return f"data:image/png;base64,{base64.b64encode(raw).decode()}"


def safe_math(tex: str, *, display: bool) -> str:
    """A formula as MathML; its TeX source as code where it cannot be converted."""
    from latex2mathml.converter import convert

    try:
        root = _parse(convert(tex, display="block" if display else "inline"))
    except Exception:  # the converter raises its own kind for every kind of bad input
        return f"<code>{html.escape(tex)}</code>"
    return _math_element(root)


def _parse(text: str) -> ElementTree.Element:
    if "<!ENTITY" in text:
        raise ValueError("XML entities are not accepted")
    try:
        return ElementTree.fromstring(text)
    except ElementTree.ParseError as error:
        raise ValueError(f"not well-formed: {error}") from None


def _svg_element(element: ElementTree.Element, prefix: str, used: set[str]) -> str:
    name = _local(element.tag, SVG)
    if name not in _SVG_TAGS or name == "svg":
        return ""
    attributes = _svg_attributes(element, prefix, used)
    if name in ("use", "image") and "href" not in attributes:
        return ""
    children = "".join(_svg_element(child, prefix, used) for child in element)
    words = html.escape(element.text.strip()) if name in ("text", "tspan", "title", "desc") and element.text else ""
    if name == "g" and not attributes:
        return children
    tail = "".join(html.escape(child.tail.strip()) for child in element if child.tail and name == "text")
    listed = "".join(f' {key}="{html.escape(value)}"' for key, value in attributes.items())
    return f"<{name}{listed}>{words}{children}{tail}</{name}>" if words or children else f"<{name}{listed}/>"


def _svg_attributes(element: ElementTree.Element, prefix: str, used: set[str]) -> dict[str, str]:
    found = {}
    for key, value in element.attrib.items():
        if key == "style":
            pairs = (part.partition(":") for part in value.split(";"))
            found |= {name.strip(): text.strip() for name, _, text in pairs if name.strip() in _SVG_STYLES}
        elif key in ("href", f"{{{XLINK}}}href"):
            found |= _reference(element, value, prefix)
        elif key in _SVG_ATTRIBUTES:
            found[key] = value
    if found.get("id") not in used:
        found.pop("id", None)
    return {key: _svg_value(key, value, prefix) for key, value in found.items() if not _UNSAFE_VALUE.search(value)}


def _reference(element: ElementTree.Element, value: str, prefix: str) -> dict[str, str]:
    if value.startswith("#"):
        return {"href": f"#{prefix}{value[1:]}"}
    if _local(element.tag, SVG) == "image" and value.startswith("data:image/png;base64,"):
        try:
            return {"href": safe_png(value.partition(",")[2])}
        except ValueError:
            return {}
    return {}


def _svg_value(key: str, value: str, prefix: str) -> str:
    if key == "id":
        return prefix + value
    if key == "href":
        return value
    value = re.sub(r"url\(\s*['\"]?#([\w.\-]+)['\"]?\s*\)", rf"url(#{prefix}\1)", value)
    name = COLOR_NAMES.get(value.lower())
    return f"var(--fig-{name})" if name else _short(value)


def _short(value: str) -> str:
    """Coordinates to a hundredth of a point: half the bytes, no visible change."""
    return " ".join(_LONG_NUMBER.sub(r"\1", value).split())


def _math_element(element: ElementTree.Element) -> str:
    name = _local(element.tag, MATHML)
    if name == "mrow" and (word := _word(element)):
        return f"<mtext>{html.escape(word)}</mtext>"
    children = "".join(_math_element(child) + html.escape(child.tail or "") for child in element)
    if name not in _MATH_TAGS:
        return children
    kept = {key: value for key, value in element.attrib.items() if key in _MATH_ATTRIBUTES}
    listed = "".join(f' {key}="{html.escape(value)}"' for key, value in kept.items())
    return f"<{name}{listed}>{html.escape(element.text or '')}{children}</{name}>"


def _word(element: ElementTree.Element) -> str:
    """The word that an mrow spells letter by letter, upright (\\mathrm) or as a long index; "" for a product."""
    letters = [child for child in element if _local(child.tag, MATHML) in ("mi", "mtext") and not len(child)]
    if len(letters) < 2 or len(letters) != len(element):
        return ""
    upright = all(child.get("mathvariant") == "normal" or _local(child.tag, MATHML) == "mtext" for child in letters)
    word = "".join(child.text or "" for child in letters)
    return word if upright or re.fullmatch(r"[A-Z]{3,}|[a-z]{4,}", word) else ""


def _local(tag: str, namespace: str) -> str:
    """The tag's name in its namespace, "" for one of another namespace."""
    return tag.removeprefix(f"{{{namespace}}}") if isinstance(tag, str) and tag.startswith(f"{{{namespace}}}") else ""


def _merge(allowed: dict):
    return lambda tag, name, value: name in allowed.get(tag, ()) or allowed["*"](name, value)


def _is_known_class(name: str, value: str) -> bool:
    return name == "class" and set(value.split()) <= _CLASSES
