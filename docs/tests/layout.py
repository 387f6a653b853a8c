"""Lays the pages out for the site: build/pages mirrors the repository, and mkdocs.yml begins there.

A file is taken along if it is a page under docs/, the README, or something that a page taken along
links to.  Nothing in it is rewritten, so a link that works here works there.  The HTTP reference is
made on the way.
"""

import os
import shutil
from pathlib import Path
from urllib.parse import unquote

import yaml
from pages import ROOT, pages
from reference import reference

TARGET = ROOT / "build" / "pages"
DESCRIPTION = ROOT / "docs" / "openapi.yaml"
REFERENCE = Path("docs", "http-reference.md")


def taken_along() -> set[Path]:
    """Paths from the root: README.md, docs/start.md, conformance/scenarios/…/….json, …"""
    known = pages()
    waiting = [name for name in known if name == "README.md" or name.startswith("docs/")]
    taken: set[Path] = {DESCRIPTION.relative_to(ROOT)}
    while waiting:
        name = waiting.pop()
        if Path(name) in taken:
            continue
        taken.add(Path(name))
        for link in known[name].links if name in known else ():
            path = (ROOT / name).parent / unquote(link.target).partition("#")[0]
            if ":" not in link.target and path.is_file():
                # Not resolve(): docs/openapi.yaml is a link to the server's.
                waiting.append(Path(os.path.normpath(path)).relative_to(ROOT).as_posix())
    return taken


def main() -> None:
    """Make build/pages anew; what was built from the old ones is gone."""
    shutil.rmtree(TARGET, ignore_errors=True)
    shutil.rmtree(TARGET.with_name("site"), ignore_errors=True)
    for path in taken_along():
        (TARGET / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / path, TARGET / path)
    description = yaml.safe_load(DESCRIPTION.read_text(encoding="utf-8"))
    (TARGET / REFERENCE).write_text(reference(description), encoding="utf-8")


if __name__ == "__main__":
    main()
