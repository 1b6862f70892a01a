"""Every command and every program of README and docs is run as it stands there; what pages name exists."""

import os
import re
import shutil

import pytest

from meshwright.cli.main import VERBS
from tests.docs.background import Background
from tests.docs.blocks import PAGES, ROOT, blocks_of, is_run, is_slow, run_page

pytestmark = pytest.mark.timeout(300)

RUN = [
    pytest.param(page, id=page, marks=pytest.mark.slow if is_slow(page) else pytest.mark.long)
    for page in PAGES
    if is_run(page)
]


SHORT = [page for page in PAGES if page.startswith("docs/serving/")]
SHORT += [f"docs/concepts/{name}.md" for name in ("gains", "planner", "replan", "rules", "serving", "step-times")]


@pytest.mark.parametrize("page", RUN)
def test_what_a_page_runs_ends_as_it_says(page, tmp_path):
    asks = any(
        command.startswith("curl ") for block in blocks_of((ROOT / page).read_text()) for command in block.commands
    )
    if asks and not shutil.which("curl") and not os.environ.get("CI"):
        pytest.skip("needs curl")
    for block, command, code, output in run_page(page, tmp_path):
        assert code == block.exit_code, f"{page}: $ {command}\nended with {code}, not {block.exit_code}:\n{output}"


@pytest.mark.parametrize("page", PAGES)
def test_a_file_that_a_page_shows_is_the_file_that_is_there(page):
    shown = [block for block in blocks_of((ROOT / page).read_text()) if block.title]
    for block in shown:
        if block.title.startswith("examples/"):
            assert block.text == (ROOT / block.title).read_text(), f"{page} shows another {block.title}"


@pytest.mark.parametrize("page", PAGES)
def test_no_page_shows_an_output_of_a_program_that_failed(page):
    assert "Traceback (most recent call last)" not in (ROOT / page).read_text()


@pytest.mark.parametrize("page", SHORT)
def test_a_short_page_and_its_paragraphs_stay_short(page):
    text = (ROOT / page).read_text()
    assert len(text.split()) <= 1200
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    parts = re.split(r"\n\n|\n(?=\||[-*] |\d+\. )", prose)
    assert [part for part in parts if len(part.split()) > 120] == []


def test_every_page_is_in_the_navigation():
    named = set(re.findall(r"[\w/-]+\.md", (ROOT / "mkdocs.yml").read_text()))
    assert {page.removeprefix("docs/") for page in PAGES if page != "README.md"} == named


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md"])
def test_links_from_the_root_lead_somewhere(page):
    links = re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", (ROOT / page).read_text())
    missing = [link for link in links if "://" not in link and not (ROOT / link).exists()]
    assert links
    assert not missing


def test_the_transcript_of_a_new_user_types_what_the_readme_says():
    readme, transcript = ((ROOT / page).read_text() for page in ("README.md", "docs/first-ten-minutes.md"))
    (model,) = [block.text for block in blocks_of(readme) if block.title == "model.py"]
    assert model in [block.text for block in blocks_of(transcript) if block.title == "model.py"]
    typed = [command for block in blocks_of(transcript) for command in block.commands]
    commands = re.findall(
        r"^    (meshwright .*model\.py.*|meshwright .*plan\.json.*|meshwright compare .*)$", readme, re.M
    )
    assert len(commands) == 5
    assert set(commands) <= set(typed)


def test_every_verb_has_its_page():
    assert {path.stem for path in (ROOT / "docs" / "commands").glob("*.md")} == set(VERBS)


def test_a_block_that_is_written_over_two_lines_is_one_command():
    text = "<!-- run: exit 3, lines 1-2 -->\n```console\n$ one \\\n    two\nout\n$ three\n```\n"
    (block,) = blocks_of(text)
    assert block.commands == ["one two", "three"]
    assert (block.exit_code, block.lines, block.slow) == (3, (1, 2), False)


def test_a_comment_that_says_nothing_known_is_refused():
    with pytest.raises(ValueError, match="exti 3"):
        blocks_of("<!-- run: exti 3 -->\n```console\n$ one\n```\n")


def test_a_server_of_a_page_has_ports_of_its_own_and_says_so_to_nobody(tmp_path):
    server = Background(tmp_path, tmp_path / "out", {})
    typed = server.typed("curl http://127.0.0.1:8000/v2 127.0.0.1:8001 http://127.0.0.1:8002/status")
    assert ":8000" not in typed
    assert ":8001" not in typed
    assert ":8002" not in typed
    assert server.shown(typed) == "curl http://127.0.0.1:8000/v2 127.0.0.1:8001 http://127.0.0.1:8002/status"
    assert server.end() == (0, "")
