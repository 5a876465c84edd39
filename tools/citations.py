"Citations: keys of references.bib as author and year, and the list of the works cited (formatting by pybtex)."

from functools import cached_property
from pathlib import Path

from pybtex.database import parse_file
from pybtex.plugin import find_plugin


class Bibliography:
    "The works in a .bib file."

    def __init__(self, path: Path):
        self.path, self.entries = Path(path), parse_file(str(path)).entries

    def __contains__(self, key: str) -> bool:
        return key in self.entries

    def names(self, key: str) -> str:
        "Surnames as running text has them: A, A and B, or A et al."
        persons = self.entries[key].persons
        people = persons.get("author") or persons["editor"]
        surnames = [" ".join(str(part) for part in p.rich_prelast_names + p.rich_last_names) for p in people]
        return f"{surnames[0]} et al." if len(surnames) > 2 else " and ".join(surnames)

    def year(self, key: str) -> str:
        return self.entries[key].fields["year"]

    @cached_property
    def _format(self):
        style, html = (find_plugin(f"pybtex.{kind}", name)()
                       for kind, name in [("style.formatting", "unsrt"), ("backends", "html")])
        return lambda entry: style.format_entry("", entry).text.render(html).replace("\n", " ")

    def listing(self, keys) -> str:
        "The works with these keys, by name and year, each an anchor that citations point at."
        order = sorted(keys, key=lambda key: (self.names(key), self.year(key), key))
        rows = [f'<p id="ref-{key}">{self._format(self.entries[key])}</p>' for key in order]
        return '<div class="references">\n' + "\n".join(rows) + "\n</div>"
