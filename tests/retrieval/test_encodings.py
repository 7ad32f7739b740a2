"""Files in the encodings of before Unicode: the same text, or an error, never other letters."""

from __future__ import annotations

import unicodedata

import pytest

from retrieval.parsed import ParseError, decode

VIETNAMESE = (
    "Thủ đô của Việt Nam là Hà Nội. Những người sống ở đây rất thân thiện, và “phố cổ” đẹp nhất vào mùa thu.\n\n"
    "Ngày 2 tháng 9 năm 1945, Chủ tịch Hồ Chí Minh đọc bản Tuyên ngôn độc lập tại quảng trường Ba Đình."
)
CHINESE = "床前明月光，疑是地上霜。举头望明月，低头思故乡。"
OTHERS = {
    "Italian": "Però la città è più bella di così: perché non può piovere, né farà freddo, ma c'è la virtù.",
    "French": "À l'été, l'élève préfère déjà la forêt où naît l'œuvre; ça suffît. L’hôtel est là.",
    "Portuguese": "Não há razões: a canção é do avô e da avó, à noite, em São João.",
    "Spanish": "El niño comió en el jardín; ¿qué pasó después? La señora volvió.",
    "German": "Über die Größe der Häuser läßt sich streiten. Schön!",
    "Icelandic": "Það er ekki alltaf gott að vera í borginni, þótt hún sé falleg. Fjöll og ár.",
}


def to_cp1258(text: str) -> bytes:
    """As Windows wrote it: vowels with their shape, tones as signs of their own."""
    out = b""
    for char in unicodedata.normalize("NFC", text):
        try:
            out += char.encode("cp1258")
        except UnicodeEncodeError:
            *shape, tone = unicodedata.normalize("NFD", char)
            if tone == "\u0302" or (tone == "\u0306"):  # the dot below comes before the circumflex
                tone = shape.pop()
                shape.append(unicodedata.normalize("NFD", char)[-1])
            out += (unicodedata.normalize("NFC", "".join(shape)) + tone).encode("cp1258")
    return out


def test_vietnamese_of_the_windows_code_page_is_read() -> None:
    assert decode("a.txt", to_cp1258(VIETNAMESE)) == VIETNAMESE


def test_chinese_is_still_read() -> None:
    assert decode("a.txt", CHINESE.encode("gb18030")) == CHINESE


@pytest.mark.parametrize("language", OTHERS)
def test_other_western_text_is_not_taken_for_vietnamese(language: str) -> None:
    with pytest.raises(ParseError) as e:
        decode("a.txt", OTHERS[language].encode("cp1252"))
    assert e.value.code == "bad_encoding"
