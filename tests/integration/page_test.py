"""The page of a server's HTTP address, in a browser."""

import contextlib
import re
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import (
    Browser,
    Page,
    Route,
    expect,
    sync_playwright,
)

import tfswitch as tsw
from tests.certificates import Authority
from tests.support import ServerProcess, free_ports, make_table
from tests.tokens import TokenFile

pytestmark = pytest.mark.slow

HOT_ID = 77
MARKUP = "<img src=x onerror=\"document.title='run'\">"
# Refreshes, and the time that a browser takes on a busy machine.
PATIENCE_MS = 60_000


class ShownCluster:
    """Two servers with TLS and tokens, which a worker trains.

    Attributes:
        urls: The addresses of the pages.
        servers: Their processes.
        reader: A token that may read all tables.
        limited: A token that may read one.
    """

    def __init__(self, folder: Path, stack: contextlib.ExitStack) -> None:
        tls = Authority(folder).sign("server", trusts=True)
        tokens = TokenFile(folder / "tokens")
        self.reader = tokens.create("read")
        self.limited = tokens.create("read", "movie")
        ports = free_ports(2)
        self.urls = [f"https://127.0.0.1:{port}" for port in ports]
        self.servers = [
            stack.enter_context(
                ServerProcess(
                    shard_index=shard,
                    num_shards=2,
                    flags=(
                        f"--http_address=127.0.0.1:{port}",
                        f"--http_servers={','.join(self.urls)}",
                        *(f"--tls_cert={tls.cert}", f"--tls_key={tls.key}"),
                        f"--token_file={tokens.path}",
                        *(f"--data_dir={folder / str(shard)}", "--push_log"),
                    ),
                )
            )
            for shard, port in enumerate(ports)
        ]
        self._cluster = stack.enter_context(
            tsw.connect(
                "grpcs://" + ",".join(s.address for s in self.servers),
                tls=tsw.Tls(ca=tls.ca),
                token=tokens.create("admin"),
            )
        )

        self._exports = folder / "exports"
        self._has_ended = threading.Event()
        self._thread = threading.Thread(target=self._train)
        self._thread.start()
        stack.callback(self.end_training)

    def _train(self) -> None:
        table = make_table(
            "movie",
            optimizer="adagrad",
            admission=tsw.admission.Probability(0.5),
            statistics=tsw.statistics.Usage(),
            eviction=tsw.eviction.MaxRows(1000),
        )
        markup = make_table(MARKUP)
        worker = tsw.train.Worker(cluster=self._cluster)
        ids = np.arange(300)
        tsw.export.base(self._exports, tables=[markup])
        while not self._has_ended.wait(0.05):
            table.lookup_or_create(ids)
            table.push(ids, np.ones((ids.size, 2), np.float32))
            for _ in range(20):
                table.lookup([HOT_ID])
            markup.lookup_or_create([1])
            worker.end_step()

    def end_training(self) -> None:
        self._has_ended.set()
        self._thread.join()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory) -> Iterator[ShownCluster]:
    with contextlib.ExitStack() as stack:
        yield ShownCluster(tmp_path_factory.mktemp("page"), stack)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path="/usr/bin/chromium",
            args=["--no-sandbox", "--disable-dev-shm-usage"],
            timeout=3 * PATIENCE_MS,
        )
        yield browser
        browser.close()


@pytest.fixture
def page(cluster: ShownCluster, browser: Browser) -> Iterator[Page]:
    """The page of the first server in a new tab, which asks for a token."""
    context = browser.new_context(ignore_https_errors=True)
    context.set_default_timeout(PATIENCE_MS)
    expect.set_options(timeout=PATIENCE_MS)
    page = context.new_page()
    problems: list[str] = []
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.goto(cluster.urls[0])
    yield page
    context.close()
    assert problems == []


def enter(page: Page, token: str) -> None:
    """Types a token into the field, which has the focus."""
    expect(page.get_by_label("Token")).to_be_focused()
    page.keyboard.type(token)
    page.keyboard.press("Enter")


