"""Gather the relation suite that head classification ships with, one JSON file per relation.

Run again after any edit of `tools/gathered`; the result is the same to the byte:

    pip install -e ".[gather]"
    python tools/gather_relations.py

1. Hand-gathered lists (`tools/gathered/*.txt`) give facts, word pairs and translations.
2. Word lists of the same folder are inflected with lemminflect (past tense, plural, comparative, ...).
3. The most frequent English words of wordfreq, and counting, give the algorithmic relations.
4. CLDR, through babel, adds the names of countries, languages, months and days to the translations.

A relation is dropped to single words, to NFC, and to pairs that differ (copying aside); sources are sorted.
"""

import json
import re
import unicodedata
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from pathlib import Path
from string import ascii_lowercase, ascii_uppercase

GATHERED = Path(__file__).parent / "gathered"
SUITE = Path(__file__).parents[1] / "src" / "headwater" / "heads" / "suite"
SINGLE_WORD = re.compile(r"[^\W_]+")
BY_HAND = "Written by hand for headwater from general knowledge (tools/gathered/{}.txt)."
LICENCE = "CC0-1.0"

CLDR_LICENCE = "CC0-1.0 AND Unicode-3.0"
LOCALES = {
    "english_to_french": "fr",
    "english_to_spanish": "es",
    "english_to_german": "de",
    "english_to_italian": "it",
    "english_to_portuguese": "pt",
    "english_to_dutch": "nl",
}

Pairs = dict[str, list[str]]


@dataclass
class Gathered:
    """One relation before it is written: `pairs` maps each source to its accepted targets, the commonest first."""

    name: str
    category: str
    description: str
    provenance: str
    licence: str = LICENCE
    pairs: Pairs = field(default_factory=dict)

    def add(self, source: str, targets: Iterable[str]) -> None:
        """Accept `targets` for `source` beside those it has."""
        accepted = self.pairs.setdefault(source, [])
        accepted.extend(target for target in targets if target not in accepted)

    def is_copy(self, source: str, target: str) -> bool:
        """Whether a pair would say nothing but "copy": the same word, for translations in any case."""
        if self.category == "translation":
            return source.casefold() == target.casefold()
        return source == target and "copying" not in self.name

    def as_json(self) -> str:
        """Return the file's text: one pair a line, sources in code-point order."""
        rows = []
        for source, targets in sorted(normalised(self.pairs).items()):
            accepted = [target for target in targets if not self.is_copy(source, target)]
            if accepted:
                rows.append("    " + json.dumps([source, accepted], ensure_ascii=False))
        head = {key: getattr(self, key) for key in ("name", "category", "description", "provenance", "licence")}
        lines = [f"  {json.dumps(key)}: {json.dumps(value, ensure_ascii=False)}," for key, value in head.items()]
        return "{\n" + "\n".join(lines) + '\n  "pairs": [\n' + ",\n".join(rows) + "\n  ]\n}\n"


def normalised(pairs: Pairs) -> Pairs:
    """Return the pairs in NFC, with what is not a single word left out."""
    result: Pairs = {}
    for source, targets in pairs.items():
        accepted = [unicodedata.normalize("NFC", target) for target in targets]
        accepted = [target for target in accepted if SINGLE_WORD.fullmatch(target)]
        source = unicodedata.normalize("NFC", source)
        if SINGLE_WORD.fullmatch(source):
            result[source] = list(dict.fromkeys([*result.get(source, []), *accepted]))
    return result


def read_list(name: str) -> tuple[dict[str, str], list[str]]:
    """Return the `# key: value` header of a hand-gathered list and its other lines."""
    header, body = {}, []
    for line in (GATHERED / f"{name}.txt").read_text(encoding="utf-8").splitlines():
        if line.startswith("# "):
            key, _, value = line[2:].partition(":")
            header[key.strip()] = value.strip()
        elif line.strip():
            body.append(line.strip())
    return header, body


def read_words(name: str) -> list[str]:
    """Return the words of a list of form `words`."""
    return " ".join(read_list(name)[1]).split()


def items_of(form: str, body: list[str]) -> Iterator[tuple[str, list[str]]]:
    """Yield (source, targets) for each item of a list, as its form says (see tools/gathered/README.md)."""
    for line in body:
        if form == "groups":
            targets, _, sources = line.partition(":")
            yield from ((source, targets.split("/")) for source in sources.split())
            continue
        for first, *others in (item.split() for item in line.split(";") if item.strip()):
            if form in ("pairs", "opposites"):
                yield first, others[0].split("/")
            if form == "opposites":
                yield from ((other, [first]) for other in others[0].split("/"))
            if form == "stars":
                yield first, others
                yield from ((other, [first]) for other in others)
            if form == "sets":
                members = [first, *others]
                yield from ((member, [other for other in members if other != member]) for member in members)


