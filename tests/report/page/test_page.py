"""The page as a file: whole, small, without a way out, whatever the names in it are."""

import base64
import hashlib
import json
import re
from importlib import resources
from unicodedata import bidirectional

import pytest

from meshwright.report.page import embed_json, page_document, page_html, result_part, write_page
from meshwright.report.page.html_document import SCRIPTS, START_SCRIPT
from meshwright.spec import DocumentError
from tests.report.page.decoding import Page
from tests.report.page.examples import HOSTILE, full_document, large_timeline

# Bidirectional classes of the explicit formatting characters, as Unicode's own table has them.
TURNS = {"LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI"}
FOLDER = resources.files("meshwright.report.page")


def test_a_page_carries_its_document_unchanged():
    document = full_document()
    assert Page(page_html(document)).document == json.loads(json.dumps(document))


def test_hostile_names_stay_text():
    document = full_document(title=HOSTILE, name=HOSTILE, model=HOSTILE)
    text = page_html(document)
    page = Page(text)
    tags = [tag for tag, _ in page.elements]
    assert tags.count("script") == 2
    assert "img" not in tags
    assert page.document == json.loads(json.dumps(document))
    assert page.texts["title"] == HOSTILE
    assert "\u2028" not in text.split("<title>")[1].split("</title>")[1]


def test_a_name_cannot_turn_the_direction_of_the_sentences_around_it():
    name = "gpt\u202etset"
    document = full_document(title=name, name=name, model=name)
    document = page_document(
        **{**{key: document[key] for key in document if key != "schema"}, "documents": {"a": name}}
    )
    page = Page(page_html(document))
    shown = page.document
    assert shown.pop("documents") == {"a": name}
    text = json.dumps(shown, ensure_ascii=False) + page.texts["title"]
    turning = {character for character in text if bidirectional(character) in TURNS}
    assert turning == set()
    assert page.document["title"] == page.texts["title"] == "gpt\\u202etset"
    # letters that are written from right to left stay
    assert page_document("שלום \u200fa\u2067b\u061cc")["title"] == "שלום \\u200fa\\u2067b\\u061cc"


@pytest.mark.parametrize("text", ["</script>", "<!--", "<script", "&lt;", "\u2028\u2029", "]]>"])
def test_embedded_json_cannot_end_its_element(text):
    embedded = embed_json({text: [text]})
    assert not set("<>&\u2028\u2029") & set(embedded)
    assert json.loads(embedded) == {text: [text]}


def test_the_policy_allows_this_script_and_this_style_and_no_request():
    page = Page(page_html(full_document()))
    for kind in ("script", "style"):
        digest = base64.b64encode(hashlib.sha256(page.texts[kind].encode()).digest()).decode()
        assert f"{kind}-src 'sha256-{digest}'" in page.policy
    assert page.policy.startswith("default-src 'none'")
    assert "unsafe" not in page.policy


def test_a_page_names_no_address_and_no_other_file():
    text = page_html(full_document())
    addresses = set(re.findall(r"\w+://[\w./]+", text))
    assert addresses == {"http://www.w3.org/2000/svg"}  # the name of SVG, which is never fetched
    for tag, attributes in Page(text).elements:
        assert "src" not in attributes, tag
        assert attributes.get("href", "#")[0] in "#d", tag


def test_a_page_of_64_ranks_and_100_000_spans_is_small():
    timeline = large_timeline(noise=0.05)
    assert len(page_html(page_document("large", results=[result_part("it", timelines=[timeline])]))) < 2_000_000


def test_no_file_is_left_where_a_page_cannot_be_written(tmp_path):
    (tmp_path / "taken").mkdir()
    with pytest.raises(DocumentError, match="cannot be written"):
        write_page(full_document(), tmp_path / "taken")
    assert [path.name for path in tmp_path.iterdir()] == ["taken"]


def test_numbers_that_are_none_are_refused():
    with pytest.raises(DocumentError, match="finite"):
        embed_json({"x": float("nan")})


def test_all_scripts_are_in_the_page_and_fit_on_a_few_screens():
    files = {path.name for path in FOLDER.iterdir() if path.name.endswith(".js")}
    assert files == {*SCRIPTS, START_SCRIPT}
    for name in files:
        text = (FOLDER / name).read_text()
        assert len(text.splitlines()) < 400, name
        assert not re.search(
            r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|fetch\(|XMLHttp", text
        ), name
