"""Make screenshots of the manual: ``python tools/look_at_docs.py FOLDER [PAGE...] [--dark]``, after ``make docs``.

Each page is shown in a headless Chromium at the width of a desktop and of a phone. A page that is wider than its window
is named, as is one whose code is cut on a desktop, and the exit status is 1. The browser reads ``build/site`` from a
server on loopback and nothing else.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

SITE = Path(__file__).resolve().parent.parent / "build" / "site"
WIDTHS = {"desktop": 1280, "phone": 390}
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--virtual-time-budget=4000",
    "--enable-logging=stderr",
)  # fmt: skip
HEIGHT = 3600
"""Pixels of a page that a screenshot has, from its top."""

# A window is never as narrow as a phone, so the page is shown in a frame, which also measures it.
FRAME = """<!doctype html><body style="margin:0">
<iframe id="f" style="border:0;width:{width}px;height:{height}px"></iframe>
<script>
const index = "{scheme}" === "slate" ? 2 : 1;  // in the palette of mkdocs.yml
const media = "(prefers-color-scheme: " + ["", "light", "dark"][index] + ")";
const choice = {{index, color: {{media, scheme: "{scheme}", primary: "indigo", accent: "indigo"}}}};
localStorage.setItem("/.__palette", JSON.stringify(choice));  // as the switch of the page does
const frame = document.getElementById("f");
frame.onload = () => {{
  const page = frame.contentDocument;
  const blocks = [...page.querySelectorAll(".md-content pre > code")];
  const code = blocks.filter(block => block.scrollWidth > block.clientWidth + 1);
  console.log("width is " + page.documentElement.scrollWidth + " pixels, code is cut " + code.length + " times");
}};
frame.src = "/{page}";
</script>"""


class Handler(SimpleHTTPRequestHandler):
    """Serve the site, and each page in a frame at /frame/WIDTH/HEIGHT/SCHEME/PAGE."""

    def do_GET(self) -> None:
        """Answer a request."""
        if not (match := re.fullmatch(r"/frame/(\d+)/(\d+)/(\w+)/(.+)", self.path)):
            return super().do_GET()
        body = FRAME.format(width=match[1], height=match[2], scheme=match[3], page=match[4]).encode()
        self.send_response(200)
        self.send_header("Content-Type", "text/html; charset=utf-8")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Say nothing."""


def look(browser: str, server: str, folder: Path, dark: bool, page: str, kind: str) -> str | None:
    """Make a screenshot of one page, and return a complaint if it is wider than its window."""
    width, scheme = WIDTHS[kind], "slate" if dark else "default"
    picture = folder / f"{page.removesuffix('.html').replace('/', '_')}-{kind}{'-dark' if dark else ''}.png"
    with tempfile.TemporaryDirectory() as profile:
        command = [browser, *FLAGS, f"--user-data-dir={profile}", f"--window-size={max(width, 500)},{HEIGHT}"]
        command += [f"--screenshot={picture}", f"{server}/frame/{width}/{HEIGHT}/{scheme}/{page}"]
        said = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stderr
    measured = re.search(r"width is (\d+) pixels, code is cut (\d+) times", said)
    if not measured:
        return f"{page} did not load at {width} pixels"
    if int(measured[1]) > width:
        return f"{page} is {measured[1]} pixels wide on a {kind} of {width}"
    if kind == "desktop" and int(measured[2]):
        return f"{page} has {measured[2]} blocks of code that are wider than the page at {width} pixels"
    return None


def main() -> None:
    """Look at the pages that are named, or at all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("pages", nargs="*", help="such as concepts.html; by default all")
    parser.add_argument("--dark", action="store_true")
    arguments = parser.parse_args()
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        sys.exit(f"no browser: none of {', '.join(BROWSERS)} is installed; on Debian and Ubuntu: apt install chromium")
    if not SITE.exists():
        sys.exit(f"{SITE} does not exist: run `make docs` first")
    pages = arguments.pages or sorted(str(path.relative_to(SITE)) for path in SITE.rglob("*.html"))
    arguments.folder.mkdir(parents=True, exist_ok=True)
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=str(SITE))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        place = f"http://127.0.0.1:{server.server_port}"
        views = [(page, kind) for page in pages for kind in WIDTHS]
        with ThreadPoolExecutor(2) as pool:
            shown = partial(look, browser, place, arguments.folder, arguments.dark)
            complaints = list(pool.map(lambda view: shown(*view), views))
        server.shutdown()
    for complaint in filter(None, complaints):
        print(complaint)
    print(f"{2 * len(pages)} screenshots in {arguments.folder}")
    sys.exit(any(complaints))


if __name__ == "__main__":
    main()