def hand_items(name: str) -> list[tuple[str, list[str]]]:
    """Return the (source, targets) items of a hand-gathered list."""
    header, body = read_list(name)
    return list(items_of(header["form"], body))


def from_hand_lists() -> Iterator[Gathered]:
    """Yield the relations whose lists are complete as written."""
    for path in sorted(GATHERED.glob("*.txt")):
        header, _ = read_list(path.stem)
        if "category" not in header:
            continue
        relation = Gathered(path.stem, header["category"], header["description"], BY_HAND.format(path.stem))
        for source, targets in hand_items(path.stem):
            relation.add(source, targets)
        yield relation


def inflected() -> Iterator[Gathered]:
    """Yield the relations from a word to one of its forms, as lemminflect knows them."""
    from lemminflect import getInflection

    forms = [
        ("verb_to_past", "verbs", "verb to its past tense", "VBD"),
        ("verb_to_participle", "verbs", "verb to its past participle", "VBN"),
        ("verb_to_gerund", "verbs", "verb to its -ing form", "VBG"),
        ("verb_to_third_person", "verbs", "verb to its third person singular", "VBZ"),
        ("noun_to_plural", "nouns", "noun to its plural", "NNS"),
        ("adjective_to_comparative", "adjectives", "adjective to its comparative", "JJR"),
        ("adjective_to_superlative", "adjectives", "adjective to its superlative", "JJS"),
    ]
    corrected = corrections()
    for name, words, description, tag in forms:
        provenance = f"Words by hand (tools/gathered/{words}.txt), forms looked up with lemminflect 0.2.3 (MIT)."
        relation = Gathered(name, "linguistic", description, provenance)
        for word in read_words(words):
            relation.add(word, corrected.get((tag, word)) or getInflection(word, tag))
        yield relation


def corrections() -> dict[tuple[str, str], list[str]]:
    """Return {(tag, word): forms} written by hand; a dash stands for a word that is left out."""
    result = {}
    for line in read_list("corrections")[1]:
        tag, _, items = line.partition(":")
        result |= {(tag, word): forms for word, forms in items_of("pairs", [items])}
    return result


def adverbs() -> Iterator[Gathered]:
    """Yield adjective to adverb: -ly, with the spelling rules of -y, -le and the written exceptions."""
    relation = Gathered("adjective_to_adverb", "linguistic", "adjective to its adverb", BY_HAND.format("adverbs"))
    for entry in read_words("adverbs"):
        adjective, _, exception = entry.partition("=")
        relation.add(adjective, [exception or adverb(adjective)])
    yield relation


def adverb(adjective: str) -> str:
    """Return the regular adverb: happy happily, simple simply, quick quickly."""
    if adjective.endswith("y"):
        return adjective[:-1] + "ily" if adjective not in ("shy", "sly") else adjective + "ly"
    if re.search("[^aeiou]le$", adjective):
        return adjective[:-1] + "y"
    return adjective + "ly"


def translations() -> Iterator[Gathered]:
    """Yield English to each language of the table, with CLDR's names, then some of these back to English."""
    header, body = read_list("translations")
    columns = header["columns"].split()
    provenance = BY_HAND.format("translations") + " Names of countries, languages, months and days: CLDR (babel 2.18)."
    relations = {}
    for name in columns:
        language = name.removeprefix("english_to_").capitalize()
        description = f"English word to the same word in {language}"
        relations[name] = Gathered(name, "translation", description, provenance, CLDR_LICENCE)
    for line in body:
        source, *cells = line.split("|")
        for name, cell in zip(columns, cells, strict=True):
            relations[name].add(source, cell.replace("-", "").split("/"))
    for name, locale in LOCALES.items():
        for source, target in cldr_names(locale):
            relations[name].add(source, [target])
    yield from relations.values()
    yield from (backwards(relations[name]) for name in columns[:3])


def cldr_names(locale: str) -> Iterator[tuple[str, str]]:
    """Yield (English name, its name in another locale) of countries, languages, months and days, single words only."""
    from babel import Locale

    english, other = Locale("en"), Locale(locale)
    countries = {code: name for code, name in english.territories.items() if len(code) == 2 and code.isalpha()}
    languages = {code: name for code, name in english.languages.items() if name not in countries.values()}
    tables = [(countries, other.territories), (languages, other.languages)]
    tables += [(english.months["format"]["wide"], other.months["format"]["wide"])]
    tables += [(english.days["format"]["wide"], other.days["format"]["wide"])]
    for ours, theirs in tables:
        for code, name in ours.items():
            if name in known_names() and SINGLE_WORD.fullmatch(theirs.get(code, "")):
                yield name, theirs[code]


