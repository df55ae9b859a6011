"""Shows the report of a check: terminal, HTML, JSON, Markdown, SARIF, JUnit, and its comparison with a baseline."""