def expect_cell(
    page: Page, section: str, row: str, column: str, pattern: str
) -> None:
    """Waits until the cell's text matches: rates differ between reads."""
    heads = page.locator(f"#{section} thead th").all_inner_texts()
    cells = page.locator(f"#{section} tbody tr").filter(
        has=page.get_by_role("rowheader", name=row, exact=True)
    )
    text = cells.locator("th, td").nth(heads.index(column))
    expect(text).to_have_text(re.compile(f"^{pattern}"))


def wait_for_rates(page: Page) -> None:
    """Waits until two answers of each server are there."""
    expect(page.locator("#servers tbody tr")).to_have_count(2)
    expect(page.locator("#servers tbody")).not_to_contain_text("\u2013")


def test_the_page_asks_for_the_token_and_keeps_it_in_the_tab(
    cluster: ShownCluster, page: Page
) -> None:
    origins = set()
    page.on("request", lambda r: origins.add(r.url.split("/view.json")[0]))
    ask = page.get_by_role("alert")
    expect(ask).to_contain_text("asks for a token")
    enter(page, "tfs_wrong")
    expect(ask).to_contain_text("does not accept this token")
    enter(page, cluster.limited)
    expect(ask).to_contain_text("may not read all tables")
    expect(page.locator("#content")).to_be_hidden()
    enter(page, cluster.reader)
    expect(page.locator("#content")).to_be_visible()
    expect(ask).to_be_hidden()
    expect(page).to_have_title("2 of 2 servers up - tfswitch")

    stores = page.evaluate("[Object.values(sessionStorage), {...localStorage}]")
    assert stores == [[cluster.reader], {}]
    assert page.url == f"{cluster.urls[0]}/"
    assert page.context.cookies() == []
    assert origins == set(cluster.urls)


def test_the_page_shows_servers_tables_workers_and_events(
    cluster: ShownCluster, page: Page
) -> None:
    enter(page, cluster.reader)
    wait_for_rates(page)
    for shard in ("0", "1"):
        for name, pattern in (
            ("state", "up$"),
            ("version", "[0-9]"),
            ("keys/s", "[1-9]"),
            ("last export", ".*s ago$"),
        ):
            expect_cell(page, "servers", shard, name, pattern)
    for name, pattern in (
        ("dim", "2$"),
        ("optimizer", ".*adagrad"),
        ("admission", ".*probability"),
        ("eviction", ".*max_rows"),
        ("rows", "[1-9]"),
        ("pulled keys/s", "[1-9]"),
        ("pushed keys/s", "[1-9]"),
    ):
        expect_cell(page, "tables", "movie", name, pattern)
    expect(page.locator("#heat tbody")).to_contain_text(f"{HOT_ID} (")
    expect(page.locator("#heat tbody svg").first).to_have_accessible_name(
        re.compile("shard 0: hottest virtual shard")
    )
    expect_cell(page, "workers", "train", "steps/s", r"(?=.*[1-9])[0-9.]+$")
    expect(page.locator("#groups")).to_have_text(
        "Group train: 1 running, 0 waiting, 0 lost"
    )
    expect(page.locator("#saves tbody tr")).to_have_count(2)
    expect(page.locator("#events tbody")).to_contain_text("worker_joined")
    plot = page.get_by_role("img", name="Keys a second")
    expect(plot).to_have_accessible_name(re.compile("pulled now [1-9]"))

    # Markup of a server is text.
    expect_cell(page, "tables", MARKUP, "dim", "2$")
    expect(page.locator("#events tbody")).to_contain_text(f"table={MARKUP}")
    expect(page.locator("main img")).to_have_count(0)
    expect(page).to_have_title(re.compile("up - tfswitch$"))


