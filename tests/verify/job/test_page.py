"""The page of a job, read back from a real headless browser."""

import re
from pathlib import Path

import pytest
from job_page import Reader, dump, find_browser

BROWSER = find_browser()
needs_browser = pytest.mark.skipif(BROWSER is None, reason="no chromium is installed")

SECTIONS = (
    *("training", "incidents", "names", "syncs", "versions", "updates"),
    *("measurements", "processes", "patches", "missing"),
)


@pytest.fixture
def page(flashpatch, tmp_path: Path) -> Path:
    assert flashpatch("report", "--run", "job-1", "-o", "job.html").stdout == "job.html\n"
    return tmp_path / "job.html"


@needs_browser
def test_the_page_shows_the_job_without_an_error(page: Path) -> None:
    read = Reader(dump(BROWSER, page))  # it fails where the console has a message
    assert tuple(read.texts)[1:] == SECTIONS
    shown = [(tag, attrs.get("id")) for tag, attrs in read.elements if "hidden" not in attrs]
    assert ("p", "failed") not in shown
    assert "3 processes, 4 recorded weight updates, 2 syncs" in read.text("")
    assert all(word in read.text("") for word in ("proven", "command", "machines", "python"))
    assert read.text("updates").count("committed") == 3 and read.text("updates").count("abandoned") == 1
    assert "gathering" in read.text("syncs") and "1.5" in read.text("syncs")
    assert "</script><b>rank 0 cannot serve & waits</b>" in read.text("incidents")
    assert "the rollouts do not hold one policy" in read.text("incidents")
    assert "Tokens per speculative step" in read.text("measurements")
    assert "k3 1.00e-5 " in read.text("") and "Score" not in read.text("measurements")
    assert read.text("processes").count("ended without a word") == 3
    assert read.text("processes").count("worker") == 1
    assert "broke | the job ended without a word: driver" in read.text("")
    assert "Everything that this page can show was recorded." in read.text("missing")


@needs_browser
def test_charts_are_drawn_and_told_to_who_does_not_see_them(page: Path) -> None:
    canvases = [attrs for tag, attrs in Reader(dump(BROWSER, page)).elements if tag == "canvas"]
    assert len(canvases) == 3 + 9
    for canvas in canvases:
        assert canvas["role"] == "img" and len(canvas["aria-label"]) > 20
        assert int(canvas["height"]) > 50 and int(canvas["width"]) > 200


@needs_browser
def test_headings_tables_and_buttons_have_names(page: Path) -> None:
    elements = Reader(dump(BROWSER, page)).elements
    ids = {attrs["id"] for _, attrs in elements if "id" in attrs}
    links = [attrs["href"] for tag, attrs in elements if tag == "a"]
    assert all(link[1:] in ids for link in links) and len(links) == 1 + len(SECTIONS)
    tags = [tag for tag, _ in elements]
    assert tags.count("caption") == tags.count("table") >= 6
    assert all(attrs.get("scope") == "col" for tag, attrs in elements if tag == "th")
    assert all(attrs.get("aria-label") for tag, attrs in elements if tag in ("button", "input"))
    assert ("html", {"lang": "en"}) in elements


@needs_browser
@pytest.mark.parametrize("scheme", [0, 1], ids=["dark", "light"])
def test_a_scheme_of_colours_is_followed(page: Path, scheme: int) -> None:
    probe = (
        "<script>document.body.dataset.back = getComputedStyle(document.body).backgroundColor</script></body>"
    )
    page.write_text(page.read_text().replace("</body>", probe))
    document = dump(BROWSER, page, f"--blink-settings=preferredColorScheme={scheme}")
    assert re.search(r'data-back="rgb\((\d+)', document).group(1) == ("17" if scheme == 0 else "255")
    assert "rollout/<wbr>spec_<wbr>accept_<wbr>rate" in document  # a long name breaks before a word of it


@needs_browser
def test_a_page_that_fails_says_so_and_the_test_sees_it(page: Path) -> None:
    broken = page.with_name("broken.html")
    broken.write_text(page.read_text().replace("missing();\nfollowTheme();", "throw new Error('broken');"))
    with pytest.raises(AssertionError, match="broken"):
        dump(BROWSER, broken)


def test_the_page_loads_nothing_and_holds_the_licence(page: Path) -> None:
    text = page.read_text()
    assert "default-src 'none'" in text and "sourceMappingURL" not in text
    assert not re.search(r'(?:src|href)="(?!#)', text)
    assert "Permission is hereby granted" in text and "Chart.js" in text
