"""Pages, docstrings and messages are in plain English: short sentences, and the field's terms."""

from __future__ import annotations

import pytest
from prose import MODULES, PAGES, ROOT, module_problems, problems


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_page_is_plain_english(page):
    found = [f"{page.relative_to(ROOT)}:{line}: {problem}" for line, problem in problems(page.read_text("utf-8"))]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.relative_to(ROOT).as_posix())
def test_docstrings_and_messages_are_plain_english(module):
    found = [f"{module.relative_to(ROOT)}:{line}: {text}" for line, text in module_problems(module.read_text("utf-8"))]
    assert not found, "\n".join(found)


def test_docstrings_and_messages_of_a_module_are_read():
    source = '"""Of old."""\n\nnames = {"as it is": 1}\nraise ValueError(f"x: the kernel of old {names}; why")\n'
    assert [line for line, _ in module_problems(source)] == [1, 4]
    assert not list(module_problems(f'def f():\n    """Help.\n\n    Examples:\n    {"word " * 40}\n    """\n'))


def test_a_long_sentence_is_found():
    assert list(problems("# Title\n\n" + "word " * 31)) == [(3, f"31 words: {' '.join(['word'] * 12)} …")]
    assert not list(problems("word " * 30 + ".\n" + "word " * 30))


def test_an_unclear_expression_is_found_in_tables_too():
    assert [line for line, _ in problems("# Title\n\nText.\n\n| kernel for all chips |\n")] == [5]


def test_code_comments_and_links_do_not_count():
    page = (
        "A `"
        + "word " * 40
        + "` and [a link](https://all-chips.org/in%20turns).\n<!-- in turns -->\n```\nin turns\n```\n"
    )
    assert not list(problems(page))


def test_list_items_and_headings_are_sentences_of_their_own():
    assert not list(problems("".join("- " + "word " * 20 + "\n" for _ in range(3))))