@cache
def known_names() -> frozenset[str]:
    """Return the countries and languages that the suite's other lists speak of, with the months and days."""
    countries = [source for name in ("country_to_capital", "country_to_continent") for source, _ in hand_items(name)]
    languages = [target for _, targets in hand_items("country_to_language") for target in targets]
    ordered = " ".join(read_list("sequences")[1]).split()
    return frozenset([*countries, *languages, *ordered])


def backwards(relation: Gathered) -> Gathered:
    """Return the relation from the targets to the sources."""
    language, english = relation.name.split("_to_")[::-1]
    description = f"{language.capitalize()} word to the same word in {english.capitalize()}"
    result = Gathered(f"{language}_to_{english}", "translation", description, relation.provenance, relation.licence)
    for source, targets in relation.pairs.items():
        for target in targets:
            result.add(target, [source])
    return result


def frequent_words(count: int, shortest: int = 3) -> list[str]:
    """Return the most frequent of the suite's own nouns, verbs and adjectives, by wordfreq."""
    from wordfreq import zipf_frequency

    words = {word for name in ("nouns", "verbs", "adjectives") for word in read_words(name) if len(word) >= shortest}
    return sorted(words, key=lambda word: (-zipf_frequency(word, "en"), word))[:count]


def algorithmic() -> Iterator[Gathered]:
    """Yield what can be computed from the word itself: copies, letters, cases, successors."""
    words = frequent_words(800)
    chosen = "The most frequent (by wordfreq 3.1) of the nouns, verbs and adjectives in tools/gathered."
    counted = "Generated by counting."
    letters = [*pairwise(ascii_lowercase), *pairwise(ascii_uppercase)]
    names = read_words("names")
    tables: list[tuple[str, str, str, Iterable[tuple[str, str]]]] = [
        ("word_copying", "word to itself", chosen, zip(words, words, strict=True)),
        ("name_copying", "name to itself", BY_HAND.format("names"), zip(names, names, strict=True)),
        ("word_to_first_letter", "word to its first letter", chosen, ((word, word[0]) for word in words)),
        ("word_to_last_letter", "word to its last letter", chosen, ((word, word[-1]) for word in words)),
        ("word_to_capitalized", "word to itself, capitalized", chosen, ((word, word.capitalize()) for word in words)),
        ("word_to_uppercase", "word to itself in capitals", chosen, ((word, word.upper()) for word in words)),
        ("letter_to_next", "letter to the next of the alphabet", counted, letters),
        ("letter_to_previous", "letter to the one before in the alphabet", counted, ((b, a) for a, b in letters)),
        ("number_to_next", "number to the next", counted, ((str(n), str(n + 1)) for n in range(1000))),
        ("number_to_previous", "number to the one before", counted, ((str(n), str(n - 1)) for n in range(1, 1000))),
        ("year_to_next", "year to the next", counted, ((str(n), str(n + 1)) for n in range(1400, 2100))),
        ("year_to_previous", "year to the one before", counted, ((str(n), str(n - 1)) for n in range(1400, 2100))),
    ]
    for name, description, provenance, pairs in tables:
        relation = Gathered(name, "algorithmic", description, provenance)
        for source, target in pairs:
            relation.add(source, [target])
        yield relation
    yield sequences()


def sequences() -> Gathered:
    """Return the successor relation of words that are counted in a fixed order."""
    relation = Gathered(
        "sequence_to_next", "algorithmic", "word of a fixed order to the next", BY_HAND.format("sequences")
    )
    for line in read_list("sequences")[1]:
        cycle, _, words = line.partition(":")
        order = words.split()
        for word, following in pairwise([*order, order[0]] if cycle == "cycle" else order):
            relation.add(word, [following])
    return relation


def main() -> None:
    """Write every relation into the suite folder and remove files of relations that are no more."""
    SUITE.mkdir(exist_ok=True)
    makers: list[Callable[[], Iterable[Gathered]]] = [from_hand_lists, inflected, adverbs, translations, algorithmic]
    relations = [relation for maker in makers for relation in maker()]
    for stale in set(SUITE.glob("*.json")) - {SUITE / f"{relation.name}.json" for relation in relations}:
        stale.unlink()
    for relation in relations:
        (SUITE / f"{relation.name}.json").write_text(relation.as_json(), encoding="utf-8")
        print(f"{relation.category:12s} {relation.name:28s} {len(relation.pairs)}")


if __name__ == "__main__":
    main()