def test_the_keyboard_reaches_all_buttons(
    cluster: ShownCluster, page: Page
) -> None:
    enter(page, cluster.reader)
    wait_for_rates(page)
    reached = set()
    buttons = page.locator("button:visible").all_inner_texts()
    for _ in range(len(buttons) + 20):
        page.keyboard.press("Tab")
        focused = page.locator(":focus")
        reached.add(focused.inner_text() if focused.count() else "")
        if reached >= {"Pause", "pushed keys/s"}:
            break
    assert set(buttons[:3]) | {"hottest / mean"} <= reached

    head = page.locator("#tables th", has_text="pushed keys/s")
    page.keyboard.press("Enter")
    expect(head).to_have_attribute("aria-sort", "descending")
    assert page.locator("#tables tbody th").first.inner_text() == "movie"
    page.keyboard.press("Enter")
    expect(head).to_have_attribute("aria-sort", "ascending")
    assert page.locator("#tables tbody th").first.inner_text() == MARKUP
    # A refresh leaves the focus where it is.
    state = page.locator("#state")
    before = state.inner_text()
    expect(state).not_to_have_text(before)
    expect(head.get_by_role("button")).to_be_focused()

    page.get_by_role("button", name="Pause").press("Enter")
    expect(state).to_contain_text("paused at")
    page.get_by_role("button", name="Resume").press("Enter")
    expect(state).not_to_contain_text("paused at")


def test_axe_finds_nothing_in_light_and_dark(
    cluster: ShownCluster, page: Page
) -> None:
    def check() -> None:
        for scheme in ("light", "dark"):
            page.emulate_media(color_scheme=scheme)
            result = Axe().run(page)
            assert result.violations_count == 0, result.generate_report()

    enter(page, "tfs_wrong")
    expect(page.get_by_role("alert")).to_contain_text("does not accept")
    check()
    enter(page, cluster.reader)
    wait_for_rates(page)
    page.set_viewport_size({"width": 400, "height": 800})
    check()
    assert page.evaluate("document.documentElement.scrollWidth") == 400


def test_a_restarted_server_counts_again_and_a_restoring_one_says_so(
    page: Page,
) -> None:
    uptime, keys, keys_per_sec, tables = 100, 10**9, 1000, "tfswitch_tables 1"

    def answer(route: Route) -> None:
        nonlocal uptime, keys
        uptime += 2
        keys += 2 * keys_per_sec
        bucket = 'tfswitch_call_duration_seconds_bucket{{call="Pull",le="{}"}}'
        lines = [
            f"tfswitch_uptime_seconds {uptime}",
            tables,
            f'tfswitch_table_pulled_keys_total{{table="t"}} {keys}',
            f"{bucket.format('0.001')} {uptime}",
            f"{bucket.format('+Inf')} {uptime}",
            "tfswitch_recovery_remaining_writes 7",
        ]
        view = {
            "shard_index": 0,
            "num_shards": 3,
            "metrics": "\n".join(lines),
            "heats": [],
            "events": [],
            "http_servers": [],
        }
        route.fulfill(json=view)

    page.route("**/view.json", answer)
    enter(page, "any")
    tiles = page.locator("#summary")
    expect(tiles).to_contain_text("pulled keys/s1,000")
    expect(tiles).to_contain_text("pulls, p99990 \u00b5s")
    notes = page.get_by_role("status")
    expect(notes).to_contain_text("1 of 3 servers")
    expect(page.locator("#workers")).to_contain_text("No workers have joined.")
    expect(page.locator("#saves")).to_contain_text("have no --data_dir.")

    uptime, keys, keys_per_sec = 1, 0, 10
    expect(tiles).to_contain_text("pulled keys/s10p")
    rates = page.evaluate("points.map((point) => point.pulled)")
    assert set(rates) == {None, 1000, 10}

    tables = ""
    expect(notes).to_contain_text("restoring (7 writes left)")


def test_a_dead_server_is_shown_as_dead_and_the_others_go_on(
    cluster: ShownCluster, page: Page
) -> None:
    enter(page, cluster.reader)
    wait_for_rates(page)
    cluster.end_training()
    cluster.servers[1].kill()
    status = page.get_by_role("status")
    expect(status).to_contain_text(re.compile("Shard 1 .*: dead since"))
    expect(page).to_have_title("1 of 2 servers up - tfswitch")
    expect_cell(page, "servers", "0", "state", "up$")
    expect_cell(page, "servers", "1", "state", "dead since")
