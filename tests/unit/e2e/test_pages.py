"""What the pages name is there: links, paths, commands."""

from __future__ import annotations

import re

from tests.support.e2e.command import ROOT

PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))]


def test_every_link_leads_somewhere():
    broken = [
        f"{page.name}: {target}"
        for page in PAGES
        for target in re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", page.read_text())
        if not target.startswith("http") and not (page.parent / target).exists()
    ]
    assert broken == []


def test_every_path_that_a_page_names_is_there():
    texts = {page.name: page.read_text() for page in PAGES if page.name != "CHANGELOG.md"}
    paths = [
        (page, path)
        for page, text in texts.items()
        for path in re.findall(r"`((?:nxd_infer|tests|docs|models|server|deploy|examples)/[\w./]*)`", text)
    ]
    assert len(paths) > 30 and [(page, path) for page, path in paths if not (ROOT / path).exists()] == []


def test_every_torchrun_over_machines_says_how_they_meet():
    lines = [
        line
        for page in PAGES
        for line in page.read_text().replace("\\\n", "").splitlines()
        if "torchrun" in line and re.search(r"--nnodes[= ](?!1\b)", line)
    ]
    # Without either, torchrun takes each machine for the first one.
    assert lines and [line for line in lines if not re.search("--rdzv[-_]backend|--node[-_]rank", line)] == []


def test_every_command_that_the_pages_name_exists():
    from nxd_infer.cli.main import app

    known = {command.name or command.callback.__name__ for command in app.registered_commands if command.callback}
    known |= {group.name for group in app.registered_groups}
    for page in PAGES:
        for name in re.findall(r"^(?:\$ )?nxd-infer (\w+)", page.read_text(), re.MULTILINE):
            assert name in known, f"{page.name} names `nxd-infer {name}`"
