"""Texts that tokenizers disagree on: by settings, by classes and by versions."""
# ruff: noqa: RUF001  letters that look like others are hard to tell for tokenizers, too

HARD_TEXTS = (
    # Nothing, one character, case.
    *("", " ", "\t", "\n", ".", "a", "hello", "Hello, World!", "HELLO WORLD", "hElLo wOrLd"),
    *("İstanbul ISTANBUL ıI", "Straße STRASSE ẞ", "Σίσυφος ΟΔΟΣ ς", "ПРИВЕТ мир Ёж", "ǅ ﬁne ﬂow Ⅷ ⅷ ①"),
    # Accents, composed and not.
    *("café résumé naïve", "cafe\u0301 re\u0301sume\u0301", "ÀÉÎÕÜ àéîõü", "A\u030a \u00c5 \u212b"),
    *("Tiếng Việt", "Łódź Škoda", "\u0301", "a\u0301\u0327b", "ñandú Ñ", "Ünïcödé ÜNÏCÖDÉ", "œuvre Æsir"),
    # Scripts.
    *("中国人", "中 a国b 人", "日本語のテキスト", "カタカナ", "、。「引用」！", "ｶﾀｶﾅ ﾊﾞ", "ＡＢＣ ｆｕｌｌ １２３"),
    *("한국어 텍스트", "\u1112\u1161\u11ab", "𠀀𠀁", "مرحبا بالعالم", "مَرْحَبًا", "שלום עולם", "हिन्दी पाठ"),
    *("ภาษาไทยไม่มีช่องว่าง", "தமிழ்", "ქართული", "Ελληνικά"),
    # Spaces, and what is not seen.
    *("a  b", "  leading", "trailing  ", " a b ", "tab\tand\t\ttab", "line\nbreak\n\nagain", "crlf\r\nline\r"),
    *("\u00a0no\u00a0break", "\u3000wide\u3000", "em\u2003space", "zero\u200bwidth", "join\u200d\u200cer"),
    *("\ufeffmark", "soft\u00adhyphen", "word\u2060joiner", "\u180e", "a\u2028b\u2029c", "vt\x0bff\x0c"),
    *("nul\x00nul", "bell\x07", "\x7fdel", "a\x85b", "\ufffd?", "\ue000 private", "\u0378", "\u202ertl\u202c"),
    # Punctuation, numbers, code.
    *("don't can't I'm we've they'll", "“quoted” ‘words’", "e.g., i.e.; a/b\\c", "a-b–c—d−e", "#tag @user $5"),
    *("100% ^_^ ~`|<>{}[]()*&=+", "... … !!! ?!", "1,234.56 3.14e-10 0x1F", "https://example.org/a?b=c&d=1#e"),
    *("C++ C# .NET", "snake_case camelCase kebab-case", "=== --- ___", "&amp; <br/>", "«»¿¡§¶†‡•", "™®© €£¥₹"),
    *("½ x² H₂O µ μ ∑∫√∞≠≤", "007 1234567890", "def f(x):\n    return x + 1\n", "    indented", "SELECT * FROM t;"),
    # Emoji.
    *("😀", "👩\u200d👩\u200d👧\u200d👦 family", "🇩🇪🇫🇷", "❤\ufe0f ❤", "👍🏽", "text😀text", "1\ufe0f\u20e3"),
    # Long words.
    *("antidisestablishmentarianism unaffable tokenization", "x" * 99, "x" * 100, "x" * 101, "ab" * 150),
    *("中" * 120, "_" * 120, "1" * 120, "é" * 101),
    # What tokenizers write themselves.
    *("Ġ Ċ ▁ ▁word Ġword", "## ##ing word##ing", "<0x0A> </w> @@", "<s> </s> <pad> <unk> <mask>"),
    *("[CLS] [SEP] [MASK] [PAD] [UNK]", "[mask] <MASK> [Mask]", "a<mask>b a [MASK] b[SEP]", "<|endoftext|>"),
    # A token more each time, to be cut.
    *(" ".join(["the"] * count) for count in range(2, 14)),
)
