"""Build hooks of the documentation site: pages from the top of the tree, links, help texts, tables, mermaid.js."""

from __future__ import annotations

import os
import posixpath
import re
import shlex
import shutil
import subprocess
import sys
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from pymdownx.slugs import slugify
from pymdownx.superfences import fence_code_format
from tables import TOP, table

LIST_OF_PAGES = "docs/README.md"
LINK = re.compile(r"(?<!`)\[([^\]\n]+)\]\(([^)#:\s]+)(#[^)\s]*)?\)")
#: A picture of README in HTML, as one for light and one for dark pages has to be written.
PICTURE = re.compile(r'((?:src|srcset)=")docs/(images/[^"]+)')
HELP = re.compile(r"^<!-- help: (.*) -->$", re.M)
TABLE = re.compile(r"^<!-- (patches|messages)(?:: (\w+))? -->$", re.M)
#: What only a reader of the checkout needs to know.
CHECKOUT = re.compile(r" ?<!-- checkout -->.*?<!-- /checkout -->", re.S)
TABLE_BELOW_COMMENT = re.compile(r"^(<!-- .* -->\n)(?=\|)", re.M)
MERMAID = "assets/mermaid.js"
SHIM = re.compile(r'<script src="https://unpkg.com/iframe-worker/shim"></script>')
#: A page opened from a disk may start no worker: the search's runs in a frame there.
WORKER = """<script>
if (location.protocol === "file:") window.IFrameWorker = window.Worker = class extends EventTarget {
  constructor(url) {
    super();
    const frame = document.createElement("iframe");
    frame.hidden = true;
    document.body.append(frame);
    this.window = frame.contentWindow;
    this.window.postMessage = data => this.dispatchEvent(new MessageEvent("message", {data}));
    this.ready = new Promise(resolve => {
      const script = this.window.document.createElement("script");
      script.src = url;
      script.onload = resolve;
      this.window.document.body.append(script);
    });
  }
  postMessage(data) {
    this.ready.then(() => this.window.dispatchEvent(new this.window.MessageEvent("message", {data})));
  }
  terminate() {}
};
</script>"""


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Give headings the anchors that GitHub gives them, keep the text of diagrams for mermaid.js, and name the version below each page."""
    config.copyright = f"FlashPatch {version('flashpatch')}, Apache-2.0"
    config.mdx_configs["toc"] = {"permalink": True, "slugify": slugify(case="lower")}
    fence = {"name": "mermaid", "class": "mermaid", "format": fence_code_format}
    config.mdx_configs["pymdownx.superfences"] = {"custom_fences": [fence]}
    return config


def on_startup(command: str, dirty: bool) -> None:
    """Lay out the package as it is installed, for the reference: in the tree two of its rooms have other names."""
    root = Path(__file__).parents[2]
    package = root / "build" / "site-packages" / "flashpatch"
    shutil.rmtree(package, ignore_errors=True)
    bytecode = shutil.ignore_patterns("__pycache__")
    for room, inside in ("flashpatch", "."), ("patches", "patches"), ("verify", "verify"):
        shutil.copytree(root / room, package / inside, ignore=bytecode, dirs_exist_ok=True)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages at the top of the tree, and mermaid.js, so that no page loads it from elsewhere."""
    root = _root(config)
    for name, uri in TOP.items():
        files.append(File.generated(config, uri, content=(root / name).read_text(encoding="utf-8")))
    package = find_spec("mermaidx")
    if package is None or package.origin is None:
        raise PluginError("mermaidx is not installed: use make docs")
    script = Path(package.origin).parent / "assets" / "mermaid.js"
    files.append(File.generated(config, MERMAID, content=script.read_bytes()))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Make links to files of the tree links of the site, and put in help texts and tables of records."""
    above = {uri: name for name, uri in TOP.items()}
    source = above.get(page.file.src_uri, f"docs/{page.file.src_uri}")
    folder = posixpath.dirname(page.file.src_uri)

    def link(match: re.Match[str]) -> str:
        text, target, anchor = match[1], match[2], match[3] or ""
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
        if not (_root(config) / path).exists():
            return match[0]  # mkdocs reports it
        if path in TOP:
            return f"[{text}]({posixpath.relpath(TOP[path], folder)}{anchor})"
        if path.startswith("docs/"):
            if path == LIST_OF_PAGES:
                return text  # the navigation is that
            return f"[{text}]({posixpath.relpath(path.removeprefix('docs/'), folder)}{anchor})"
        return f"[{text}]({config.repo_url.rstrip('/')}/blob/HEAD/{path})" if config.repo_url else text

    markdown = PICTURE.sub(lambda match: match[1] + posixpath.relpath(match[2], folder or "."), markdown)
    linked = TABLE_BELOW_COMMENT.sub(r"\1\n", LINK.sub(link, CHECKOUT.sub("", markdown)))
    filled = TABLE.sub(lambda match: table(match[1], match[2]), linked)
    return HELP.sub(lambda match: _help(match[1]), filled)


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    """Load nothing from elsewhere: mermaid.js, on pages with a diagram, is our copy, the search's worker in the page."""
    output = SHIM.sub(lambda _: WORKER, output)
    if 'class="mermaid"' not in output:
        return output
    depth = page.url.count("/")
    script = f'<script src="{"../" * depth}{MERMAID}"></script>'
    return output.replace("</head>", f"{script}</head>", 1)


def _help(command: str) -> str:
    """A block with the help text of a command of this environment."""
    program, *arguments = shlex.split(command)
    done = subprocess.run(
        [Path(sys.executable).parent / program, *arguments, "--help"],
        env={**os.environ, "COLUMNS": "90", "NO_COLOR": "1"},
        capture_output=True,
        text=True,
    )
    if done.returncode != 0:
        raise PluginError(f"{command} --help: exit {done.returncode}\n{done.stderr}")
    return f"```text\n{done.stdout.strip()}\n```"


def _root(config: MkDocsConfig) -> Path:
    return Path(config.config_file_path).parent
