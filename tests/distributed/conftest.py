"""What the tests of launchers measured, as a table at the end."""

from typing import Any

COLUMNS = ("launcher", "hosts", "seconds")


def pytest_terminal_summary(terminalreporter: Any) -> None:
    rows = [
        tuple(str(dict(report.user_properties)[column]) for column in COLUMNS)
        for outcome in ("passed", "failed")
        for report in terminalreporter.getreports(outcome)
        if report.when == "call" and "launcher" in dict(report.user_properties)
    ]
    if rows:
        terminalreporter.section("launchers")
        for row in (COLUMNS, *rows):
            terminalreporter.write_line(f"{row[0]:<32} {row[1]:<16} {row[2]:>7}")
