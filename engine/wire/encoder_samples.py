"""Sample texts on which two encoders of one vocabulary are compared when a tokenizer is loaded.

This file knows no tokenizer; it makes text that is hard to cut into pieces, the same at every call.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

_TEXTS = (
    "The quick brown fox jumps over the lazy dog. It's, we'll, they've, I'm, you'd, don't, 'RE 'Ll O'Neill's ''s",
    "def f(x: int) -> str:\n\treturn f'{x!r:>8}'  # 0x1F, 3.14e-10, a_b != c**d\r\n\r\n\n    if x:\n        pass\n",
    '{"a": [1, 2.5, null], "b": {"c": "\\u00e9\\n"}}  <div class="x">&amp;</div>  https://example.org/?q=1&r=%20#t',
    "1234567890 12 345 6,789.01 ½ ⅓ Ⅻ ① ٣٤٥ १२३ 〇一二 x2 2x 3³ H₂O 1st 2nd  7   8\t9\n10 \n 11",
    "<|im_start|>system\n<|im_end|><|endoftext|><s></s>[INST] [/INST]<|eot_id|><|start_header_id|><0x0A>▁<pad>",
    "Größe Straße naïve café Ærøskøbing Łódź İstanbul ſhort ﬁ K Å ǅ ŉ 'ſ",
    "Съешь же ещё этих мягких французских булок. Ξεσκεπάζω την ψυχοφθόρα βδελυγμία.",
    "我能吞下玻璃而不伤身体。 いろはにほへと カタカナ ｶﾀｶﾅ 한국어 조선글 ＡＢＣ１２３　全角",
    "نص حكيم له سر قاطع ١٢٣ עברית עם נִקּוּד हिन्दी में वाक्य ภาษาไทยไม่มีช่องว่าง தமிழ் ქართული አማርኛ",
    "😀😃 👩‍👩‍👧‍👦 👍🏽 🇫🇷🇯🇵 ❤️ ☕︎ e\u0301 a\u0308\u0304 n\u0303 Z\u0351\u036b\u0343 \u200b\u200d\ufeff \u202eabc\u202c",
    "a\u00a0b\u2003c\u3000d\u2028e\u2029f\u0085g\u1680h\u180ei\u200aj\u202fk\x0bl\x0cm\x1cn\x1fo\x00p\x7fq\x13r",
    " ", "  ", "\n", "\n\n", " \n", "\n ", "\t\t", " a", "a ", "  a", "a  ", " 1", "  1", "   1", "1 ", "1  ", "  .",
    " \n\n x",
    "a   b    c     d\n\n\n e \t\n f\r\n\r\ng \n\r h   \n", "   leading", "trailing   ", "tab\t 1\t\t2 \t3\n\n4\n 5",
    "!!!???...---===***~~~   ///\\\\\\ ;;;::: '''\"\"\" ((([[[{{{ $$$ €€€ §§ ±× →← ∑∫√ ≠≈ ░▒▓ ♔♕",
    "\ue000\uf8ff\ufffd\ufffe\ufdd0\U0001f9ff\U00020000\U000e0041\U0010ffff\U000f0000",
)  # fmt: skip
_RANGES = ((0, 0x80), (0x80, 0x250), (0x250, 0x3000), (0x3000, 0xD800), (0xE000, 0x10000), (0x10000, 0x33000))
_SPICE = " \n\t\r.,'-1290aeiouTHE"


def sample_texts() -> Iterator[str]:
    """Fixed texts in many scripts, long runs, then pseudo-random ones; about 40,000 characters in all."""
    yield from _TEXTS
    for run in (" ", "\n", "a", "1", "!", "字", "\t \n", "e\u0301", " 1", "'s"):
        yield run * 300
        yield "x" + run * 97 + "y"
    noise = random.Random(1)
    for _ in range(200):
        low, high = noise.choice(_RANGES)
        yield "".join(
            noise.choice(_SPICE) if noise.random() < 0.4 else chr(noise.randrange(low, high)) for _ in range(120)
        )
