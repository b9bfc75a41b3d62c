"""The pattern of IRIs, by the grammar of RFC 3987. Knows no schema."""

from __future__ import annotations

_UCS = "\u00a0-\ud7ff\uf900-\ufdcf\ufdf0-\uffef" + "".join(
    f"{chr(0x10000 * plane)}-{chr(0x10000 * plane + 0xFFFD)}" for plane in range(1, 14)
)
_UCS += "\U000e1000-\U000efffd"
_PRIVATE = "\ue000-\uf8ff\U000f0000-\U000ffffd\U00100000-\U0010fffd"
_PLAIN = "A-Za-z0-9._~!$&'()*+,;=" + _UCS  # unreserved characters and sub-delims, but for -
_ESCAPED = "%[0-9A-Fa-f]{2}"


def _chars(more: str) -> str:
    return f"([{_PLAIN}{more}-]|{_ESCAPED})"


def _ip_literal() -> str:
    group, byte = "[0-9A-Fa-f]{1,4}", "(25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
    last = rf"({group}:{group}|{byte}(\.{byte}){{3}})"
    before = [f"(({group}:){{0,{most}}}{group})?::" for most in range(7)]
    forms = [f"({group}:){{6}}{last}", f"::({group}:){{5}}{last}"]
    forms += [f"{before[most]}({group}:){{{4 - most}}}{last}" for most in range(5)]
    forms += [f"{before[5]}{group}", before[6]]
    return rf"\[({'|'.join(forms)}|[vV][0-9A-Fa-f]+\.[A-Za-z0-9._~!$&'()*+,;=:-]+)\]"


def _iri() -> str:
    segment, name = _chars(":@"), _chars("")
    authority = f"({_chars(':')}*@)?({_ip_literal()}|{name}*)(:[0-9]*)?"
    rooted = f"/({segment}+(/{segment}*)*)?"
    path = f"(//{authority}(/{segment}*)*|{rooted}|{segment}+(/{segment}*)*|)"
    query, fragment = f"({_chars(':@/?' + _PRIVATE)})*", f"({_chars(':@/?')})*"
    return rf"^[A-Za-z][A-Za-z0-9+.-]*:{path}(\?{query})?(#{fragment})?$"


IRI = _iri()
