"""tests/integration/clients without the clients, which `make test-clients` runs: the page has what the checks say."""

from __future__ import annotations

from tests.integration.clients.table import PAGE, with_table


def test_the_page_has_the_clients_of_the_checks():
    """`python -m tests.integration.clients.table` writes it."""
    page = PAGE.read_text()
    assert with_table(page) == page and "| langchain 1." in page
