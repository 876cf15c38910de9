"""`matrix.py`: its rows replace those with the same versions in docs/compatibility.md."""

from tests.project.matrix import CPU_TESTS, HEADER, KERNEL_TESTS, PAGE, ROOT, TABLE, table_with

OLD = "| 3.11.7 | 2.11.0 | 3.6.0 | 554 passed, 1 failed | 352 passed | 2026-11-22 |"
NEW = "| 3.11.7 | 2.11.0 | 3.6.0 | 555 passed | 352 passed | 2026-11-23 |"
OTHER = "| 3.11.7 | 2.15.0 | 3.9.0 | 555 passed | 352 passed | 2026-11-22 |"


def test_row_replaces_the_one_with_its_versions():
    assert table_with(f"{HEADER}{OLD}\n{OTHER}\n", NEW) == f"{HEADER}{NEW}\n{OTHER}\n"
    assert table_with(f"{HEADER}{OTHER}\n", NEW) == f"{HEADER}{NEW}\n{OTHER}\n"
    assert table_with(HEADER, OLD) == f"{HEADER}{OLD}\n"


def test_page_has_the_table():
    (table,) = TABLE.findall(PAGE.read_text())
    assert table.startswith(HEADER)


def test_tests_of_the_matrix_exist():
    assert all((ROOT / name).exists() for name in CPU_TESTS + KERNEL_TESTS)
