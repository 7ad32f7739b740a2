"""The language that an answer is asked for: a name, or a tag such as `vi` or `pt-BR`, as the model is told it."""

from __future__ import annotations

import re

from gateway.errors import ApiError

_NAMES = """
af Afrikaans, am Amharic, ar Arabic, az Azerbaijani, be Belarusian, bg Bulgarian, bn Bengali, bs Bosnian, ca Catalan,
cs Czech, cy Welsh, da Danish, de German, el Greek, en English, eo Esperanto, es Spanish, et Estonian, eu Basque,
fa Persian, fi Finnish, fr French, ga Irish, gl Galician, gu Gujarati, he Hebrew, hi Hindi, hr Croatian, hu Hungarian,
hy Armenian, id Indonesian, is Icelandic, it Italian, ja Japanese, jv Javanese, ka Georgian, kk Kazakh, km Khmer,
kn Kannada, ko Korean, ky Kyrgyz, la Latin, lb Luxembourgish, lo Lao, lt Lithuanian, lv Latvian, mk Macedonian,
ml Malayalam, mn Mongolian, mr Marathi, ms Malay, mt Maltese, my Burmese, nb Norwegian Bokmål, ne Nepali, nl Dutch,
nn Norwegian Nynorsk, no Norwegian, pa Punjabi, pl Polish, ps Pashto, pt Portuguese, ro Romanian, ru Russian,
sd Sindhi, si Sinhala, sk Slovak, sl Slovenian, so Somali, sq Albanian, sr Serbian, su Sundanese, sv Swedish,
sw Swahili, ta Tamil, te Telugu, tg Tajik, th Thai, tk Turkmen, tl Tagalog, tr Turkish, uk Ukrainian, ur Urdu,
uz Uzbek, vi Vietnamese, xh Xhosa, yi Yiddish, yo Yoruba, zh Chinese, zu Zulu
"""
LANGUAGES = dict(entry.split(maxsplit=1) for entry in _NAMES.replace("\n", " ").split(", "))
"""ISO 639-1 code -> name."""

_TAG = re.compile(r"([A-Za-z]{2})(?:[-_]([A-Za-z]{2,4}))?")
_NAME = re.compile(r"[^\W\d_]{2,}(?:[ -][^\W\d_]+){0,3}")


def language_name(given: str) -> str:
    """What the model is told. Raises `ApiError` for what is neither a known tag nor a plain name."""
    tag = _TAG.fullmatch(given)
    if tag and tag.group(1).lower() in LANGUAGES:
        name = LANGUAGES[tag.group(1).lower()]
        return f"{name} ({tag.group(2)})" if tag.group(2) else name
    if tag is None and len(given) <= 40 and _NAME.fullmatch(given):
        return given
    why = f"language must be a name such as Vietnamese or a tag such as vi or pt-BR, got {given[:60]!r}"
    raise ApiError("invalid_request", why, "language")
